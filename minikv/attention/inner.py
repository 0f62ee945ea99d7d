"""The inner steps that every attention kernel of this package shares, each a small ``@triton.jit`` helper.

One tile of scores passes through them in this order: dot product, scale, cap, temperature, mask, online softmax. The
softmax works with powers of two, because the hardware has ``exp2`` and not ``exp``: ``log2(e)`` is folded into the
factor that multiplies a score anyway. The one trap is the cap, which acts on the natural logit, so what is folded goes
outside the ``tanh``::

    score in powers of two = x * factor      without cap: x = q.k               factor = scale * temperature * log2(e)
                                             with cap c:  x = tanh(q.k*scale/c) factor = c     * temperature * log2(e)

The running maximum, sum and rescaling are the online softmax of Milakov and Gimelshein (2018), tiled as in
FlashAttention (Dao et al., 2022); taking the maximum before the multiplication leaves one fused multiply-add per score.
"""

from __future__ import annotations

from minikv._triton import tl, triton


@triton.jit
def tanh(x):
    """tanh from an exponential that cannot overflow: ``e = exp(-2|x|)`` lies in [0, 1]."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def temperature(q_pos, length, RULE: tl.constexpr):
    """What multiplies the scores of the query at position `q_pos` [M]: 0 none, 1 "log", 2 "inverse"."""
    pos = tl.maximum(q_pos, 1).to(tl.float32)
    start = length.to(tl.float32)
    if RULE == 1:
        return tl.where(q_pos > length, tl.log2(pos) / tl.log2(start), 1.0)
    elif RULE == 2:
        return tl.where(q_pos >= length, start / (q_pos + 1).to(tl.float32), 1.0)
    else:
        return tl.where(q_pos >= 0, 1.0, 1.0)


@triton.jit
def row_factor(q_pos, scale, cap, length, CAP: tl.constexpr, RULE: tl.constexpr):
    """The `factor` of each query row [M] (top of the file). `scale` must not be negative: see `online_softmax`."""
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
def visible(q_pos, kv_pos, kv_end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys [N] each query [M] may see: before `kv_end`, not after itself, at most `window` behind itself.

    Returns bool [M, N], or [1, N] when all rows see the same keys.
    """
    seen = kv_pos[None, :] < kv_end
    if CAUSAL:
        seen = seen & (kv_pos[None, :] <= q_pos[:, None])
    if WINDOW:
        seen = seen & (q_pos[:, None] - kv_pos[None, :] <= window)
    return seen


@triton.jit
def online_softmax(x, factor, seen, m_i, l_i):
    """Take one tile of scores ``x * factor`` into the running maximum `m_i` and sum `l_i` of each row.

    Parameters: x fp32 [M, N]; factor fp32 [M], not negative (the maximum is taken before multiplying; with a negative
    scale negate q, which is exact); seen bool [M, N], or None for a tile that every row sees whole; m_i, l_i fp32 [M].
    Returns p [M, N] (unnormalised), alpha [M] (what the accumulator is to be multiplied by), m_i, l_i.
    A row that has seen no key yet keeps ``m_i = -inf, l_i = 0`` exactly, whatever its masked scores hold, NaN included.
    """
    if seen is None:
        m_new = tl.maximum(m_i, tl.max(x, 1) * factor)
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(x * factor[:, None] - m_new[:, None])
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
    return tl.where(empty, float("-inf"), (m_i + tl.log2(tl.where(empty, 1.0, l_i))) * 0.6931471805599453)


@triton.jit
def normaliser(m_i, l_i, sink):
    """What multiplies the accumulator [M] at the end: 1 / (sum over keys + the sink); 0 for a row that saw no key.

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
