"""Extend attention in two stages: new queries over a cached prefix in pages, then over their own
new keys."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention import descriptors, options
from minikv.attention.softmax import (
    attend,
    find_request,
    head_columns,
    load_rows,
    log_sum_exp,
    normaliser,
    row_factor,
    store_rows,
    tile_range,
)
from minikv.attention.tiles import (
    Tiles,
    extend_tiles,
    grid_places,
    head_blocks,
    power_of_two,
    prefix_splits,
    processors_of,
)
from minikv.device import capability_of, refuse_interpreted_bf16
from minikv.kernels.triton import tl, triton

RULES = {"log": 1, "inverse": 2}


def launch_extend(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, opts: options.Options,
    max_extend_len: int | None = None, return_lse: bool = False, out: Tensor | None = None,
    num_splits: int | None = None, tiles: Tiles | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run the Triton kernel; `tiles` and `num_splits`, for tests and tuning, replace what is chosen
    here."""
    refuse_interpreted_bf16(q=q, k_cache=k_cache)
    tokens, q_heads, d = q.shape
    batch, kv_heads, d_v = kv_indptr.shape[0] - 1, k_cache.shape[1], v_cache.shape[2]
    o = torch.empty((tokens, q_heads, d_v), dtype=q.dtype, device=q.device) if out is None else out
    lse = (
        torch.empty((tokens, q_heads), dtype=torch.float32, device=q.device) if return_lse else None
    )
    if tokens == 0 or batch == 0:
        return o if lse is None else (o, lse)
    if tiles is None:
        tiles = extend_tiles(capability_of(q.device), d, d_v, q.dtype)
    compact, places = grid_places(tokens, batch, tiles.block_m, 1, max_extend_len)
    layers = 1 if compact else batch
    if num_splits is None:
        programs, mean_prefix = places * q_heads * layers, kv_indices.shape[0] // batch
        num_splits = prefix_splits(processors_of(q.device), programs, mean_prefix, tiles.block_n)
    target, target_lse = o, lse
    if num_splits > 1:
        target = torch.empty(
            (num_splits, tokens, q_heads, d_v), dtype=torch.float32, device=q.device
        )
        target_lse = torch.empty(
            (num_splits, tokens, q_heads), dtype=torch.float32, device=q.device
        )
    block_d, block_tail = head_blocks(d)
    k_desc, v_desc = descriptors.of_rows(k, v, tiles, block_d)
    kc_desc, vc_desc = descriptors.of_pool(q, k_cache, v_cache, opts, tiles, block_d)
    block_dv = max(16, power_of_two(d_v))
    extend_kernel[(q_heads, places * num_splits, layers)](
        q, k, v, k_cache, v_cache, target, target_lse, k_desc, v_desc, kc_desc, vc_desc,
        qo_indptr, kv_indptr, kv_indices, opts.window_start,
        None if opts.custom_mask is None else opts.custom_mask.view(torch.uint8), opts.mask_indptr,
        opts.sinks if num_splits == 1 else None,
        batch, batch.bit_length(), tokens, places, num_splits, q_heads // kv_heads,
        opts.sliding_window, opts.xai_temperature_len, opts.sm_scale, opts.k_scale, opts.v_scale, opts.logit_cap,
        q.stride(0), q.stride(1), k.stride(1), v.stride(1), k_cache.stride(1), v_cache.stride(1),
        target.stride(-3), target.stride(-2),
        k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0),
        D=d, DV=d_v, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=block_d, BLOCK_TAIL=block_tail, BLOCK_DV=block_dv,
        CAUSAL=opts.causal and opts.custom_mask is None, WINDOW=opts.sliding_window >= 0, CAP=opts.logit_cap > 0,
        RULE=RULES[opts.xai_temperature_rule] if opts.xai_temperature_len > 0 else 0,
        MASK=0 if opts.custom_mask is None else 1 if opts.skip_prefix_mask else 2,
        PREFIX=kv_indices.shape[0] > 0, COMPACT=compact, SPLIT=num_splits > 1,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        rows = tokens * q_heads
        merge_kernel[(triton.cdiv(rows, 8),)](
            target, target_lse, o, lse, opts.sinks, rows, q_heads, num_splits, o.stride(0), o.stride(1),
            DV=d_v, BLOCK_R=8, BLOCK_DV=block_dv, num_warps=2,
        )  # fmt: skip
    return o if lse is None else (o, lse)


@triton.jit(
    do_not_specialize=[
        "batch",
        "steps",
        "tokens",
        "places",
        "num_splits",
        "window",
        "temperature_len",
    ]
)
def extend_kernel(
    q, k, v, k_cache, v_cache, out, lse, k_desc, v_desc, kc_desc, vc_desc,
    qo_indptr, kv_indptr, kv_indices, window_start, custom_mask, mask_indptr, sinks,
    batch, steps, tokens, places, num_splits, group, window, temperature_len, scale, k_scale, v_scale, cap,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_kch, stride_vch, stride_ot, stride_oh,
    stride_kt: tl.constexpr, stride_vt: tl.constexpr, stride_kc: tl.constexpr, stride_vc: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, RULE: tl.constexpr, MASK: tl.constexpr,
    PREFIX: tl.constexpr, COMPACT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: one query head, `BLOCK_M` new tokens of one request, all the keys they see (or
    one split of them).

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j`` by online softmax over tiles of `BLOCK_N`
    keys::

                     prefix: through kv_indices          new: k, v directly
                 0          BLOCK_N                P                        P + new
                 +----------+----------+-------+---+------+------+------+------+
        tile 0   |  window  | no mask  |no mask|mask| mask |      |      |      |   ^ launched last
        tile 1   | skipped  |  mask    |no mask|mask|no mk.| mask |      |      |   |
        tile 2   | skipped  | skipped  | mask |mask|no mk.|no mk.| mask |      |   | launched first (longest)
                 +----------+----------+-------+---+------+------+------+------+

    Tiles that every row sees whole go through a loop without masks, the others (edges of the
    window, the prefix's last tile, the causal diagonal, all tiles under a custom mask) through a
    second. The grid runs over heads fastest, so that the heads of a group find the K and V they
    share in L2; then query tiles, longest first; then requests. With SPLIT the prefix is cut into
    `num_splits` parts, `out` and `lse` hold one result per part, and the last part takes the new
    keys.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    split = 0
    if SPLIT:
        split = place % num_splits
        place = place // num_splits
    if COMPACT:
        request, begin = find_request(qo_indptr, place, batch, steps, 1, BLOCK_M)
    else:
        request = tl.program_id(2)
        begin = 0
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
    mask_rows = rows
    if MASK > 0:
        mask_start = tl.load(mask_indptr + request).to(tl.int64)
        mask_rows = (
            custom_mask + mask_start + tl.minimum(rows, new - 1).to(tl.int64) * (prefix + new)
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
    kv_head = (head // group).to(tl.int64)

    new_high = tl.minimum(new, first_row + BLOCK_M) if CAUSAL else new

    # Stage 1, the prefix. A negative scale would make the maximum a minimum: then all tiles take
    # the masked loop.
    if PREFIX:
        low, high = 0, prefix
        if SPLIT:  # equal parts of prefix and new keys together
            part = (
                tl.cdiv(tl.cdiv(prefix, BLOCK_N) + tl.cdiv(new_high, BLOCK_N), num_splits) * BLOCK_N
            )
            low = tl.minimum(split * part, prefix)
            high = tl.where(split == num_splits - 1, prefix, tl.minimum(low + part, prefix))
        full_low, full_high = low, tl.where(scale * k_scale < 0, 0, high)
        if WINDOW:
            low = tl.maximum(low, prefix + first_row - window)
            full_low = tl.maximum(full_low, prefix + last_row - window)
        if MASK == 2:
            full_high = 0
        first, head_tiles, middle, masked = tile_range(low, high, full_low, full_high, BLOCK_N)
        factor = row_factor(absolute, scale * k_scale, cap, temperature_len, CAP, RULE)
        kc, vc, slots = (
            k_cache + kv_head * stride_kch,
            v_cache + kv_head * stride_vch,
            kv_indices + kv_start,
        )
        if MASK < 2:
            acc, m_i, l_i = attend(
                acc, m_i, l_i, q_tile, q_tail, q_pos, factor, kc, vc, kc_desc, vc_desc, head // group, slots,
                mask_rows, 0, 0, 0, prefix, 0, first + head_tiles, 0, 0, middle, window, scale * k_scale, cap,
                stride_kc, stride_vc, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV, 0, False, False, False, CAP,
            )  # fmt: skip
        if masked > 0:
            acc, m_i, l_i = attend(
                acc, m_i, l_i, q_tile, q_tail, q_pos, factor, kc, vc, None, None, 0, slots, mask_rows,
                0, 0, 0, high, 0, first, head_tiles, middle, masked, window, scale * k_scale, cap,
                stride_kc, stride_vc, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV,
                1 + MASK // 2, False, WINDOW, False, CAP,
            )  # fmt: skip
        acc = acc * v_scale

    # Stage 2, the new keys: positions prefix.., in row q_start + position - prefix of k and v.
    low, high = 0, new_high
    full_high = first_row + 1 if CAUSAL else new
    if SPLIT:
        high = tl.where(split == num_splits - 1, high, 0)
        full_high = tl.where(split == num_splits - 1, full_high, 0)
    full_low = low
    if WINDOW:
        low = tl.maximum(low, first_row - window)
        full_low = tl.maximum(full_low, last_row - window)
    full_high = tl.where(scale < 0, 0, full_high)
    if MASK > 0:
        full_high = 0
    first, head_tiles, middle, masked = tile_range(low, high, full_low, full_high, BLOCK_N)
    factor = row_factor(absolute, scale, cap, temperature_len, CAP, RULE)
    kn, vn, base = k + kv_head * stride_kh, v + kv_head * stride_vh, q_start - prefix
    if MASK == 0:  # noqa: SIM102 - an option around a run-time question
        if middle > 0:
            acc, m_i, l_i = attend(
                acc, m_i, l_i, q_tile, q_tail, q_pos, factor, kn, vn, k_desc, v_desc, head // group, None, mask_rows,
                base, prefix, prefix, prefix + new, 0, first + head_tiles, 0, 0, middle, window, scale, cap,
                stride_kt, stride_vt, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV, 0, False, False, False, CAP,
            )  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q_tile, q_tail, q_pos, factor, kn, vn, None, None, 0, None, mask_rows,
        base, prefix, prefix, prefix + high, 0, first, head_tiles, middle, masked, window, scale, cap,
        stride_kt, stride_vt, D, DV, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_DV,
        1 + (MASK + 1) // 2, CAUSAL, WINDOW, False, CAP,
    )  # fmt: skip

    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    token = (q_start + rows).to(tl.int64)
    if SPLIT:
        token += split.to(tl.int64) * tokens
    store_rows(acc, m_i, l_i, sink, out, lse, token, head, live, stride_ot, stride_oh, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["rows", "num_splits"])
def merge_kernel(
    partial, partial_lse, out, lse, sinks, rows, heads, num_splits, stride_ot, stride_oh,
    DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """``o = sum_s e^(lse_s) o_s / (sum_s e^(lse_s) + e^sink)`` for `BLOCK_R` rows of (token, head),
    splits in order."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < rows
    columns = tl.arange(0, BLOCK_DV)
    inside = live[:, None] & (columns[None, :] < DV)
    m_i = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for split in range(num_splits):
        at = row.to(tl.int64) + split * rows.to(tl.int64)
        part = tl.load(partial + at[:, None] * DV + columns[None, :], mask=inside, other=0.0)
        weight = tl.load(partial_lse + at, mask=live, other=float("-inf")) * 1.4426950408889634
        m_new = tl.maximum(m_i, weight)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m_i - m_ref), tl.exp2(weight - m_ref)
        acc = acc * alpha[:, None] + part * beta[:, None]
        l_i = l_i * alpha + beta
        m_i = m_new
    head = row % heads
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    o = acc * normaliser(m_i, l_i, sink)[:, None]
    where = (
        out
        + (row // heads).to(tl.int64)[:, None] * stride_ot
        + head[:, None] * stride_oh
        + columns[None, :]
    )
    tl.store(where, o.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + row, log_sum_exp(m_i, l_i), mask=live)
