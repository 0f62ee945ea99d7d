"""Merging attention over disjoint sets of keys, each given by its output and log-sum-exp.

With ``w_i = exp(lse_i)`` the whole is ``(w_1 o_1 + w_2 o_2) / (w_1 + w_2)`` and its own lse
``log(w_1 + w_2)``: split decode, shared prefixes and cascades all rest on this one line
(FlashInfer's "attention states", Ye et al. 2024). ``merge_states`` is the line in PyTorch,
``merge_parts`` launches the kernel that adds up the parts of split decode and split extend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention.softmax import (
    log_sum_exp,
    normaliser,
    online_softmax,
)
from minikv.attention.tiles import power_of_two
from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton


def merge_states(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    Parameters
    ----------
    o1, o2
        Outputs [..., d_v] over each set.
    lse1, lse2
        Natural log of each row's summed exponentials [...]; -inf where a set has no key, and then
        the output of that set may hold anything, NaN included.

    Returns
    -------
    o, lse
        Output in o1's dtype and lse in fp32 (fp64 for fp64 outputs); 0 and -inf where both sets are
        empty.

    Examples
    --------
    >>> one, empty = torch.ones(1, 2), torch.full((1, 2), torch.nan)
    >>> merge_states(one, torch.tensor([0.0]), empty, torch.tensor([-torch.inf]))
    (tensor([[1., 1.]]), tensor([0.]))
    >>> merge_states(one, torch.tensor([0.0]), 3 * one, torch.tensor([0.0]))
    (tensor([[2., 2.]]), tensor([0.6931]))
    """
    wide = torch.float64 if o1.dtype == torch.float64 else torch.float32
    lse = torch.logaddexp(lse1.to(wide), lse2.to(wide))
    shares = []
    for o, part_lse in ((o1, lse1), (o2, lse2)):
        weight = torch.exp(part_lse - lse)[..., None]  # NaN where both sets are empty
        shares.append(torch.where(weight > 0, o.to(wide) * weight, 0))
    return (shares[0] + shares[1]).to(o1.dtype), lse


def merge_parts(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    num_splits: int,
    *,
    merges: Tensor | None = None,
    num_merges: int | None = None,
    kv_indptr: Tensor | None = None,
    block_n: int = 1,
    dependent: bool = False,
    early: bool = False,
) -> None:
    """Weigh and add the parts of rows that were split, and the sink once, into `out` and `lse`.

    Parameters
    ----------
    partial, partial_lse
        fp32 [parts, q_heads, d_v] and [parts, q_heads]: each part's output, and its log-sum-exp to
        base 2.
    out, lse, sinks
        As in the public functions.
    num_splits
        Row r of `out` has parts ``r * num_splits .. + num_splits``, unless `merges` says otherwise.
    merges, num_merges
        int32 [entries, 4]: row of `out`, first part, how many (fewer than 2: nothing to do),
        unused; and how many entries to look at.
    kv_indptr, block_n
        With them only parts that have keys count: those of ``part_size`` keys that the row's
        request fills.
    dependent, early
        As in ``decode.launch_decode``.
    """
    rows, q_heads, d_v = out.shape
    many = merges is not None or kv_indptr is not None
    args = partial, partial_lse, out, lse, sinks, kv_indptr, merges, num_splits
    launch(
        merge_kernel,
        (q_heads, rows if num_merges is None else num_merges),
        (*args, out.stride(0), out.stride(1)),
        num_warps=4 if many else 1,
        dependent=dependent,
        DV=d_v,
        BLOCK_DV=max(16, power_of_two(d_v)),
        BLOCK_N=block_n,
        BLOCK_S=16 if many else power_of_two(num_splits),
        EARLY=early,
    )


@triton.jit
def part_size(length, num_splits, BLOCK_N: tl.constexpr):
    """Keys per part when a request is cut into `num_splits`: ceil(length / num_splits), rounded up
    to the tile."""
    return tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial, partial_lse, out, lse, sinks, kv_indptr, merges, num_splits, stride_ot, stride_oh,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: the parts of one row and head, `BLOCK_S` at a time and in order, and the sink
    once.

    ``o = sum_s 2^w_s o_s / (sum_s 2^w_s + 2^sink)``, w_s the parts' log-sum-exp to base 2. Parts
    without keys are not counted, or have ``w_s = -inf`` and ``o_s = 0``.
    """
    # What an early program reads before its second wait is older than the kernel before this one.
    let_next_start(DEPENDENT and EARLY)
    wait_for_previous(DEPENDENT and not EARLY)
    head = tl.program_id(0)
    entry = tl.program_id(1)
    row = entry
    first = entry * num_splits
    count = num_splits
    if merges is not None:
        row = tl.load(merges + entry * 4)
        first = tl.load(merges + entry * 4 + 1)
        count = tl.load(merges + entry * 4 + 2)
    elif kv_indptr is not None:
        length = (tl.load(kv_indptr + entry + 1) - tl.load(kv_indptr + entry)).to(tl.int32)
        count = tl.cdiv(length, tl.maximum(part_size(length, num_splits, BLOCK_N), 1))
    wait_for_previous(DEPENDENT and EARLY)
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
    where = out + row.to(tl.int64) * stride_ot + head * stride_oh + columns
    tl.store(where, o.to(out.dtype.element_ty), mask=columns < DV)
    if lse is not None:
        tl.store(lse + row * tl.num_programs(0) + head + tl.arange(0, 1), log_sum_exp(m_i, l_i))
