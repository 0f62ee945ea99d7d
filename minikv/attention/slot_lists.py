"""Slot lists: from the request table to what attention kernels read.

A batch's lists lie end to end in ``kv_indices``; request r owns
``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``. Lengths come as CPU tensors, so every size is known
on the host and nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ArgumentError
from minikv.kernels.choice import use_triton
from minikv.kernels.launch import launch
from minikv.kernels.staging import to_device
from minikv.kernels.triton import tl, triton
from minikv.numbers import host_integers

BLOCK = 1024


def build_kv_indices(
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Lay the first ``lens[r]`` slots of each of the given table rows end to end.

    Parameters
    ----------
    table
        int32 [rows, max_context], the request table.
    rows, lens
        int64 [n] on the CPU: which rows, and how many slots of each.
    out
        ``(kv_indptr, kv_indices)`` buffers to fill, at least [n + 1] and [sum of lens]; for graphs.
    backend
        "triton", "torch" or "auto".

    Returns
    -------
    kv_indptr, kv_indices
        int32 (or the buffers' dtype) [n + 1] and [sum of lens] on the table's device; views of
        `out` where given.

    Raises
    ------
    ArgumentError
        Before anything is written: rows or lengths beyond the table, or buffers too small.

    Examples
    --------
    >>> table = torch.tensor([[0, 0, 0], [7, 8, 9], [4, 5, 6]], dtype=torch.int32)
    >>> build_kv_indices(table, torch.tensor([2, 1]), torch.tensor([3, 1]))
    (tensor([0, 3, 4], dtype=torch.int32), tensor([4, 5, 6, 7], dtype=torch.int32))
    """
    device, columns = table.device, table.shape[1]
    row_numbers = host_integers("rows", rows, ndim=1)
    lengths = host_integers("lens", lens, ndim=1)
    n = len(row_numbers)
    total = int(lengths.sum())
    longest = int(lengths.max(initial=0))
    if len(lengths) != n or longest > columns or lengths.min(initial=0) < 0:
        remedy = f"must be one for each of {n} rows, between 0 and the table's {columns} columns"
        raise ArgumentError("lens", lengths.tolist(), remedy)
    if row_numbers.min(initial=0) < 0 or row_numbers.max(initial=0) >= table.shape[0]:
        remedy = f"must be rows of the table, 0..{table.shape[0] - 1}"
        raise ArgumentError("rows", row_numbers.tolist(), remedy)
    if out is None:
        indptr = torch.empty(n + 1, dtype=torch.int32, device=device)
        indices = torch.empty(total, dtype=torch.int32, device=device)
    else:
        indptr, indices = out[0][: n + 1], out[1][:total]
    if indptr.shape[0] <= n or indices.shape[0] < total:
        remedy = f"this batch needs kv_indptr [{n + 1}] and kv_indices [{total}]"
        raise ArgumentError("out", (indptr.shape[0], indices.shape[0]), remedy)

    starts = np.concatenate(([0], lengths.cumsum()))
    staged = to_device(torch.from_numpy(np.concatenate((starts, row_numbers))), device)
    indptr.copy_(staged[: n + 1])
    if use_triton(backend, device):
        if total:
            lay_out_rows(table, staged[n + 1 :], indptr, indices, longest)
        return indptr, indices
    row = torch.from_numpy(row_numbers.repeat(lengths))
    column = torch.from_numpy(np.arange(total) - starts[:-1].repeat(lengths))
    indices.copy_(table[to_device(row, device), to_device(column, device)])
    return indptr, indices


def lay_out_rows(
    table: Tensor, rows: Tensor, kv_indptr: Tensor, kv_indices: Tensor, longest: int
) -> None:
    """The launch alone: `rows` [n] and `kv_indptr` [n + 1] lie on the device, no request is longer
    than `longest`."""
    grid = rows.shape[0], triton.cdiv(longest, BLOCK)
    launch(
        _copy_rows_kernel,
        grid,
        (table, rows, kv_indptr, kv_indices, table.stride(0)),
        BLOCK=BLOCK,
    )


@triton.jit
def _copy_rows_kernel(table, rows, kv_indptr, kv_indices, stride_row, BLOCK: tl.constexpr):
    """Program (r, b) copies columns ``b * BLOCK ..`` of the r-th row asked for, as far as its
    length goes."""
    r = tl.program_id(0)
    start = tl.load(kv_indptr + r).to(tl.int64)
    length = tl.load(kv_indptr + r + 1).to(tl.int64) - start
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = table + tl.load(rows + r).to(tl.int64) * stride_row
    slots = tl.load(line + column, mask=column < length, other=0)
    tl.store(
        kv_indices + start + column, slots.to(kv_indices.dtype.element_ty), mask=column < length
    )


def build_unified_kv_indices(
    prefix_indptr: Tensor, prefix_indices: Tensor, qo_indptr: Tensor, extend_indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One list per request, its prefix followed by its new tokens, as the unified kernel reads it.

    Parameters
    ----------
    prefix_indptr, prefix_indices
        int [batch + 1] and [prefix tokens]: the prefix slots of each request.
    qo_indptr, extend_indices
        int [batch + 1] and [new tokens]: the slots that the new tokens were written to.

    Returns
    -------
    kv_indptr, kv_indices, prefix_lens
        int [batch + 1], [prefix + new tokens] and [batch].

    Examples
    --------
    >>> build_unified_kv_indices(*map(torch.tensor, ([0, 2, 2], [4, 5], [0, 1, 3], [6, 8, 9])))
    (tensor([0, 3, 5]), tensor([4, 5, 6, 8, 9]), tensor([2, 0]))
    """
    prefix_lens, device = prefix_indptr.diff(), prefix_indices.device
    entries = prefix_indices.shape[0] + extend_indices.shape[0]
    dtype = torch.result_type(prefix_indices, extend_indices)
    kv_indices = torch.empty(entries, dtype=dtype, device=device)
    parts = (
        (prefix_indices, prefix_lens, qo_indptr[:-1]),
        (extend_indices, qo_indptr.diff(), prefix_indptr[1:]),
    )
    for slots, lens, shift in parts:
        # Each entry moves right by the entries of the other part that come before it.
        count = slots.shape[0]
        moved = torch.repeat_interleave(shift, lens, output_size=count)
        kv_indices[moved.long() + torch.arange(count, device=device)] = slots.to(dtype)
    return prefix_indptr + qo_indptr, kv_indices, prefix_lens
