"""Decode attention: one new token per request over its cached keys, cut into parts that run side by
side."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention.merge import merge_parts, part_size
from minikv.attention.options import Options, on
from minikv.attention.plan import AttentionPlan, uniform_splits
from minikv.attention.softmax import (
    capped,
    head_columns,
    load_queries,
    load_rows,
    log2_sum,
    log_sum_exp,
    normaliser,
    nothing_seen,
    online_softmax,
    row_factor,
)
from minikv.attention.tiles import (
    decode_tiles_of,
    head_sizes,
    processors_of,
    values_in_keys,
)
from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor | None,
    opts: Options,
    num_kv_splits: int | None = None,
    plan: AttentionPlan | None = None,
    early: bool = False,
) -> None:
    """Run the Triton kernels of ``decode_attention`` into `out` and `lse`."""
    batch, q_heads, d = q.shape
    kv_heads, d_v = k_cache.shape[1], v_cache.shape[2]
    if batch == 0:
        return
    if plan is not None:
        tiles, num_splits = plan.tiles_for(batch), plan.num_kv_splits or 1
        num_items, num_merges = plan.capacity(batch), plan.entries(batch)
        items, merges = plan.items, plan.merges
        partial, partial_lse = plan.partial, plan.partial_lse
    else:
        tiles, num_splits = decode_tiles_of(q_heads, k_cache, v_cache), num_kv_splits
        if num_splits is None:
            processors = processors_of(q.device)
            tiles = tiles.for_programs(batch * tiles.programs(q_heads, kv_heads), processors)
            lanes, entries = tiles.programs(q_heads, kv_heads), kv_indices.shape[0]
            num_splits = uniform_splits(batch, lanes, entries, tiles, processors)
        num_items, num_merges = batch * num_splits, batch
        items, merges = None, None
        rows = num_items if num_splits > 1 else 0, q_heads
        partial = torch.empty((*rows, d_v), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    args = (
        *(q, k_cache, v_cache, out, lse, partial, partial_lse, opts.sinks),
        *(kv_indptr, kv_indices, opts.window_start, items),
        *(
            num_splits,
            q_heads,
            q_heads // kv_heads,
            on(opts.sliding_window, -1),
            on(opts.xai_temperature_len, -1),
        ),
        *(opts.sm_scale * opts.k_scale, opts.v_scale, on(opts.logit_cap, 0.0)),
        *(q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1)),
        *(out.stride(0), out.stride(1)),
    )
    launch(
        decode_kernel,
        (tiles.programs(q_heads, kv_heads), num_items),
        args,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        dependent=True,
        STRIDE_K=k_cache.stride(0),
        STRIDE_V=v_cache.stride(0),
        **head_sizes(d, d_v),
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        V_IN_K=values_in_keys(k_cache, v_cache),
        RULE=opts.xai_temperature_rule,
        EARLY=early,
    )
    if num_items > batch:
        merge_parts(
            *(partial, partial_lse, out, lse, opts.sinks, num_splits),
            merges=merges,
            num_merges=num_merges,
            kv_indptr=kv_indptr,
            block_n=tiles.block_n,
            dependent=True,
            early=early,
        )


@triton.jit
def read_item(items, kv_indptr, num_splits, item, BLOCK_N: tl.constexpr):
    """What program `item` is to do: request, where its list begins, its length, the part's first
    key and end, the row of `partial` (-1: write the result), and whether there is nothing to do."""
    if items is None:
        request = item // num_splits
    else:
        request = tl.load(items + item * 4)
        low = tl.load(items + item * 4 + 1)
        high = tl.load(items + item * 4 + 2)
        place = tl.load(items + item * 4 + 3)
    kv_start = tl.load(kv_indptr + tl.maximum(request, 0)).to(tl.int64)
    length = (tl.load(kv_indptr + tl.maximum(request, 0) + 1) - kv_start).to(tl.int32)
    if items is None:
        number, size = item % num_splits, part_size(length, num_splits, BLOCK_N)
        low = number * size
        high = low + size
        idle = (number > 0) & (low >= length)
        place = tl.where(length > size, item, -1)
    else:
        idle = request < 0
    return request, kv_start, length, low, tl.minimum(high, length), place, idle


@triton.jit(do_not_specialize=["num_splits", "window", "temperature_len"])
def decode_kernel(
    q, k_cache, v_cache, out, lse, partial, partial_lse, sinks,
    kv_indptr, kv_indices, window_start, items,
    num_splits, q_heads, group, window, temperature_len, scale, v_scale, cap,
    stride_qb, stride_qh, stride_kch, stride_vch, stride_ob, stride_oh,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, V_IN_K: tl.constexpr, RULE: tl.constexpr, EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one part of one request's keys, for (a block of) the query heads that share one
    KV head.

    ``o = sum_j softmax_j(cap(scale * q . k_j)) v_j`` by online softmax over tiles of `BLOCK_N`
    keys::

                            keys of the request, through kv_indices
        position     0         BLOCK_N                                    L - 1
                     +---------+---------+---------+---------+---------+----+
        BLOCK_H      |         |         |         |         |         |    |  heads of the group,
        query heads  |  part 0: low      |  part 1           |  part 2      |  padded to 16 rows:
                     |         |         |         |         |         |    |  K and V are read once
                     +---------+---------+---------+---------+---------+----+  for all of them
        program      items[i] = (request, 0, end, row)       ...               one per part, KV head

    A whole request is written to `out`; a part goes, normalised, to its row of `partial` with the
    log-sum-exp that `merge_kernel` weighs it by. Without `items`, program i takes part ``i %
    num_splits`` of request ``i // num_splits`` (see ``part_size``). The slots of a tile are loaded
    one tile ahead, so that the loads of K and V, which depend on them, can be issued early. The
    grid runs over KV heads fastest: programs that read neighbouring bytes of the same slots run
    together.
    """
    # What an early program reads before its second wait is older than the kernel before this one.
    let_next_start(DEPENDENT and EARLY)
    wait_for_previous(DEPENDENT and not EARLY)
    request, kv_start, length, low, high, place, idle = read_item(
        items, kv_indptr, num_splits, tl.program_id(1), BLOCK_N
    )
    if idle:
        wait_for_previous(DEPENDENT and EARLY)
        return
    position = length - 1
    seen_from = low
    if window is not None:
        seen_from = tl.maximum(low, position - window)
        low = seen_from // BLOCK_N * BLOCK_N

    blocks = (group + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // blocks
    member = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = kv_head * group + member
    live_heads = member < group
    columns, tail_columns = head_columns(BLOCK_D, BLOCK_TAIL)
    v_columns = tl.arange(0, BLOCK_DV)
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
    wait_for_previous(DEPENDENT and EARLY)
    q_rows = request.to(tl.int64) * stride_qb + heads * stride_qh
    q_tile, q_tail = load_queries(q, q_rows, live_heads, D, BLOCK_D, BLOCK_TAIL)
    q_pos = tl.zeros([BLOCK_H], tl.int32) + position
    if window_start is not None:
        q_pos += tl.load(window_start + request).to(tl.int32)
    factor = row_factor(q_pos, temperature_len, scale, cap, RULE)

    acc, m_i, l_i = nothing_seen(BLOCK_H, BLOCK_DV)
    for tile_start in range(low, high, BLOCK_N):
        # Worked out again in each tile: carried along, positions would cost registers.
        kv_pos = tile_start + tl.arange(0, BLOCK_N)
        next_slot = tl.load(slots + tl.minimum(kv_pos + BLOCK_N, high - 1))
        seen = kv_pos < high
        if window is not None:
            seen = seen & (kv_pos >= seen_from)
        row = slot.to(tl.uint32).to(tl.int64)  # slots are below 2^31, element offsets need not be
        k = load_rows(kc, row * STRIDE_K, columns, None, D, BLOCK_D).to(q_tile.dtype)
        qk = tl.dot(q_tile, k.T, input_precision="ieee")
        if BLOCK_TAIL > 0:
            k_tail = load_rows(kc, row * STRIDE_K, tail_columns, None, D, BLOCK_D + BLOCK_TAIL)
            qk = tl.dot(q_tail, k_tail.to(q_tile.dtype).T, qk, input_precision="ieee")
        x = capped(qk, scale, cap)
        p, alpha, m_i, l_i = online_softmax(x, factor, seen[None, :], m_i, l_i)
        if V_IN_K:
            v = k
        else:
            v = load_rows(vc, row * STRIDE_V, v_columns, None, DV, BLOCK_DV).to(q_tile.dtype)
        acc = tl.dot(p.to(q_tile.dtype), v, acc * alpha[:, None], input_precision="ieee")
        slot = next_slot
    let_next_start(DEPENDENT)

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
        tl.store(partial_lse + where, log2_sum(m_i, l_i), mask=live_heads)
