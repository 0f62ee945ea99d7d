"""Extend attention in one loop: prefix and new tokens from the pool through one list, the same bits
for any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention import descriptors, options
from minikv.attention.extend import RULES
from minikv.attention.softmax import (
    attend,
    find_request,
    head_columns,
    load_rows,
    row_factor,
    store_rows,
    tile_range,
)
from minikv.attention.tiles import (
    grid_places,
    head_blocks,
    power_of_two,
    unified_tiles,
)
from minikv.device import capability_of, refuse_interpreted_bf16
from minikv.kernels.triton import tl, triton


def launch_unified(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, prefix_lens: Tensor, opts: options.Options,
    max_extend_len: int | None = None, return_lse: bool = False, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run the Triton kernel."""
    refuse_interpreted_bf16(q=q, k_cache=k_cache)
    tokens, q_heads, d = q.shape
    batch, kv_heads, d_v = kv_indptr.shape[0] - 1, k_cache.shape[1], v_cache.shape[2]
    o = torch.empty((tokens, q_heads, d_v), dtype=q.dtype, device=q.device) if out is None else out
    lse = (
        torch.empty((tokens, q_heads), dtype=torch.float32, device=q.device) if return_lse else None
    )
    if tokens == 0 or batch == 0:
        return o if lse is None else (o, lse)
    tiles = unified_tiles(capability_of(q.device), d, d_v, q.dtype)
    compact, places = grid_places(tokens, batch, tiles.block_m, 2, max_extend_len)
    block_d, block_tail = head_blocks(d)
    k_desc, v_desc = descriptors.of_pool(q, k_cache, v_cache, opts, tiles, block_d)
    unified_kernel[(q_heads, places, 1 if compact else batch)](
        q, k_cache, v_cache, k_desc, v_desc, o, lse,
        qo_indptr, kv_indptr, kv_indices, prefix_lens, opts.window_start,
        None if opts.custom_mask is None else opts.custom_mask.view(torch.uint8), opts.mask_indptr, opts.sinks,
        batch, batch.bit_length(), places, q_heads // kv_heads,
        opts.sliding_window, opts.xai_temperature_len, opts.sm_scale * opts.k_scale, opts.v_scale, opts.logit_cap,
        q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1), o.stride(0), o.stride(1),
        k_cache.stride(0), v_cache.stride(0),
        D=d, DV=d_v, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=block_d, BLOCK_TAIL=block_tail, BLOCK_DV=max(16, power_of_two(d_v)),
        CAUSAL=opts.causal and opts.custom_mask is None, WINDOW=opts.sliding_window >= 0, CAP=opts.logit_cap > 0,
        RULE=RULES[opts.xai_temperature_rule] if opts.xai_temperature_len > 0 else 0,
        MASK=0 if opts.custom_mask is None else 1 if opts.skip_prefix_mask else 2,
        COMPACT=compact, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return o if lse is None else (o, lse)


@triton.jit(do_not_specialize=["batch", "steps", "places", "window", "temperature_len"])
def unified_kernel(
    q, k_cache, v_cache, k_desc, v_desc, out, lse, qo_indptr, kv_indptr, kv_indices, prefix_lens, window_start,
    custom_mask, mask_indptr, sinks, batch, steps, places, group, window, temperature_len, scale, v_scale, cap,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_ot, stride_oh, stride_k: tl.constexpr, stride_v: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, RULE: tl.constexpr, MASK: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """One program: one query head, the queries of one request at positions ``tile * BLOCK_M ..``,
    all keys they see.

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j``, keys in tiles that begin at multiples of
    BLOCK_N::

        position   0          BLOCK_N    2 BLOCK_N   prefix = P      P + new
                   +----------+----------+-----------:----+----------:
        tile 0     |  (cached: not computed in this call) |          :
        tile 1     | no mask  | no mask  |   mask    :    |          :   rows before P belong to no query here
        tile 2     | no mask  | no mask  | no mask   :no m|   mask   :   rows past P + new neither
                   +----------+----------+-----------:----+----------:

    Where P lies decides which rows of a tile are stored, never what a row computes: which tiles are
    masked depends on positions alone, tiles without masks come first, and a tile whose keys are all
    masked changes nothing.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    if COMPACT:
        request, begin = find_request(qo_indptr, place, batch, steps, 2, BLOCK_M)
    else:
        request = tl.program_id(2)
        begin = 0
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
    q_pos = tl.maximum(
        q_pos, q_first
    )  # rows before P ask for no key that the first query does not see
    mask_rows = rows
    if MASK > 0:
        mask_start = tl.load(mask_indptr + request).to(tl.int64) - start
        mask_rows = (
            custom_mask
            + mask_start
            + tl.minimum(tl.maximum(rows, 0), new - 1).to(tl.int64) * listed
        )

    columns, tail_columns = head_columns(BLOCK_D, BLOCK_TAIL)
    q_rows = (q_start + rows).to(tl.int64) * stride_qt
    q_tile = load_rows(q + head * stride_qh, q_rows, columns, live, D, BLOCK_D)
    q_tail = q_tile
    if BLOCK_TAIL > 0:
        q_tail = load_rows(
            q + head * stride_qh, q_rows, tail_columns, live, D, BLOCK_D + BLOCK_TAIL
        )
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    factor = row_factor(q_pos, scale, cap, temperature_len, CAP, RULE)
    kv_head = (head // group).to(tl.int64)
    k = k_cache + kv_head * stride_kh
    v = v_cache + kv_head * stride_vh
    slots = kv_indices + kv_start

    # A negative scale would make the maximum a minimum: then all tiles take the masked loop.
    low, high, full_low, full_high = start, start + listed, start, start + listed
    if CAUSAL:
        high = tl.minimum(high, (tile + 1) * BLOCK_M)
        full_high = tile * BLOCK_M + 1
    if WINDOW:
        low = tl.maximum(low, tile * BLOCK_M - window)
        full_low = tl.maximum(full_low, (tile + 1) * BLOCK_M - 1 - window)
    mask_from = q_first if MASK == 1 else start
    full_high = tl.where((scale < 0) | (MASK > 0), 0, full_high)
    first, head_tiles, middle, masked = tile_range(low, high, full_low, full_high, BLOCK_N)
    if MASK == 0:
        acc, m_i, l_i = attend(
            acc, m_i, l_i, q_tile, q_tail, q_pos, factor, k, v, k_desc, v_desc, head // group, slots, mask_rows,
            -start, 0, start, high, 0, first + head_tiles, 0, 0, middle, window, scale, cap,
            stride_k, stride_v, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV, 0, False, False, False, CAP,
        )  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q_tile, q_tail, q_pos, factor, k, v, None, None, 0, slots, mask_rows,
        -start, 0, start, high, mask_from, first, head_tiles, middle, masked, window, scale, cap,
        stride_k, stride_v, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV,
        1 + (MASK + 1) // 2, CAUSAL, WINDOW, window_start is not None, CAP,
    )  # fmt: skip
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    token = (q_start + rows).to(tl.int64)
    store_rows(
        acc * v_scale,
        m_i,
        l_i,
        sink,
        out,
        lse,
        token,
        head,
        live,
        stride_ot,
        stride_oh,
        DV,
        BLOCK_DV,
    )
