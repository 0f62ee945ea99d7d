"""Extend attention in one loop: prefix and new tokens from the pool through one list, the same bits
for any batch."""

from __future__ import annotations

from torch import Tensor

from minikv.attention.attend import Keys, Queries, attend_range, find_request, store_rows
from minikv.attention.options import Options, on
from minikv.attention.plan import AttentionPlan
from minikv.attention.softmax import load_queries, nothing_seen, row_factor
from minikv.attention.tiles import (
    grid_places,
    head_sizes,
    pool_descriptors,
    unified_tiles,
)
from minikv.device import capability_of
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton


def launch_unified(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    opts: Options,
    max_extend_len: int | None = None,
    plan: AttentionPlan | None = None,
) -> None:
    """Run the Triton kernel of ``extend_attention_unified`` into `out` and `lse`. A plan
    has nothing to say here: nothing is split."""
    tokens, q_heads, d = q.shape
    batch = kv_indptr.shape[0] - 1
    kv_heads = k_cache.shape[1]
    d_v = v_cache.shape[2]
    if tokens == 0 or batch == 0:
        return
    tiles = unified_tiles(capability_of(q.device), d, d_v, q.dtype)
    compact, places = grid_places(tokens, batch, tiles.block_m, 2, max_extend_len)
    args = (
        *(q, k_cache, v_cache, out, lse),
        *pool_descriptors(q, k_cache, v_cache, opts, tiles),
        *(opts.mask_bytes, opts.sinks, qo_indptr, kv_indptr, kv_indices, prefix_lens),
        *(opts.window_start, opts.mask_indptr),
        *(batch, batch.bit_length(), places, q_heads // kv_heads),
        *(
            on(opts.sliding_window, -1),
            on(opts.xai_temperature_len, -1),
            opts.sm_scale * opts.k_scale,
            opts.v_scale,
        ),
        *(on(opts.logit_cap, 0.0), q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1)),
        *(out.stride(0), out.stride(1)),
    )
    launch(
        unified_kernel,
        (q_heads, places, 1 if compact else batch),
        args,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        STRIDE_K=k_cache.stride(0),
        STRIDE_V=v_cache.stride(0),
        **head_sizes(d, d_v),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CAUSAL=opts.causal and opts.custom_mask is None,
        RULE=opts.xai_temperature_rule,
        MASK_PREFIX=opts.custom_mask is not None and not opts.skip_prefix_mask,
        COMPACT=compact,
    )


@triton.jit(do_not_specialize=["batch", "steps", "places", "window", "temperature_len"])
def unified_kernel(
    q, k_cache, v_cache, out, lse, k_desc, v_desc, custom_mask, sinks,
    qo_indptr, kv_indptr, kv_indices, prefix_lens, window_start, mask_indptr,
    batch, steps, places, group, window, temperature_len, scale, v_scale, cap,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_ot, stride_oh,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RULE: tl.constexpr, MASK_PREFIX: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """One program: one query head, the queries of one request at positions ``tile * BLOCK_M ..``,
    all keys they see.

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j``, keys in tiles that begin at multiples of
    BLOCK_N::

        position   0          BLOCK_N    2 BLOCK_N   prefix = P      P + new
                   +----------+----------+-----------:----+----------:
        tile 0     |  (cached: not computed in this call) |          :
        tile 1     | no mask  | no mask  |   mask    :    |          :   rows before P and past
        tile 2     | no mask  | no mask  | no mask   :no m|   mask   :   P + new have no query
                   +----------+----------+-----------:----+----------:

    Where P lies decides which rows of a tile are stored, never what a row computes: which tiles are
    masked depends on positions alone, tiles without masks come first, and a tile whose keys are all
    masked changes nothing.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    request, begin = find_request(qo_indptr, batch, steps, place, 2, BLOCK_M, COMPACT)
    q_start = tl.load(qo_indptr + request).to(tl.int32)
    new = tl.load(qo_indptr + request + 1).to(tl.int32) - q_start
    kv_start = tl.load(kv_indptr + request).to(tl.int64)
    start = 0
    if window_start is not None:
        start = tl.load(window_start + request).to(tl.int32)
    listed = (tl.load(kv_indptr + request + 1) - kv_start).to(tl.int32)
    q_first = start + tl.load(prefix_lens + request).to(tl.int32)
    first_tile = q_first // BLOCK_M
    if COMPACT:
        tile = (q_first + new + BLOCK_M - 1) // BLOCK_M - 1 - (place - begin)
    else:
        tile = first_tile + places - 1 - place
    if (tile < first_tile) | (tile * BLOCK_M >= q_first + new) | (new <= 0) | (place < begin):
        return

    q_pos = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = q_pos - q_first
    live = (rows >= 0) & (rows < new)
    # Rows before P ask for no key that the first query does not see.
    q_pos = tl.maximum(q_pos, q_first)
    mask_rows = None
    if custom_mask is not None:
        mask_start = tl.load(mask_indptr + request).to(tl.int64) - start
        line = tl.minimum(tl.maximum(rows, 0), new - 1).to(tl.int64) * listed
        mask_rows = custom_mask + mask_start + line

    q_rows = (q_start + rows).to(tl.int64) * stride_qt
    q_tile, q_tail = load_queries(q + head * stride_qh, q_rows, live, D, BLOCK_D, BLOCK_TAIL)
    factor = row_factor(q_pos, temperature_len, scale, cap, RULE)
    kv_head = (head // group).to(tl.int64)
    k, v = k_cache + kv_head * stride_kh, v_cache + kv_head * stride_vh

    # A negative scale would make the maximum a minimum: then all tiles take the masked loop.
    low = start
    high = start + listed
    full_low = start
    full_high = start + listed
    if CAUSAL:
        high = tl.minimum(high, (tile + 1) * BLOCK_M)
        full_high = tile * BLOCK_M + 1
    if window is not None:
        low = tl.maximum(low, tile * BLOCK_M - window)
        full_low = tl.maximum(full_low, (tile + 1) * BLOCK_M - 1 - window)
    mask_from = start
    if not MASK_PREFIX:
        mask_from = q_first
    full_high = tl.where(scale < 0, 0, full_high)
    if custom_mask is not None:
        full_high = 0
    acc, m_i, l_i = attend_range(
        nothing_seen(BLOCK_M, BLOCK_DV),
        Queries(q_tile, q_tail, q_pos),
        Keys(k, v, k_desc, v_desc, head // group, kv_indices + kv_start, -start, 0),
        mask_rows,
        (low, high, full_low, full_high),
        (start, high, mask_from),
        (factor, scale, cap, window),
        STRIDE_K, STRIDE_V, D, DV, BLOCK_N, CAUSAL=CAUSAL, BEGIN=window_start is not None, SKIP="",
    )  # fmt: skip
    row = (q_start + rows).to(tl.int64)
    state = acc * v_scale, m_i, l_i
    store_rows(state, sinks, out, lse, row, head, live, stride_ot, stride_oh, DV, False)
