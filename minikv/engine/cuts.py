"""Top-k and top-p without sorting the vocabulary: all that a cut needs is its border, the last
token that stays.

On the CPU only the tokens near the border are sorted. The kernel finds the border bit by bit:
logits of at most 0 are in the order of their bits read as integers (the likeliest has the smallest
number), so it can be found from its highest bit to its lowest, as radix selection does (Alabi et
al. 2012, "Fast k-selection algorithms for graphics processing units"), here by the weight that lies
before it.

Probabilities are summed as integers, in units of 2^-62. Such sums are exact, so a border moves
neither with the order of additions nor with the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.choice import use_triton
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

WHOLE = 2.0**62
"""The probability 1, in units of the integer sums."""
ALL = 2**63 - 1
"""A limit that cuts nothing."""
BLOCK = 4096  # logits that a program reads at a time


def keep_likeliest(x: Tensor, limit: Tensor, p: Tensor | None = None) -> None:
    """Set all tokens to -inf but the likeliest of each row.

    A token stays if less than `limit` lies before it, where the likeliest token is first, and equal
    ones are in the order of the vocabulary.

    Parameters
    ----------
    x
        `[n, vocab]` fp32 logits of at most 0, contiguous; changed in place.
    limit
        int64 `[n]`, at least 1: tokens, or with `p` probability in units of 2^-62. :data:`ALL`
        leaves a row as it is.
    p
        `[n, vocab]` fp32, contiguous: the tokens' probabilities.

    Examples
    --------
    >>> x = torch.tensor([[-1.0, 0.0, -2.0, -1.0]])
    >>> keep_likeliest(x, torch.tensor([2]))
    >>> x
    tensor([[-1., 0., -inf, -inf]])
    >>> keep_likeliest(x, torch.tensor([2**61]), torch.tensor([[0.25, 0.75, 0.0, 0.0]]))
    >>> x
    tensor([[-inf, 0., -inf, -inf]])
    """
    if use_triton("auto", x.device):
        keep_likeliest_triton(x, limit, p)
    else:
        torch.ops.minikv.keep_likeliest(x, limit, p)


def keep_likeliest_triton(x: Tensor, limit: Tensor, p: Tensor | None = None) -> None:
    """:func:`keep_likeliest` by the kernel below, a program for each row."""
    rows, vocab = x.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    launch(keep_likeliest_kernel, (rows,), (x, limit, p), num_warps=16, VOCAB=vocab, BLOCK=block)


def keep_likeliest_torch(x: Tensor, limit: Tensor, p: Tensor | None = None) -> None:
    """:func:`keep_likeliest` with PyTorch operations: only the tokens that may stay are sorted.

    It reads numbers on the host, so a recorded step sees one operation, ``minikv::keep_likeliest``.
    """
    vocab = x.shape[1]
    for i, most in enumerate(limit.tolist()):
        if most == ALL:
            continue
        row = x[i]
        if p is None:
            weight = torch.ones_like(row, dtype=torch.int64)
            at = (row >= row.topk(min(most, vocab)).values[-1]).nonzero().squeeze(1)
        else:
            weight = (p[i] * WHOLE).long()
            at = torch.arange(vocab, device=x.device)
            for _ in range(3):  # the fewer tokens share what may be cut, the more are cut for sure
                near = weight[at]
                share = (near.sum() - most) // max(1, near.shape[0])
                at = at[near >= share]
        logits, order = row[at].sort(descending=True, stable=True)
        weight = weight[at[order]]
        stays = weight.cumsum(0) - weight < most
        row.fill_(-torch.inf)
        row[at[order[stays]]] = logits[stays]


torch.library.define("minikv::keep_likeliest", "(Tensor(a!) x, Tensor limit, Tensor? p) -> ()")
torch.library.impl("minikv::keep_likeliest", "default", keep_likeliest_torch)


@triton.jit
def keep_likeliest_kernel(x, limit, p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: 31 times a sum over the row, which gives a bit of the border each, then
    the cut."""
    row = tl.program_id(0).to(tl.int64)
    x += row * VOCAB
    if p is not None:
        p += row * VOCAB
    most = tl.load(limit + row)
    if most < 0x7FFFFFFFFFFFFFFF:
        border = 0
        before = most * 0  # what lies before the border
        for i in range(31):
            trial = border | (1 << (30 - i))
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, VOCAB, BLOCK):
                order, weight = load_part(x, p, start, VOCAB, BLOCK)
                sums += tl.where(order < trial, weight, 0)
            total = tl.sum(sums, 0)
            border = tl.where(total < most, trial, border)
            before = tl.where(total < most, total, before)
        for start in range(0, VOCAB, BLOCK):
            order, weight = load_part(x, p, start, VOCAB, BLOCK)
            equal = tl.where(order == border, weight, 0)
            late = (order == border) & (before + tl.cumsum(equal, 0) - equal >= most)
            before += tl.sum(equal, 0)
            at = start + tl.arange(0, BLOCK)
            cut = (at < VOCAB) & ((order > border) | late)
            tl.store(x + at, tl.full([BLOCK], float("-inf"), tl.float32), mask=cut)


@triton.jit
def load_part(x, p, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Logits as integers in their order, and weights, of `BLOCK` tokens."""
    at = start + tl.arange(0, BLOCK)
    there = at < VOCAB
    logits = tl.load(x + at, mask=there, other=float("-inf"))
    if p is None:
        weight = there.to(tl.int64)
    else:
        weight = (tl.load(p + at, mask=there, other=0.0) * 4611686018427387904.0).to(tl.int64)
    return tl.abs(logits).to(tl.int32, bitcast=True), weight
