"""The second kernel of split decode: weigh and add the parts of each request that was cut."""

from __future__ import annotations

from minikv.attention.softmax import log_sum_exp, normaliser, online_softmax
from minikv.kernels.triton import tl, triton


@triton.jit
def part_size(length, num_splits, BLOCK_N: tl.constexpr):
    """Keys per part when a request is cut into `num_splits`: ceil(length / num_splits), rounded up
    to the tile."""
    return tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial,
    partial_lse,
    out,
    lse,
    kv_indptr,
    sinks,
    merges,
    num_splits,
    stride_ob,
    stride_oh,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: the parts of one request and head, `BLOCK_S` at a time and in order, and the
    sink once.

    ``o = sum_s 2^w_s o_s / (sum_s 2^w_s + 2^sink)``, w_s the parts' log-sum-exp in powers of two.
    Parts without keys are not listed, or have ``w_s = -inf`` and ``o_s = 0``.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
    elif DEPENDENT:
        tl.extra.cuda.gdc_wait()  # type: ignore
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if merges is None:
        request = entry
        first = entry * num_splits
        length = (tl.load(kv_indptr + entry + 1) - tl.load(kv_indptr + entry)).to(tl.int32)
        count = tl.cdiv(length, tl.maximum(part_size(length, num_splits, BLOCK_N), 1))
    else:
        request = tl.load(merges + entry * 4)
        first = tl.load(merges + entry * 4 + 1)
        count = tl.load(merges + entry * 4 + 2)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # type: ignore
    if count < 2:
        return
    columns = tl.arange(0, BLOCK_DV)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    one = tl.full([1], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, count, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        where = (first + part).to(tl.int64) * tl.num_programs(0) + head
        w = tl.load(partial_lse + where, mask=part < count, other=float("-inf"))
        inside = (part < count)[:, None] & (columns[None, :] < DV)
        o = tl.load(partial + where[:, None] * DV + columns[None, :], mask=inside, other=0.0)
        p, alpha, m_i, l_i = online_softmax(w[None, :], one, (part < count)[None, :], m_i, l_i)
        acc = acc * alpha + tl.sum(tl.trans(p) * o, 0)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    o = acc * normaliser(m_i, l_i, sink)
    where = out + request.to(tl.int64) * stride_ob + head * stride_oh + columns
    tl.store(where, o.to(out.dtype.element_ty), mask=columns < DV)
    if lse is not None:
        tl.store(lse + request * tl.num_programs(0) + head + tl.arange(0, 1), log_sum_exp(m_i, l_i))
