"""The request table: one row per running request, holding the slots of its tokens in order.

This is the page table of the KV pool, kept per token so that attention can read it without knowing
the page size (SGLang's ``req_to_token``). Row 0 stays all zero: padded rows of a captured graph
point at it, so at page 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minikv.device import pick_device
from minikv.errors import ArgumentError, StateError
from minikv.kernels.choice import use_triton
from minikv.kernels.launch import compiled, pointer
from minikv.kernels.staging import Staging, to_device
from minikv.kernels.triton import tl, triton
from minikv.numbers import INTEGERS, first_of, host_integers, whole

BLOCK = 256


class RequestTable:
    """Rows ``1..max_requests`` for requests of at most `max_context` tokens.

    Parameters
    ----------
    max_requests, max_context
        Rows to hand out, and slots in each.
    device
        Where the table lives.
    debug
        Check what device tensors say, too: slots written are in range of a pool, row 0 is still
        zero. Waits for the device.

    Attributes
    ----------
    table
        int32 ``[max_requests + 1, max_context]``.
    last_tokens
        int64 ``[max_requests + 1]`` beside it: the token that a step chose last for each row. A
        step that follows at once takes it from here, before the host has read it.

    Examples
    --------
    >>> import torch
    >>> t = RequestTable(max_requests=2, max_context=4)
    >>> t.alloc(2), t.alloc(1)
    ([1, 2], None)
    >>> t.write([1, 2], [0, 0], [3, 1], torch.tensor([4, 5, 6, 8]))
    >>> t.table.tolist()
    [[0, 0, 0, 0], [4, 5, 6, 0], [8, 0, 0, 0]]
    >>> t.free([1])
    >>> t
    RequestTable(2 rows of 4 on cpu: 1 free, in use 2)
    """

    def __init__(
        self,
        max_requests: int,
        max_context: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> None:
        self.max_requests = whole("max_requests", max_requests, 1)
        self.max_context = whole("max_context", max_context, 1)
        self.debug = debug
        self.device = pick_device(device)
        shape = self.max_requests + 1, self.max_context
        self.table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.last_tokens = torch.zeros(shape[0], dtype=torch.int64, device=self.device)
        self._flat = self.table.view(-1)
        self._staging = Staging(self.device, 1 << 14)
        self._triton = use_triton("auto", self.device)
        self.clear()

    def available_size(self) -> int:
        """Rows that are free."""
        return len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        """Take `n` rows, or None (and nothing is taken) when fewer are free. They are zero."""
        n = whole("n", n, 0)
        if n > len(self._free):
            return None
        if self.debug and bool(self.table[0].any()):
            raise StateError(
                "RequestTable: row 0, which padding reads, was written to; it must stay zero"
            )
        rows, self._free = self._free[:n], self._free[n:]
        for row in rows:
            self._held[row] = 1
        return rows

    def free(self, rows: int | Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Return rows, zeroed, to be used again first.

        Raises
        ------
        ArgumentError
            For a row that is not in use (freed twice, row 0, out of range) or named twice; then
            nothing is freed.
        """
        rows = host_integers("rows", rows).ravel().tolist()
        for i, row in enumerate(rows):
            if not self.is_held(row) or row in rows[:i]:
                remedy = f"is not in use; free each row of 1..{self.max_requests} once"
                raise ArgumentError("rows", row, remedy)
        for row in rows:
            self._held[row] = 0
            self._ends[row] = 0
            self.table[row].zero_()  # what follows a row's tokens is its present request's
        self._free = sorted(rows) + self._free

    def write(
        self,
        rows: Sequence[int] | torch.Tensor,
        prefix_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write the slots of a batch: columns ``prefix_lens[i] .. seq_lens[i] - 1`` of row
        ``rows[i]``.

        Parameters
        ----------
        rows, prefix_lens, seq_lens
            Host integers ``[n]``.
        slots
            int32 or int64 ``[sum(seq_lens - prefix_lens)]`` on the table's device, requests laid
            end to end, as :meth:`PagedAllocator.alloc_extend` returns them.

        Raises
        ------
        ArgumentError
            For a row not in use, columns outside the table, another number of slots, or slots that
            are negative (read on the CPU, and with `debug`); then nothing is written.
        """
        given = {"rows": rows, "prefix_lens": prefix_lens, "seq_lens": seq_lens}
        row, start, stop = (host_integers(name, x).reshape(-1) for name, x in given.items())
        if not row.size == start.size == stop.size:
            raise ArgumentError(
                "rows", row.size, f"rows for {start.size} prefix_lens and {stop.size} seq_lens"
            )
        new = stop - start
        inside = (row > 0) & (row <= self.max_requests)
        inside &= (start >= 0) & (new >= 0) & (stop <= self.max_context)
        if not (inside.all() and self._in_use[row].all()):
            self._refuse(row.tolist(), start.tolist(), stop.tolist())
        total = int(new.sum())
        if not isinstance(slots, torch.Tensor) or slots.dtype not in INTEGERS:
            raise ArgumentError("slots", slots, "must be an int64 or int32 tensor")
        if slots.shape != (total,):
            remedy = f"must be [{total}], one slot per new token"
            raise ArgumentError("slots", tuple(slots.shape), remedy)
        if total and (self.debug or not slots.is_cuda):
            wrong = slots[(slots < (1 if self.debug else 0)) | (slots >= 2**31)]
            if len(wrong):
                raise ArgumentError("slots", int(wrong[0]), "rows hold int32 slots above 0")
        index = row * self.max_context + start
        if total != row.size or not (new == 1).all():  # not a decode step
            index = np.repeat(index + new - np.cumsum(new), new) + np.arange(total)
        if self._triton:
            self._write(index, slots.to(self.table.device).contiguous())
        else:
            index = to_device(torch.from_numpy(index), self.device)
            self._flat.scatter_(0, index, slots.to(torch.int32))
        np.maximum.at(self._ends, row, stop)

    def _write(self, index: np.ndarray, slots: torch.Tensor) -> None:
        """Entry ``index[i]`` becomes ``slots[i]``: one launch, which reads the host's numbers where
        they lie."""
        if index.size == 0:
            return
        staged, address = self._staging.array(index.size)
        staged[:] = index

        def example() -> tuple[Any, ...]:
            return self.table, slots.long(), slots, index.size

        types = (slots.dtype, self.table.device)
        binary = compiled(write_kernel, types, example, BLOCK=BLOCK)
        grid = (-(-index.size // BLOCK),)
        binary(grid, pointer(self.table), address, pointer(slots), index.size)

    def _refuse(self, rows: list[int], starts: list[int], stops: list[int]) -> None:
        for r, a, b in zip(rows, starts, stops, strict=True):
            if not self.is_held(r):
                raise ArgumentError("rows", r, "is not in use; write to rows from alloc()")
            if not 0 <= a <= b <= self.max_context:
                raise ArgumentError(
                    "seq_lens", b, f"row {r} holds columns 0 to {self.max_context}, not {a} to {b}"
                )

    def note(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Note that a step writes the columns before ``seq_lens[i]`` of row ``rows[i]`` itself.

        Both are int64 `[n]` on the CPU; no row is named twice, and all are in use.
        """
        self._ends[rows.numpy()] = seq_lens.numpy()

    def is_held(self, row: int) -> bool:
        """Whether `row` was handed out and not freed since."""
        return 0 < row <= self.max_requests and bool(self._held[row])

    def end(self, row: int, start: int = 0) -> int:
        """One past the last column of `row` that holds a slot, at least `start`.

        On CUDA that is where :meth:`write` last ended, which the host knows; only a row that was
        filled by other means is read, and that waits for the device.
        """
        row = whole("row", row, 0, self.max_requests, f"must be 0 to {self.max_requests}")
        if self.device.type == "cuda" and self._ends[row]:
            return max(start, int(self._ends[row]))
        # Slot 0 is never handed out, and a free row is zero.
        return max([start, *(self.table[row].nonzero().ravel() + 1).tolist()[-1:]])

    def truncate(self, row: int, length: int) -> torch.Tensor:
        """Shorten a row: the slots that leave it, in order.

        The first ``-length % page_size`` of them lie on a page that is kept, since the row's last
        token lies there, too; the caller frees the others: ``allocator.free(slots[-length %
        page_size :])``. Drafted tokens that were rejected leave a row this way.

        Parameters
        ----------
        row, length
            A row in use, and its tokens afterwards; nothing happens where it has no more.

        Returns
        -------
        Tensor
            int64 ``[old length - length]`` on the table's device, a copy.

        Raises
        ------
        ArgumentError
            For a row that is not in use, or a length below 0 or above the row's; then nothing is
            changed.
        """
        row, length = whole("row", row), whole("length", length, 0)
        if not self.is_held(row):
            raise ArgumentError("row", row, "is not in use; shorten rows from alloc()")
        end = self.end(row)
        if length > end:
            raise ArgumentError("length", length, f"row {row} holds {end} tokens and never grows")
        left = self.table[row, length:end].long()
        self.table[row, length:end] = 0
        self._ends[row] = length
        return left

    def last_slots(
        self, rows: Sequence[int] | torch.Tensor, lens: Sequence[int] | torch.Tensor
    ) -> torch.Tensor:
        """The slot of each request's last token, as the allocator asks for it; nothing waits for
        the device.

        Parameters
        ----------
        rows, lens
            Host integers ``[n]``.

        Returns
        -------
        Tensor
            int64 ``[n]`` on the table's device; -1 where a length is 0.

        Raises
        ------
        ArgumentError
            For a row that the table does not have, or a length that a row cannot have.
        """
        row = host_integers("rows", rows).reshape(-1)
        length = host_integers("lens", lens).reshape(-1)
        if row.size != length.size:
            raise ArgumentError("lens", length.size, f"lengths for {row.size} rows; pass one each")
        limits = ("rows", row, self.max_requests), ("lens", length, self.max_context)
        for name, numbers, most in limits:
            wrong = (numbers < 0) | (numbers > most)
            if wrong.any():
                raise ArgumentError(name, int(numbers[wrong.argmax()]), f"must be 0 to {most}")
        index = row * self.max_context + np.maximum(length - 1, 0)
        index, length_there = to_device(torch.from_numpy(np.stack((index, length))), self.device)
        slots = self._flat[index].long()
        return slots if length.all() else torch.where(length_there > 0, slots, -1)

    def clear(self) -> None:
        """All rows free and zero."""
        self._free = list(range(1, self.max_requests + 1))
        self._held = bytearray(self.max_requests + 1)
        self._in_use = np.frombuffer(self._held, np.uint8)  # the same bytes
        # Columns written of each row since it was handed out.
        self._ends = np.zeros(self.max_requests + 1, np.int64)
        self.table.zero_()

    def __repr__(self) -> str:
        used = self._in_use.nonzero()[0].tolist()
        rows = f"{self.max_requests} rows of {self.max_context}"
        text = f"RequestTable({rows} on {self.device}: {len(self._free)} free"
        if used:
            text += f", in use {first_of(used)}"
        return text + ")"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from minikv.viz import requests

        return requests.mimebundle(self)


@triton.jit(do_not_specialize=[1, 2, 3], do_not_specialize_on_alignment=[1, 2, 3])
def write_kernel(table, index, slots, n, BLOCK: tl.constexpr):
    """Program i writes entries ``i * BLOCK ..``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + i, mask=i < n, other=0)
    tl.store(table + at, tl.load(slots + i, mask=i < n, other=0).to(tl.int32), mask=i < n)
