"""Tokens that stay on the device: the greedy choice in two small kernels (PyTorch takes six for the
maximum, its place and whether it is a number), and the newest tokens for a step that follows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.kernels.choice import use_triton
from minikv.kernels.launch import compiled, launch, pointer
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


NAMES = ("token_ids", "positions", "rows", "seq_lens", "kv_indptr", "out_slots")


def move_on(inputs: Mapping[str, Tensor], n: int, table: Tensor) -> None:
    """Turn the inputs of a decode step into those of the step after it, where they lie.

    Each of n requests has one token more, in the page that it has, and everything moves on by one::

        token_ids[i] = -1 (the newest)    positions[i] + 1    seq_lens[i] + 1    out_slots[i] + 1
        kv_indptr[j] + min(j, n)          table[rows[i], old length] = out_slots[i]

    Rewriting these few numbers in one launch spares the host from staging and copying a batch.

    Parameters
    ----------
    inputs
        The buffers of ``decode_buffers`` as a step of some size sees them: int64 `[size]`,
        ``kv_indptr`` `[size + 1]`. Rows from n on are padding and stay what they are.
    n
        Requests.
    table
        int32 `[requests + 1, max_context]`, the request table.
    """
    given, size = [inputs[name] for name in NAMES], inputs["rows"].shape[0]
    if use_triton("auto", table.device):
        args = (*given, table, n, size, table.stride(0))
        kernel = compiled(move_on_kernel, table.device, lambda: args, BLOCK=256)
        kernel((size // 256 + 1,), *map(pointer, args))
        return
    token_ids, positions, rows, seq_lens, kv_indptr, out_slots = given
    kv_indptr += torch.arange(size + 1, device=table.device).clamp_max_(n)
    token_ids[:n] = -1
    positions[:n] = seq_lens[:n]
    out_slots[:n] += 1
    table[rows[:n], positions[:n]] = out_slots[:n].to(table.dtype)
    seq_lens[:n] += 1


# Nothing about an argument is compiled in: one binary serves all sizes.
@triton.jit(do_not_specialize=[*range(10)], do_not_specialize_on_alignment=[*range(10)])
def move_on_kernel(
    token_ids, positions, rows, seq_lens, kv_indptr, out_slots, table, n, size, stride_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p moves rows ``p * BLOCK ..`` on, and as many entries of kv_indptr."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, pointing = i < n, i <= size
    length = tl.load(seq_lens + i, mask=live, other=0)
    slot = tl.load(out_slots + i, mask=live, other=0) + 1
    line = table + tl.load(rows + i, mask=live, other=0) * stride_row
    tl.store(line + length, slot.to(tl.int32), mask=live)
    tl.store(out_slots + i, slot, mask=live)
    tl.store(positions + i, length, mask=live)
    tl.store(seq_lens + i, length + 1, mask=live)
    tl.store(token_ids + i, tl.full([BLOCK], -1, tl.int64), mask=live)
    begin = tl.load(kv_indptr + i, mask=pointing, other=0)
    tl.store(kv_indptr + i, begin + tl.minimum(i, n), mask=pointing)


@triton.jit(do_not_specialize=["n"])
def newest_kernel(token_ids, rows, column, out, n, BLOCK: tl.constexpr):
    """Program i gives tokens ``i * BLOCK ..``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(token_ids + i, mask=i < n, other=0)
    unknown = (i < n) & (given < 0)
    at = tl.load(rows + i, mask=unknown, other=0)
    last = tl.load(column + at, mask=unknown, other=0)
    tl.store(out + i, tl.where(given < 0, last, given), mask=i < n)
