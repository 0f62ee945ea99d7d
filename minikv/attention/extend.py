"""Extend attention in two stages: new queries over a cached prefix in pages, then over their own
new keys."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention.attend import Keys, Queries, attend_range, find_request, store_rows
from minikv.attention.merge import merge_parts
from minikv.attention.options import Options, on
from minikv.attention.plan import AttentionPlan
from minikv.attention.softmax import load_queries, nothing_seen, row_factor
from minikv.attention.tiles import (
    Tiles,
    extend_tiles,
    grid_places,
    head_sizes,
    pool_descriptors,
    prefix_splits,
    processors_of,
    row_descriptors,
)
from minikv.device import capability_of
from minikv.errors import ArgumentError
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

MOST_MERGED = 65535  # rows of results in parts: what an axis of a grid holds


def launch_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor | None,
    opts: Options,
    max_extend_len: int | None = None,
    plan: AttentionPlan | None = None,
    num_splits: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Run the Triton kernels of ``extend_attention`` into `out` and `lse`; `num_splits` and `tiles`
    replace what is chosen here. What is launched follows from shapes and numbers alone."""
    tokens, q_heads, d = q.shape
    batch = kv_indptr.shape[0] - 1
    kv_heads = k_cache.shape[1]
    d_v = v_cache.shape[2]
    if tokens == 0 or batch == 0:
        return
    tiles = tiles or extend_tiles(capability_of(q.device), d, d_v, q.dtype)
    compact, places = grid_places(tokens, batch, tiles.block_m, 1, max_extend_len)
    columns = 1 if compact else batch
    if plan is not None:
        num_splits = plan.num_kv_splits
    if num_splits is None:
        programs, mean_prefix = places * q_heads * columns, kv_indices.shape[0] // batch
        num_splits = prefix_splits(processors_of(q.device), programs, mean_prefix, tiles.block_n)
    split = num_splits > 1
    if split and tokens > MOST_MERGED:
        remedy = f"its num_kv_splits is for at most {MOST_MERGED} rows of q; pass none"
        raise ArgumentError("plan", plan, remedy)
    target = out
    target_lse = lse
    sinks = opts.sinks
    if split:
        rows = tokens * num_splits, q_heads
        target = torch.empty((*rows, d_v), dtype=torch.float32, device=q.device)
        target_lse, sinks = torch.empty(rows, dtype=torch.float32, device=q.device), None
    args = (
        *(q, k, v, k_cache, v_cache, target, target_lse),
        *row_descriptors(k, v, tiles),
        *pool_descriptors(q, k_cache, v_cache, opts, tiles),
        *(opts.mask_bytes, sinks, qo_indptr, kv_indptr),
        *(kv_indices if kv_indices.shape[0] else None, opts.window_start, opts.mask_indptr),
        *(batch, batch.bit_length(), places, num_splits if split else None, q_heads // kv_heads),
        *(
            on(opts.sliding_window, -1),
            on(opts.xai_temperature_len, -1),
            opts.sm_scale,
            opts.k_scale,
            opts.v_scale,
        ),
        *(on(opts.logit_cap, 0.0), q.stride(0), q.stride(1), k.stride(1), v.stride(1)),
        *(k_cache.stride(1), v_cache.stride(1), target.stride(0), target.stride(1)),
    )
    launch(
        extend_kernel,
        (q_heads, places * num_splits, columns),
        args,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        STRIDE_KT=k.stride(0),
        STRIDE_VT=v.stride(0),
        STRIDE_KC=k_cache.stride(0),
        STRIDE_VC=v_cache.stride(0),
        **head_sizes(d, d_v),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CAUSAL=opts.causal and opts.custom_mask is None,
        RULE=opts.xai_temperature_rule,
        MASK_PREFIX=opts.custom_mask is not None and not opts.skip_prefix_mask,
        COMPACT=compact,
    )
    if target_lse is not None and split:
        merge_parts(target, target_lse, out, lse, opts.sinks, num_splits)


@triton.jit(
    do_not_specialize=["batch", "steps", "places", "num_splits", "window", "temperature_len"]
)
def extend_kernel(
    q, k, v, k_cache, v_cache, out, lse, k_desc, v_desc, kc_desc, vc_desc, custom_mask, sinks,
    qo_indptr, kv_indptr, kv_indices, window_start, mask_indptr,
    batch, steps, places, num_splits, group, window, temperature_len, scale, k_scale, v_scale, cap,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_kch, stride_vch, stride_ot, stride_oh,
    STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_KC: tl.constexpr,
    STRIDE_VC: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, RULE: tl.constexpr, MASK_PREFIX: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """One program: one query head, `BLOCK_M` new tokens of one request, all the keys they see (or
    one split of them).

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j`` by online softmax over tiles of `BLOCK_N`
    keys::

                   prefix: through kv_indices          new: k, v directly
               0          BLOCK_N                P                        P + new
               +----------+----------+-------+---+------+------+------+------+
        tile 0 |  window  | no mask  |no mask|mask| mask |      |      |      | ^ launched last
        tile 1 | skipped  |  mask    |no mask|mask|no mk.| mask |      |      | |
        tile 2 | skipped  | skipped  | mask |mask|no mk.|no mk.| mask |      | | launched first
               +----------+----------+-------+---+------+------+------+------+   (longest)

    Tiles that every row sees whole go through a loop without masks, the others (edges of the
    window, the prefix's last tile, the causal diagonal, all tiles under a custom mask) through a
    second. The grid runs over heads fastest, so that the heads of a group find the K and V they
    share in L2; then query tiles, longest first; then requests. With `num_splits` the keys are cut
    into so many parts, `out` and `lse` hold a result per part of each row, and the last part takes
    the last new keys.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    split = 0
    if num_splits is not None:
        split = place % num_splits
        place = place // num_splits
    request, begin = find_request(qo_indptr, batch, steps, place, 1, BLOCK_M, COMPACT)
    q_start = tl.load(qo_indptr + request).to(tl.int32)
    new = tl.load(qo_indptr + request + 1).to(tl.int32) - q_start
    if COMPACT:
        tile = (new + BLOCK_M - 1) // BLOCK_M - 1 - (place - begin)
    else:
        tile = places - 1 - place
    if (tile < 0) | (tile * BLOCK_M >= new) | (place < begin):
        return
    kv_start = tl.load(kv_indptr + request).to(tl.int64)
    prefix = (tl.load(kv_indptr + request + 1) - kv_start).to(tl.int32)

    first_row = tile * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, new) - 1
    rows = first_row + tl.arange(0, BLOCK_M)
    live = rows < new
    q_pos = prefix + rows
    absolute = q_pos
    if window_start is not None:
        absolute = q_pos + tl.load(window_start + request).to(tl.int32)
    mask_rows = None
    if custom_mask is not None:
        mask_start = tl.load(mask_indptr + request).to(tl.int64)
        line = tl.minimum(rows, new - 1).to(tl.int64) * (prefix + new)
        mask_rows = custom_mask + mask_start + line

    q_rows = (q_start + rows).to(tl.int64) * stride_qt
    q_tile, q_tail = load_queries(q + head * stride_qh, q_rows, live, D, BLOCK_D, BLOCK_TAIL)
    queries = Queries(q_tile, q_tail, q_pos)
    acc, m_i, l_i = nothing_seen(BLOCK_M, BLOCK_DV)
    kv_head = (head // group).to(tl.int64)
    new_high = tl.minimum(new, first_row + BLOCK_M) if CAUSAL else new

    # Stage 1, the prefix. A negative scale would make the maximum a minimum: then all tiles take
    # the masked loop.
    if kv_indices is not None:
        low, high = 0, prefix
        if num_splits is not None:  # equal parts of prefix and new keys together
            tiles = tl.cdiv(prefix, BLOCK_N) + tl.cdiv(new_high, BLOCK_N)
            part = tl.cdiv(tiles, num_splits) * BLOCK_N
            low = tl.minimum(split * part, prefix)
            high = tl.where(split == num_splits - 1, prefix, tl.minimum(low + part, prefix))
        full_low, full_high = low, tl.where(scale * k_scale < 0, 0, high)
        if window is not None:
            low = tl.maximum(low, prefix + first_row - window)
            full_low = tl.maximum(full_low, prefix + last_row - window)
        if MASK_PREFIX:
            full_high = 0
        factor = row_factor(absolute, temperature_len, scale * k_scale, cap, RULE)
        kc, vc = k_cache + kv_head * stride_kch, v_cache + kv_head * stride_vch
        acc, m_i, l_i = attend_range(
            (acc, m_i, l_i),
            queries,
            Keys(kc, vc, kc_desc, vc_desc, head // group, kv_indices + kv_start, 0, 0),
            mask_rows if MASK_PREFIX else None,
            (low, high, full_low, full_high),
            (0, high, 0),
            (factor, scale * k_scale, cap, window),
            STRIDE_KC, STRIDE_VC, D, DV, BLOCK_N, CAUSAL=False, BEGIN=False, SKIP="masked",
        )  # fmt: skip
        acc = acc * v_scale

    # Stage 2, the new keys: positions prefix.., in row q_start + position - prefix of k and v.
    low, high = 0, new_high
    full_high = first_row + 1 if CAUSAL else new
    if num_splits is not None:
        high = tl.where(split == num_splits - 1, high, 0)
        full_high = tl.where(split == num_splits - 1, full_high, 0)
    full_low = low
    if window is not None:
        low = tl.maximum(low, first_row - window)
        full_low = tl.maximum(full_low, last_row - window)
    full_high = tl.where(scale < 0, 0, full_high)
    if custom_mask is not None:
        full_high = 0
    factor = row_factor(absolute, temperature_len, scale, cap, RULE)
    kn, vn, base = k + kv_head * stride_kh, v + kv_head * stride_vh, q_start - prefix
    state = attend_range(
        (acc, m_i, l_i),
        queries,
        Keys(kn, vn, k_desc, v_desc, head // group, None, base, prefix),
        mask_rows,
        (low, high, full_low, full_high),
        (prefix, prefix + high, 0),
        (factor, scale, cap, window),
        STRIDE_KT, STRIDE_VT, D, DV, BLOCK_N, CAUSAL=CAUSAL, BEGIN=False, SKIP="full",
    )  # fmt: skip

    row = (q_start + rows).to(tl.int64)
    if num_splits is not None:
        row = row * num_splits + split
    store_rows(
        state, sinks, out, lse, row, head, live, stride_ot, stride_oh, DV, num_splits is not None
    )
