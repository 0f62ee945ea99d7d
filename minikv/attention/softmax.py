"""The inner steps that every attention kernel of this package shares, each a small ``@triton.jit``
helper.

One tile of scores passes through them in this order: dot product, scale, cap, temperature, mask,
online softmax. The softmax works with powers of two, because the hardware has ``exp2`` and not
``exp``: ``log2(e)`` is folded into the factor that multiplies a score anyway. The one trap is the
cap, which acts on the natural logit, so what is folded goes outside the ``tanh``::

    score in powers of two = x * factor
        without cap: x = q.k                 factor = scale * temperature * log2(e)
        with cap c:  x = tanh(q.k*scale/c)   factor = c     * temperature * log2(e)

The running maximum, sum and rescaling are the online softmax of Milakov and Gimelshein (2018),
tiled as in FlashAttention (Dao et al., 2022); taking the maximum before the multiplication leaves
one fused multiply-add per score.
"""

from __future__ import annotations

from minikv.kernels.triton import tl, triton


@triton.jit
def tanh(x):
    """tanh from an exponential that cannot overflow: ``e = exp(-2|x|)`` lies in [0, 1]. Near 0,
    where ``1 - e`` loses its digits, ``x + x^3 p(x^2)`` with p fitted on [0, 0.55] (error 1e-7)."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = -0.33332941 + y * (0.13320643 + y * (-0.05266803 + y * 0.01643201))
    return tl.where(y < 0.3025, x + x * (y * near), tl.where(x < 0, -t, t))


@triton.jit
def temperature(q_pos, length, RULE: tl.constexpr):
    """What multiplies the scores of the query at position `q_pos` [M]; 1 where `length` is None."""
    if length is None:
        return tl.where(q_pos >= 0, 1.0, 1.0)
    elif RULE == "log":
        pos = tl.maximum(q_pos, 1).to(tl.float32)
        factor = tl.log2(pos) / tl.log2(length.to(tl.float32))
        return tl.where(q_pos > length, factor, 1.0)
    else:
        pos = tl.maximum(q_pos, 0) + 1
        return tl.where(q_pos >= length, length.to(tl.float32) / pos.to(tl.float32), 1.0)


@triton.jit
def row_factor(q_pos, length, scale, cap, RULE: tl.constexpr):
    """The `factor` of each query row [M] (top of the file). `scale` must not be negative: see
    `online_softmax`."""
    if cap is not None:
        return temperature(q_pos, length, RULE) * (cap * 1.4426950408889634)
    else:
        return temperature(q_pos, length, RULE) * (scale * 1.4426950408889634)


@triton.jit
def capped(qk, scale, cap):
    """The `x` of each dot product [M, N] (see the top of the file)."""
    if cap is not None:
        return tanh(qk * (scale / cap))
    else:
        return qk


@triton.jit
def visible(q_pos, kv_pos, kv_begin, kv_end, window, CAUSAL: tl.constexpr, BEGIN: tl.constexpr):
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
    if window is not None:
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
def log2_sum(m_i, l_i):
    """Log to base 2 of the sum over keys [M]; -inf for a row that saw none. Partial results are
    weighed by it."""
    empty = l_i == 0.0
    return tl.where(empty, float("-inf"), m_i + tl.log2(tl.where(empty, 1.0, l_i)))


@triton.jit
def log_sum_exp(m_i, l_i):
    """Natural log of the sum over keys [M]; -inf for a row that saw none."""
    return log2_sum(m_i, l_i) * 0.6931471805599453


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
    """Column numbers of a head's main and tail block: 80 = 64 + 16, 576 = 512 + 64."""
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
def load_queries(
    q, offsets, live, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr
):
    """Query rows at `offsets` [M]: their main tile, and the tile of the columns after it (if there
    are none, the main tile again)."""
    columns, tail_columns = head_columns(BLOCK_D, BLOCK_TAIL)
    tile = load_rows(q, offsets, columns, live, D, BLOCK_D)
    tail = tile
    if BLOCK_TAIL > 0:
        tail = load_rows(q, offsets, tail_columns, live, D, BLOCK_D + BLOCK_TAIL)
    return tile, tail


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """``acc, m_i, l_i`` before the first key."""
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), m_i, l_i
