"""The inner steps that every attention kernel of this package shares, each a small ``@triton.jit``
helper.

One tile of scores passes through them in this order: dot product, scale, cap, temperature, mask,
online softmax. The softmax works with powers of two, because the hardware has ``exp2`` and not
``exp``: ``log2(e)`` is folded into the factor that multiplies a score anyway. The one trap is the
cap, which acts on the natural logit, so what is folded goes outside the ``tanh``::

    score in powers of two = x * factor      without cap: x = q.k               factor = scale * temperature * log2(e)
                                             with cap c:  x = tanh(q.k*scale/c) factor = c     * temperature * log2(e)

The running maximum, sum and rescaling are the online softmax of Milakov and Gimelshein (2018),
tiled as in FlashAttention (Dao et al., 2022); taking the maximum before the multiplication leaves
one fused multiply-add per score.
"""

from __future__ import annotations

from minikv.kernels.triton import tl, triton


@triton.jit
def tanh(x):
    """tanh from an exponential that cannot overflow: ``e = exp(-2|x|)`` lies in [0, 1]."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def temperature(q_pos, length, RULE: tl.constexpr):
    """What multiplies the scores of the query at position `q_pos` [M]: 0 none, 1 "log", 2
    "inverse"."""
    pos = tl.maximum(q_pos, 1).to(tl.float32)
    start = length.to(tl.float32)
    if RULE == 1:
        return tl.where(q_pos > length, tl.log2(pos) / tl.log2(start), 1.0)
    elif RULE == 2:
        return tl.where(q_pos >= length, start / (tl.maximum(q_pos, 0) + 1).to(tl.float32), 1.0)
    else:
        return tl.where(q_pos >= 0, 1.0, 1.0)


@triton.jit
def row_factor(q_pos, scale, cap, length, CAP: tl.constexpr, RULE: tl.constexpr):
    """The `factor` of each query row [M] (top of the file). `scale` must not be negative: see
    `online_softmax`."""
    if CAP:
        return temperature(q_pos, length, RULE) * (cap * 1.4426950408889634)
    else:
        return temperature(q_pos, length, RULE) * (scale * 1.4426950408889634)


@triton.jit
def capped(qk, scale, cap, CAP: tl.constexpr):
    """The `x` of each dot product [M, N] (see the top of the file)."""
    if CAP:
        return tanh(qk * (scale / cap))
    else:
        return qk


@triton.jit
def visible(
    q_pos, kv_pos, kv_begin, kv_end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BEGIN: tl.constexpr
):  # fmt: skip
    """Which keys [N] each query [M] may see: in [kv_begin, kv_end), not after itself, at most
    `window` behind itself.

    Bounds are joined per row first, so that a score costs one comparison, or two. Returns bool [M,
    N], or [1, N] when all rows see the same keys. Without BEGIN (or a window) no key lies before
    `kv_begin`.
    """
    if CAUSAL:
        seen = kv_pos[None, :] <= tl.minimum(q_pos, kv_end - 1)[:, None]
    else:
        seen = kv_pos[None, :] < kv_end
    if WINDOW:
        seen = seen & (kv_pos[None, :] >= tl.maximum(q_pos - window, kv_begin)[:, None])
    elif BEGIN:
        seen = seen & (kv_pos[None, :] >= kv_begin)
    return seen


@triton.jit
def online_softmax(x, factor, seen, m_i, l_i):
    """Take one tile of scores ``x * factor`` into the running maximum `m_i` and sum `l_i` of each
    row.

    Parameters: x fp32 [M, N]; factor fp32 [M], not negative (the maximum is taken before
    multiplying; with a negative scale negate q, which is exact); seen bool [M, N], or None for a
    tile that every row sees whole; m_i, l_i fp32 [M]. Returns p [M, N] (unnormalised), alpha [M]
    (what the accumulator is to be multiplied by), m_i, l_i. A row that has seen no key yet keeps
    ``m_i = -inf, l_i = 0`` exactly, whatever its masked scores hold, NaN included.
    """
    if seen is None:
        m_new = tl.maximum(m_i, tl.max(x, 1) * factor)
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(tl.fma(x, factor[:, None], -m_new[:, None]))
    else:
        s = tl.where(seen, x * factor[:, None], float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_ref)
        p = tl.exp2(s - m_ref[:, None])
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def log_sum_exp(m_i, l_i):
    """Natural log of the sum over keys [M]; -inf for a row that saw none."""
    empty = l_i == 0.0
    return tl.where(
        empty, float("-inf"), (m_i + tl.log2(tl.where(empty, 1.0, l_i))) * 0.6931471805599453
    )


@triton.jit
def normaliser(m_i, l_i, sink):
    """What multiplies the accumulator [M] at the end: 1 / (sum over keys + the sink); 0 for a row
    that saw no key.

    `sink` is the head's logit (natural scale, a scalar or [M]) or None.
    """
    if sink is None:
        return tl.where(l_i == 0.0, 0.0, 1.0 / tl.where(l_i == 0.0, 1.0, l_i))
    else:
        sink2 = sink * 1.4426950408889634
        m_all = tl.maximum(m_i, sink2)
        m_all = tl.where(m_all == float("-inf"), 0.0, m_all)
        weight = tl.exp2(m_i - m_all)
        total = l_i * weight + tl.exp2(sink2 - m_all)
        return tl.where(l_i == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))


@triton.jit
def head_columns(BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """Column numbers of a head's main and tail block; 80 = 64 + 16, 192 = 128 + 64, 576 = 512 + 64."""
    return tl.arange(0, BLOCK_D), BLOCK_D + tl.arange(0, BLOCK_TAIL if BLOCK_TAIL > 0 else 16)


@triton.jit
def load_rows(base, offsets, columns, live, D: tl.constexpr, BLOCK_END: tl.constexpr):
    """Rows [N] of a head [.., D] at `offsets` as a tile; rows that are not `live` (None: all are)
    and padding are 0.

    Offsets (int64) are turned to bytes first: with a constexpr stride an address is then one
    instruction.
    """
    item: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    first = (base + columns).to(tl.pointer_type(tl.int8))
    where = (first[None, :] + (offsets * item)[:, None]).to(base.dtype)
    if live is None:
        if BLOCK_END <= D:
            return tl.load(where)
        else:
            return tl.load(where, mask=columns[None, :] < D, other=0.0)
    else:
        if BLOCK_END <= D:
            return tl.load(where, mask=live[:, None], other=0.0)
        else:
            return tl.load(where, mask=live[:, None] & (columns[None, :] < D), other=0.0)


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
def find_request(qo_indptr, place, batch, steps, EXTRA: tl.constexpr, BLOCK_M: tl.constexpr):
    """In a grid without empty programs: the request that owns `place`, and that request's first
    place.

    Request b owns the places from ``qo_indptr[b] // BLOCK_M + EXTRA * b`` on: never fewer than its
    query tiles, at most EXTRA more, and known without reading lengths back to the host. `steps`
    halvings find it.
    """
    low, high, begin = place * 0, batch + place * 0, place * 0
    for _ in range(steps):
        middle = (low + high) // 2
        candidate = (tl.load(qo_indptr + middle) // BLOCK_M + EXTRA * middle).to(tl.int32)
        below = candidate <= place
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
        begin = tl.where(below, candidate, begin)
    return low, begin


@triton.jit
def attend(
    acc, m_i, l_i, q, q_tail, q_pos, factor,
    k_ptr, v_ptr, k_desc, v_desc, desc_column, slots_ptr, mask_rows,
    base, origin, kv_begin, kv_end, mask_from, first, head_tiles, gap, num_tiles, window, scale, cap,
    stride_k: tl.constexpr, stride_v: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BEGIN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Let one tile of queries see `num_tiles` tiles of keys: ``acc, m_i, l_i`` after them.

    Tile i covers key positions ``origin + (first + i) * BLOCK_N + [0, BLOCK_N)``, `gap` tiles
    further on from the `head_tiles`-th: the masked tiles lie before and after the unmasked ones.
    The key at position p lies in row ``slots_ptr[base + p]`` of the pool, or without `slots_ptr` in
    row ``base + p`` of the new keys. The slots of a tile are loaded one tile ahead, so that the
    loads of K and V, which depend on them, can be issued early. Descriptors `k_desc`, `v_desc`
    reach whole tiles of the same rows, from column ``desc_column * D`` on; for the pool they
    promise that no tile crosses a page, so that one slot says where it lies. MASKED: 0, every query
    sees every key of these tiles; 1, masked by position; 2, also by the custom mask, which has a
    row for each query (pointers `mask_rows` [M]) and counts from position `mask_from` on.
    """
    n = tl.arange(0, BLOCK_N)
    columns, tail_columns = head_columns(BLOCK_D, BLOCK_TAIL)
    v_columns = tl.arange(0, BLOCK_DV)
    kv_pos = origin + (first + tl.where(head_tiles > 0, 0, gap)) * BLOCK_N + n
    row = base + kv_pos
    if slots_ptr is not None:
        if k_desc is not None:
            row = tl.load(slots_ptr + base + origin + first * BLOCK_N).to(tl.int32)
        else:
            row = tl.load(
                slots_ptr + row, mask=(kv_pos >= kv_begin) & (kv_pos < kv_end), other=0
            ).to(tl.int32)
    for i in range(num_tiles):
        if MASKED > 0:
            next_pos = (
                origin + (first + i + 1 + tl.where(i + 1 >= head_tiles, gap, 0)) * BLOCK_N + n
            )
        else:
            next_pos = origin + (first + tl.minimum(i + 1, num_tiles - 1)) * BLOCK_N + n
        next_row = base + next_pos
        if slots_ptr is not None:
            if k_desc is not None:
                next_tile = first + tl.minimum(i + 1, num_tiles - 1)
                next_row = tl.load(slots_ptr + base + origin + next_tile * BLOCK_N).to(tl.int32)
            elif MASKED > 0:
                in_list = (next_pos >= kv_begin) & (next_pos < kv_end)
                next_row = tl.load(slots_ptr + next_row, mask=in_list, other=0).to(tl.int32)
            else:
                next_row = tl.load(slots_ptr + next_row).to(tl.int32)
        seen, live, live_v = None, None, None
        if MASKED > 0:
            live = kv_pos < kv_end
            if BEGIN:
                live = live & (kv_pos >= kv_begin)
            seen = visible(q_pos, kv_pos, kv_begin, kv_end, window, CAUSAL, WINDOW, BEGIN)
            live_v = live
            if WINDOW:
                live_v = live_v & (kv_pos >= tl.min(q_pos, 0) - window)
            if MASKED == 2:
                read = live & (kv_pos >= mask_from)
                allowed = (
                    tl.load(mask_rows[:, None] + kv_pos[None, :], mask=read[None, :], other=1) != 0
                )
                seen = seen & allowed
                live_v = live_v & (tl.max(seen.to(tl.int32), 0) > 0)
        # A masked key has weight 0, but 0 * NaN is NaN: values that nobody here sees are replaced
        # by 0 as they load.
        at = row
        if slots_ptr is not None and k_desc is not None:
            at = row + n
        at = at.to(tl.uint32).to(tl.int64)
        if k_desc is None:
            k = load_rows(k_ptr, at * stride_k, columns, live, D, BLOCK_D).to(q.dtype)
            v = load_rows(v_ptr, at * stride_v, v_columns, live_v, DV, BLOCK_DV).to(q.dtype)
        else:
            tile_row = base + origin + (first + i) * BLOCK_N
            if slots_ptr is not None:
                tile_row = row
            k = k_desc.load([tile_row, desc_column * D])
            v = v_desc.load([tile_row, desc_column * DV])
        qk = tl.dot(q, k.T, input_precision="ieee")
        if BLOCK_TAIL > 0:
            k_tail = load_rows(
                k_ptr, at * stride_k, tail_columns, live, D, BLOCK_D + BLOCK_TAIL
            ).to(q.dtype)
            qk = tl.dot(q_tail, k_tail.T, qk, input_precision="ieee")
        p, alpha, m_i, l_i = online_softmax(capped(qk, scale, cap, CAP), factor, seen, m_i, l_i)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
        kv_pos = next_pos
        row = next_row
    return acc, m_i, l_i


@triton.jit
def store_rows(
    acc, m_i, l_i, sink, out, lse, row, head, live, stride_row, stride_head, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """Normalise and store the `live` rows of one head's tile, and their log-sum-exp if there is
    `lse` [rows, heads]."""
    columns = tl.arange(0, BLOCK_DV)
    o = acc * normaliser(m_i, l_i, sink)[:, None]
    where = out + row[:, None] * stride_row + head * stride_head + columns[None, :]
    tl.store(where, o.to(out.dtype.element_ty), mask=live[:, None] & (columns[None, :] < DV))
    if lse is not None:
        tl.store(lse + row * tl.num_programs(0) + head, log_sum_exp(m_i, l_i), mask=live)
