"""The greedy choice in two small kernels: PyTorch takes six for the maximum, its place and whether
it is a number."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.device import use_triton
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

BLOCK = 8192  # logits that one program compares


def first_max(logits: Tensor) -> Tensor:
    """Index of each row's first maximum; -1 where the maximum is no finite number (one NaN in a row
    is enough).

    Parameters
    ----------
    logits
        `[n, vocab]`, any float dtype.

    Returns
    -------
    Tensor
        int64 `[n]`.

    Examples
    --------
    >>> first_max(torch.tensor([[0.0, 2.0, 2.0], [1.0, torch.nan, 3.0], [-torch.inf] * 3])).tolist()
    [1, -1, -1]
    """
    return (
        first_max_triton(logits) if use_triton("auto", logits.device) else first_max_torch(logits)
    )


def first_max_triton(logits: Tensor) -> Tensor:
    """:func:`first_max` by the kernels below."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    launch(
        best_of_part_kernel,
        (parts, rows),
        (logits.contiguous(), best, where),
        dependent=True,
        VOCAB=vocab,
        BLOCK=block,
    )
    more = {"PARTS": parts, "BLOCK": triton.next_power_of_2(parts)}
    launch(best_of_row_kernel, (rows, 1), (best, where, out), num_warps=1, dependent=True, **more)
    return out


def first_max_torch(logits: Tensor) -> Tensor:
    """:func:`first_max` with PyTorch operations."""
    best, first = logits.max(dim=-1)  # of equal values the first; NaN wins over all numbers
    return first.masked_fill(~torch.isfinite(best), -1)


@triton.jit
def best_of_part_kernel(
    logits, best, where, VOCAB: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Program (part, row): the largest of `BLOCK` logits, NaN if one of them is, and the first
    place that has it."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
        tl.extra.cuda.gdc_wait()  # type: ignore
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    top = tl.max(x, 0)
    at = row * tl.num_programs(0) + part
    tl.store(best + at, tl.where(broken, float("nan"), top))
    tl.store(where + at, tl.min(tl.where(x == top, i, VOCAB), 0))


@triton.jit
def best_of_row_kernel(
    best, where, out, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per row: the first place of the largest among its parts."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
        tl.extra.cuda.gdc_wait()  # type: ignore
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(best + row * PARTS + i, mask=i < PARTS, other=float("-inf"))
    place = tl.load(where + row * PARTS + i, mask=i < PARTS, other=0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, place, 0x7FFFFFFF), 0)
    usable = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    tl.store(out + row, tl.where(usable, first, -1).to(tl.int64))
