"""Many queries over many keys: the loop over tiles that both extend kernels share, and what comes
before and after it."""

from __future__ import annotations

from typing import Any, NamedTuple

from minikv.attention.softmax import (
    capped,
    load_rows,
    log2_sum,
    log_sum_exp,
    normaliser,
    online_softmax,
    visible,
)
from minikv.kernels.triton import tl, triton


class Queries(NamedTuple):
    """The queries of one program, M rows of one head."""

    tile: Any  # [M, BLOCK_D]
    tail: Any  # [M, BLOCK_TAIL]: the columns after those; of no meaning if there are none
    pos: Any  # [M]: positions, as masks count them


class Keys(NamedTuple):
    """Where the keys of one request and head lie: the key at position p in row ``slots[base + p]``
    of the pool or, where `slots` is None, in row ``base + p`` of the new keys."""

    k: Any  # pointers to the head's columns of row 0
    v: Any
    k_desc: Any  # descriptors of whole tiles of the same rows, or None
    v_desc: Any
    column: Any  # which head's columns the descriptors are to take
    slots: Any
    base: Any
    origin: Any  # the position at which tile 0 begins


@triton.jit
def tile_range(lo, hi, full_lo, full_hi, BLOCK_N: tl.constexpr):
    """Cut the keys [lo, hi) into tiles: the middle ones, whole within [full_lo, full_hi), need no
    mask.

    Returns (first tile, masked tiles before the middle, tiles in the middle, masked tiles in all).
    """
    first = lo // BLOCK_N
    last = tl.where(hi > lo, (hi + BLOCK_N - 1) // BLOCK_N, first)
    full_first = tl.minimum(tl.maximum((full_lo + BLOCK_N - 1) // BLOCK_N, first), last)
    full_last = tl.minimum(tl.maximum(full_hi // BLOCK_N, full_first), last)
    middle = full_last - full_first
    return first, full_first - first, middle, last - first - middle


@triton.jit
def find_request(
    qo_indptr,
    batch,
    steps,
    place,
    EXTRA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """The request that owns `place` of the grid's middle axis, and that request's first place.

    The plain grid has a column of places for each request. In the compact one request b owns the
    places from ``qo_indptr[b] // BLOCK_M + EXTRA * b`` on: never fewer than its query tiles, at
    most EXTRA more, and known without reading lengths back to the host. `steps` halvings find it.
    """
    low, high, begin = place * 0, batch + place * 0, place * 0
    if not COMPACT:
        return tl.program_id(2), begin
    for _ in range(steps):
        middle = (low + high) // 2
        candidate = (tl.load(qo_indptr + middle) // BLOCK_M + EXTRA * middle).to(tl.int32)
        below = candidate <= place
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
        begin = tl.where(below, candidate, begin)
    return low, begin


@triton.jit
def tile_rows(
    keys, tile, begin, end, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr
):
    """Positions [N] of the keys of a tile, and the rows where they lie. WHOLE tiles of the pool are
    loaded by descriptor: they have one row, that of the first key."""
    kv_pos = keys.origin + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = keys.base + kv_pos
    if keys.slots is not None:
        if WHOLE:
            row = tl.load(keys.slots + keys.base + keys.origin + tile * BLOCK_N).to(tl.int32)
        elif MASKED:
            listed = (kv_pos >= begin) & (kv_pos < end)
            row = tl.load(keys.slots + row, mask=listed, other=0).to(tl.int32)
        else:
            row = tl.load(keys.slots + row).to(tl.int32)
    return kv_pos, row


@triton.jit
def what_is_seen(
    queries, kv_pos, mask_rows, bounds, window, CAUSAL: tl.constexpr, BEGIN: tl.constexpr
):
    """Masks of a tile: which query sees which key [M, N] or [1, N], which keys exist [N], and which
    values a query sees [N]. A masked key has weight 0, but 0 * NaN is NaN: keys and values outside
    these masks are replaced by 0 as they load."""
    begin, end, mask_from = bounds
    live = kv_pos < end
    if BEGIN:
        live = live & (kv_pos >= begin)
    seen = visible(queries.pos, kv_pos, begin, end, window, CAUSAL, BEGIN)
    live_v = live
    if window is not None:
        live_v = live_v & (kv_pos >= tl.min(queries.pos, 0) - window)
    if mask_rows is not None:
        read = live & (kv_pos >= mask_from)
        where = mask_rows[:, None] + kv_pos[None, :]
        seen = seen & (tl.load(where, mask=read[None, :], other=1) != 0)
        live_v = live_v & (tl.max(seen.to(tl.int32), 0) > 0)
    return seen, live, live_v


@triton.jit
def attend(
    state,
    queries,
    keys,
    mask_rows,
    walk,
    bounds,
    scores,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BEGIN: tl.constexpr,
):
    """Let one tile of queries see some tiles of keys: ``acc, m_i, l_i`` after them.

    Parameters: state ``acc, m_i, l_i``; queries :class:`Queries`; keys :class:`Keys`; mask_rows [M]
    pointers to each query's row of the custom mask, or None; walk ``first,
    head_tiles, gap, num_tiles``: tile i of `num_tiles` is number ``first + i``, `gap` further on
    from the `head_tiles`-th, since masked tiles lie before and after the unmasked ones; bounds
    ``begin, end, mask_from``: keys exist at positions ``begin .. end``, and the custom mask is read
    from position `mask_from` on; scores ``factor, scale, cap, window``. Without MASKED every query
    sees every key of these tiles.

    The slots of a tile are loaded one tile ahead, so that the loads of K and V, which depend on
    them, can be issued early. Descriptors of the pool promise that no tile crosses a page, so that
    one slot says where it lies.
    """
    acc, m_i, l_i = state
    first, head_tiles, gap, num_tiles = walk
    begin, end, _ = bounds
    factor, scale, cap, window = scores
    BLOCK_D: tl.constexpr = queries.tile.shape[1]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    dtype: tl.constexpr = queries.tile.dtype
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_DV)
    first_tile = first + tl.where(head_tiles > 0, 0, gap)
    WHOLE: tl.constexpr = keys.k_desc is not None and not MASKED  # type: ignore
    kv_pos, row = tile_rows(keys, first_tile, begin, end, BLOCK_N, True, WHOLE)
    for i in range(num_tiles):
        if MASKED:
            next_tile = first + i + 1 + tl.where(i + 1 >= head_tiles, gap, 0)
        else:
            next_tile = first + tl.minimum(i + 1, num_tiles - 1)
        next_pos, next_row = tile_rows(keys, next_tile, begin, end, BLOCK_N, MASKED, WHOLE)
        seen, live, live_v = None, None, None
        if MASKED:
            seen, live, live_v = what_is_seen(
                queries, kv_pos, mask_rows, bounds, window, CAUSAL, BEGIN
            )
        at = row
        if keys.slots is not None and WHOLE:
            at = row + tl.arange(0, BLOCK_N)
        at = at.to(tl.uint32).to(tl.int64)  # rows are below 2^31, element offsets need not be
        if not WHOLE:
            k = load_rows(keys.k, at * STRIDE_K, columns, live, D, BLOCK_D).to(dtype)
            v = load_rows(keys.v, at * STRIDE_V, v_columns, live_v, DV, BLOCK_DV).to(dtype)
        else:
            tile_row = keys.base + keys.origin + (first + i) * BLOCK_N
            if keys.slots is not None:
                tile_row = row
            k = keys.k_desc.load([tile_row, keys.column * D])  # type: ignore
            v = keys.v_desc.load([tile_row, keys.column * DV])
        qk = tl.dot(queries.tile, k.T, input_precision="ieee")
        if BLOCK_D < D:
            BLOCK_TAIL: tl.constexpr = queries.tail.shape[1]
            tail_columns = BLOCK_D + tl.arange(0, BLOCK_TAIL)
            k_tail = load_rows(keys.k, at * STRIDE_K, tail_columns, live, D, BLOCK_D + BLOCK_TAIL)
            qk = tl.dot(queries.tail, k_tail.to(dtype).T, qk, input_precision="ieee")
        p, alpha, m_i, l_i = online_softmax(capped(qk, scale, cap), factor, seen, m_i, l_i)
        acc = tl.dot(p.to(dtype), v, acc * alpha[:, None], input_precision="ieee")
        kv_pos = next_pos
        row = next_row
    return acc, m_i, l_i


@triton.jit
def attend_range(
    state,
    queries,
    keys,
    mask_rows,
    span,
    bounds,
    scores,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    BEGIN: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Let one tile of queries see the keys in a span ``low, high, full_low, full_high``: tiles that
    lie whole in ``full_low .. full_high`` without masks, then the others of ``low .. high`` with
    masks. SKIP names the loop ("full", "masked" or none) that is often empty and then jumped over.
    The other parameters are those of `attend`.
    """
    low, high, full_low, full_high = span
    first, head_tiles, full, masked = tile_range(low, high, full_low, full_high, BLOCK_N)
    if mask_rows is None and (SKIP != "full" or full > 0):
        state = attend(
            state, queries, keys, None, (first + head_tiles, 0, 0, full), bounds, scores,
            STRIDE_K, STRIDE_V, D, DV, BLOCK_N, MASKED=False, CAUSAL=False, BEGIN=False,
        )  # fmt: skip
    if SKIP != "masked" or masked > 0:
        state = attend(
            state, queries, keys, mask_rows, (first, head_tiles, full, masked), bounds, scores,
            STRIDE_K, STRIDE_V, D, DV, BLOCK_N, MASKED=True, CAUSAL=CAUSAL, BEGIN=BEGIN,
        )  # fmt: skip
    return state


@triton.jit
def store_rows(
    state,
    sinks,
    out,
    lse,
    row,
    head,
    live,
    stride_ot,
    stride_oh,
    DV: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Normalise and store the `live` rows of one head's tile, and their log-sum-exp if there is
    `lse` [rows, heads]: of partial results to base 2."""
    acc, m_i, l_i = state
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    columns = tl.arange(0, acc.shape[1])
    o = acc * normaliser(m_i, l_i, sink)[:, None]
    where = out + row[:, None] * stride_ot + head * stride_oh + columns[None, :]
    tl.store(where, o.to(out.dtype.element_ty), mask=live[:, None] & (columns[None, :] < DV))
    if lse is not None:
        where = lse + row * tl.num_programs(0) + head
        if PARTIAL:
            tl.store(where, log2_sum(m_i, l_i), mask=live)
        else:
            tl.store(where, log_sum_exp(m_i, l_i), mask=live)
