"""Tokens that stay on the device: the greedy choice in two small kernels (PyTorch takes six for the
maximum, its place and whether it is a number), and the newest tokens for a step that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.choice import use_triton
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

BLOCK = 8192  # logits that one program compares


def first_max(logits: Tensor, rows: Tensor | None = None, column: Tensor | None = None) -> Tensor:
    """Index of each row's first maximum; -1 where the maximum is no finite number (one NaN in a row
    is enough).

    Parameters
    ----------
    logits
        `[n, vocab]`, any float dtype.
    rows, column
        int64 `[n]` and `[table rows]`: where the choices are noted, too, as :func:`newest` reads
        them; a broken one as token 0.

    Returns
    -------
    Tensor
        int64 `[n]`.

    Examples
    --------
    >>> first_max(torch.tensor([[0.0, 2.0, 2.0], [1.0, torch.nan, 3.0], [-torch.inf] * 3])).tolist()
    [1, -1, -1]
    """
    choose = first_max_triton if use_triton("auto", logits.device) else first_max_torch
    return choose(logits, rows, column)


def first_max_triton(
    logits: Tensor, rows: Tensor | None = None, column: Tensor | None = None
) -> Tensor:
    """:func:`first_max` by the kernels below."""
    n, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty((n, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((n, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(vocab))
    launch(
        best_of_part_kernel,
        (parts, n),
        (logits.contiguous(), best, where),
        dependent=True,
        VOCAB=vocab,
        BLOCK=block,
    )
    more = {"PARTS": parts, "BLOCK": triton.next_power_of_2(parts)}
    args = (best, where, out, rows, column)
    launch(best_of_row_kernel, (n, 1), args, num_warps=1, dependent=True, **more)
    return out


def first_max_torch(
    logits: Tensor, rows: Tensor | None = None, column: Tensor | None = None
) -> Tensor:
    """:func:`first_max` with PyTorch operations."""
    best, first = logits.max(dim=-1)  # of equal values the first; NaN wins over all numbers
    out = first.masked_fill(~torch.isfinite(best), -1)
    if rows is not None and column is not None:
        column.index_copy_(0, rows, out.clamp_min(0))
    return out


def newest(token_ids: Tensor, rows: Tensor, column: Tensor) -> Tensor:
    """Token ids in which those below 0 are replaced by the newest token of their row.

    Parameters
    ----------
    token_ids, rows
        int64 `[n]`: ids, and the table row of each.
    column
        int64 `[table rows]`: the token that was chosen last for each row.

    Examples
    --------
    >>> newest(torch.tensor([7, -1]), torch.tensor([1, 2]), torch.tensor([0, 5, 6])).tolist()
    [7, 6]
    """
    if not use_triton("auto", token_ids.device):
        return torch.where(token_ids < 0, column[rows], token_ids)
    out = torch.empty_like(token_ids)
    n = token_ids.shape[0]
    launch(newest_kernel, (triton.cdiv(n, 256),), (token_ids, rows, column, out, n), BLOCK=256)
    return out


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
    best, where, out, rows, column,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    if column is not None:
        at = tl.load(rows + row)
        tl.store(column + at, tl.where(usable, first, 0).to(tl.int64))


@triton.jit(do_not_specialize=["n"])
def newest_kernel(token_ids, rows, column, out, n, BLOCK: tl.constexpr):
    """Program i gives tokens ``i * BLOCK ..``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(token_ids + i, mask=i < n, other=0)
    unknown = (i < n) & (given < 0)
    at = tl.load(rows + i, mask=unknown, other=0)
    last = tl.load(column + at, mask=unknown, other=0)
    tl.store(out + i, tl.where(given < 0, last, given), mask=i < n)
