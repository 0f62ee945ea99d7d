"""Decode attention: one new token per request over its cached keys, cut into parts that run side by
side."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention import options
from minikv.attention.merge_kernel import merge_kernel, part_size
from minikv.attention.plan import AttentionPlan, decode_tiles_of, uniform_splits, values_in_keys
from minikv.attention.softmax import (
    capped,
    head_columns,
    load_rows,
    log_sum_exp,
    normaliser,
    online_softmax,
    row_factor,
)
from minikv.attention.tiles import (
    DecodeTiles,
    head_blocks,
    power_of_two,
    processors_of,
)
from minikv.device import capability_of, refuse_interpreted_bf16
from minikv.kernels.triton import tl, triton

RULES = {"log": 1, "inverse": 2}


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    opts: options.Options,
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    tiles: DecodeTiles | None = None,
    dependent: bool | None = None,
    early: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the Triton kernels; `tiles` and `dependent`, for tests and tuning, replace what is chosen
    here."""
    refuse_interpreted_bf16(q=q, k_cache=k_cache)
    batch, q_heads, d = q.shape
    kv_heads, d_v = k_cache.shape[1], v_cache.shape[2]
    o = torch.empty((batch, q_heads, d_v), dtype=q.dtype, device=q.device) if out is None else out
    lse = (
        torch.empty((batch, q_heads), dtype=torch.float32, device=q.device) if return_lse else None
    )
    if batch == 0:
        return o if lse is None else (o, lse)
    if tiles is None:
        tiles = decode_tiles_of(q_heads, k_cache, v_cache)
        if plan is not None:
            tiles = plan.tiles_for(batch)
        elif num_splits is None:
            tiles = tiles.for_programs(
                batch * tiles.programs(q_heads, kv_heads), processors_of(q.device)
            )
    lanes = tiles.programs(q_heads, kv_heads)
    if dependent is None:
        dependent = q.device.type == "cuda" and capability_of(q.device) >= (9, 0)
    items, merges, partial, partial_lse = None, None, None, None
    if plan is not None:
        num_items, num_merges, num_splits = (
            plan.capacity(batch),
            plan.entries(batch),
            plan.num_kv_splits or 1,
        )
        partial, partial_lse = plan.partial, plan.partial_lse
        if plan.num_kv_splits is None:
            items, merges = plan.items, plan.merges
    else:
        if num_splits is None:
            num_splits = uniform_splits(
                batch, lanes, kv_indices.shape[0], tiles, processors_of(q.device)
            )
        num_items, num_merges = batch * num_splits, batch
        partial = torch.empty(
            (num_items if num_splits > 1 else 0, q_heads, d_v), dtype=torch.float32, device=q.device
        )
        partial_lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
    block_d, block_tail = head_blocks(d)
    pdl = {"launch_pdl": True} if dependent else {}
    decode_kernel[(lanes, num_items)](
        *(q, k_cache, v_cache, o, lse, partial, partial_lse),
        *(kv_indptr, kv_indices, opts.window_start, opts.sinks, items),
        *(num_splits, q_heads, q_heads // kv_heads, opts.sliding_window, opts.xai_temperature_len),
        *(opts.sm_scale * opts.k_scale, opts.v_scale, opts.logit_cap),
        *(q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1), o.stride(0), o.stride(1)),
        STRIDE_K=k_cache.stride(0),
        STRIDE_V=v_cache.stride(0),
        D=d,
        DV=d_v,
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        BLOCK_TAIL=block_tail,
        BLOCK_DV=max(16, power_of_two(d_v)),
        V_IN_K=values_in_keys(k_cache, v_cache),
        WINDOW=opts.sliding_window >= 0,
        CAP=opts.logit_cap > 0,
        RULE=RULES[opts.xai_temperature_rule] if opts.xai_temperature_len > 0 else 0,
        DEPENDENT=dependent,
        EARLY=dependent and early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl,
    )
    if num_items > batch:
        merge_kernel[(q_heads, num_merges)](
            *(
                partial,
                partial_lse,
                o,
                lse,
                kv_indptr,
                opts.sinks,
                merges,
                num_splits,
                o.stride(0),
                o.stride(1),
            ),
            DV=d_v,
            BLOCK_N=tiles.block_n,
            BLOCK_S=16,
            BLOCK_DV=max(16, power_of_two(d_v)),
            DEPENDENT=dependent,
            EARLY=dependent and early,
            num_warps=4,
            **pdl,
        )
    return o if lse is None else (o, lse)


@triton.jit(do_not_specialize=["num_splits", "window", "temperature_len"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    partial,
    partial_lse,
    kv_indptr,
    kv_indices,
    window_start,
    sinks,
    items,
    num_splits,
    q_heads,
    group,
    window,
    temperature_len,
    scale,
    v_scale,
    cap,
    stride_qb,
    stride_qh,
    stride_kch,
    stride_vch,
    stride_ob,
    stride_oh,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    V_IN_K: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    RULE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one part of one request's keys, for (a block of) the query heads that share one
    KV head.

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j`` by online softmax over tiles of `BLOCK_N`
    keys::

                            keys of the request, through kv_indices
        position     0         BLOCK_N                                    L - 1
                     +---------+---------+---------+---------+---------+----+
        BLOCK_H      |         |         |         |         |         |    |   heads of the group, padded to 16 rows:
        query heads  |  part 0: low      |  part 1           |  part 2      |   K and V are read once for all of them
                     +---------+---------+---------+---------+---------+----+
        program      items[i] = (request, 0, end, row)       ...              one per part and KV head

    A whole request is written to `out`; a part goes, normalised, to its row of `partial` with the
    log-sum-exp that `merge_kernel` weighs it by. Without `items`, program i takes part ``i %
    num_splits`` of request ``i // num_splits`` (see ``part_size``). The slots of a tile are loaded
    one tile ahead, so that the loads of K and V, which depend on them, can be issued early. The
    grid runs over KV heads fastest: programs that read neighbouring bytes of the same slots run
    together.
    """
    if EARLY:  # all that follows may come up meanwhile, and so may what this program reads up to its own wait
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
    elif DEPENDENT:
        tl.extra.cuda.gdc_wait()  # type: ignore
    item = tl.program_id(1)
    if items is None:
        request = item // num_splits
        low = item % num_splits  # the part's number, for now
        high = 0
        place = item
    else:
        request = tl.load(items + item * 4)
        low = tl.load(items + item * 4 + 1)
        high = tl.load(items + item * 4 + 2)
        place = tl.load(items + item * 4 + 3)
    kv_start = tl.load(kv_indptr + tl.maximum(request, 0)).to(tl.int64)
    length = (tl.load(kv_indptr + tl.maximum(request, 0) + 1) - kv_start).to(tl.int32)
    if items is None:
        size = part_size(length, num_splits, BLOCK_N)
        idle = (low > 0) & (low * size >= length)
        place = tl.where(length > size, place, -1)
        low = low * size
        high = low + size
    else:
        idle = request < 0
    if idle:
        if EARLY:
            tl.extra.cuda.gdc_wait()  # type: ignore
        return
    high = tl.minimum(high, length)
    position = length - 1
    seen_from = low
    if WINDOW:
        seen_from = tl.maximum(low, position - window)
        low = seen_from // BLOCK_N * BLOCK_N

    blocks = (group + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // blocks
    member = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = kv_head * group + member
    live_heads = member < group
    columns, tail_columns = head_columns(BLOCK_D, BLOCK_TAIL)
    kc = k_cache + kv_head.to(tl.int64) * stride_kch
    vc = v_cache + kv_head.to(tl.int64) * stride_vch
    # Lanes before and after the visible keys read the nearest visible one again: a mask on every
    # load would cost more, and an unseen slot may hold NaN, which a weight of 0 does not remove.
    slots = kv_indices + kv_start
    kv_pos = low + tl.arange(0, BLOCK_N)
    slot = tl.load(
        slots + tl.minimum(tl.maximum(kv_pos, seen_from), high - 1),
        mask=kv_pos < kv_pos + high - low,
        other=0,
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()  # type: ignore
    q_rows = request.to(tl.int64) * stride_qb + heads * stride_qh
    q_tile = load_rows(q, q_rows, columns, live_heads, D, BLOCK_D)
    if BLOCK_TAIL > 0:
        q_tail = load_rows(q, q_rows, tail_columns, live_heads, D, BLOCK_D + BLOCK_TAIL)
    q_pos = tl.zeros([BLOCK_H], tl.int32) + position
    if window_start is not None:
        q_pos += tl.load(window_start + request).to(tl.int32)
    factor = row_factor(q_pos, scale, cap, temperature_len, CAP, RULE)

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for tile_start in range(low, high, BLOCK_N):
        kv_pos = tile_start + tl.arange(
            0, BLOCK_N
        )  # worked out again in each tile: carried, it would cost registers
        next_slot = tl.load(slots + tl.minimum(kv_pos + BLOCK_N, high - 1))
        seen = kv_pos < high
        if WINDOW:
            seen = seen & (kv_pos >= seen_from)
        row = slot.to(tl.uint32).to(tl.int64)  # slots are below 2^31, element offsets need not be
        k = load_rows(kc, row * STRIDE_K, columns, None, D, BLOCK_D).to(q_tile.dtype)
        qk = tl.dot(q_tile, k.T, input_precision="ieee")
        if BLOCK_TAIL > 0:
            k_tail = load_rows(kc, row * STRIDE_K, tail_columns, None, D, BLOCK_D + BLOCK_TAIL).to(
                q_tile.dtype
            )
            qk = tl.dot(q_tail, k_tail.T, qk, input_precision="ieee")
        p, alpha, m_i, l_i = online_softmax(
            capped(qk, scale, cap, CAP), factor, seen[None, :], m_i, l_i
        )
        if V_IN_K:
            v = k
        else:
            v = load_rows(vc, row * STRIDE_V, tl.arange(0, BLOCK_DV), None, DV, BLOCK_DV).to(
                q_tile.dtype
            )
        acc = tl.dot(p.to(q_tile.dtype), v, acc * alpha[:, None], input_precision="ieee")
        slot = next_slot
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore

    v_columns = tl.arange(0, BLOCK_DV)
    inside = live_heads[:, None] & (v_columns[None, :] < DV)
    if place < 0:
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=live_heads, other=0.0).to(tl.float32)
        o = acc * (normaliser(m_i, l_i, sink) * v_scale)[:, None]
        where = request.to(tl.int64) * stride_ob + heads * stride_oh
        tl.store(out + where[:, None] + v_columns[None, :], o.to(out.dtype.element_ty), mask=inside)
        if lse is not None:
            tl.store(lse + request * q_heads + heads, log_sum_exp(m_i, l_i), mask=live_heads)
    else:
        o = acc * (normaliser(m_i, l_i, None) * v_scale)[:, None]
        where = place.to(tl.int64) * q_heads + heads
        tl.store(partial + where[:, None] * DV + v_columns[None, :], o, mask=inside)
        weight = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(tl.where(l_i == 0.0, 1.0, l_i)))
        tl.store(partial_lse + where, weight, mask=live_heads)
