"""The inputs of a captured step: memory whose address never changes, and what its unused rows hold.

A graph of 8 rows that serves 5 requests computes 3 rows in vain. What those read and write must
be harmless, and must not be what a larger batch left there: every buffer names its rule
(:class:`Padding`), and one loop applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from minikv.errors import ArgumentError
from minikv.kernels.staging import Stage


class Padding(Enum):
    """What a padded row of a buffer holds.

    ``ZERO``: token 0, position 0, out slot 0 (page 0, which no request holds). ``FILL``: a value
    that says "no request", such as a state slot of -1 or the shortest length. ``RESERVED``: the
    index of a row kept for padding, such as table row 0 or the last row of a state that padding
    writes to. ``KEEP``: not one row per request; what the batch does not bring stays as it is.
    """

    ZERO = "zero"
    FILL = "fill"
    RESERVED = "reserved"
    KEEP = "keep"


@dataclass
class Buffer:
    """One static input of a step.

    Attributes
    ----------
    tensor
        ``[rows * per_row + extra, ...]`` on the device of the step.
    padding, fill
        What unused rows hold.
    per_row
        Entries of a request (tokens of a verified draft, say).
    extra
        Entries beyond the rows: 1 for an index pointer.
    stage, offset
        The block that `tensor` is cut from, for a buffer that the host fills.
    variants
        Variants of the step that read it; empty: all do. The others need not bring it, and it is
        not filled for them.
    """

    tensor: Tensor
    padding: Padding = Padding.ZERO
    fill: float = 0
    per_row: int = 1
    extra: int = 0
    stage: Stage | None = None
    offset: int = 0
    variants: tuple[str, ...] = ()
    _used: dict[int, int] = field(
        default_factory=dict, repr=False
    )  # block -> entries that hold more than padding
    _views: dict[tuple[int, int], Tensor] = field(
        default_factory=dict, repr=False
    )  # (block, rows; -1: all) -> part

    def __post_init__(self) -> None:
        if self.padding is Padding.ZERO and self.fill != 0:
            raise ArgumentError(
                "fill", self.fill, "is for Padding.FILL and Padding.RESERVED; Padding.ZERO fills 0"
            )
        if self.padding is not Padding.KEEP:
            for block in (
                self.tensor,
                *(() if self.stage is None else map(self._part, self.stage.hosts)),
            ):
                block.fill_(self.fill)

    @property
    def rows(self) -> int:
        """Requests that it holds."""
        return (self.tensor.shape[0] - self.extra) // self.per_row

    @property
    def host(self) -> Tensor:
        """Where the host writes: pinned memory of a staged buffer, else the tensor itself."""
        return self.tensor if self.stage is None else self._part(self.stage.host)

    def _part(self, block: Tensor) -> Tensor:
        part = self._views.get((id(block), -1))
        if part is None:
            with torch.inference_mode(False):  # it outlives the step that first needs it
                part = block[self.offset : self.offset + self.tensor.shape[0]].view(
                    self.tensor.dtype
                )
            self._views[id(block), -1] = part
        return part

    def serves(self, variant: str) -> bool:
        """Whether this variant reads it."""
        return not self.variants or variant in self.variants

    def view(self, rows: int, on_host: bool = False) -> Tensor:
        """The part that a step of so many rows reads; all of a ``KEEP`` buffer that has no
        `extra`."""
        whole = self.host if on_host else self.tensor
        if self.padding is Padding.KEEP and not self.extra:
            return whole
        part = self._views.get((id(whole), rows))
        if part is None:
            with torch.inference_mode(False):
                part = self._views[id(whole), rows] = whole[: rows * self.per_row + self.extra]
        return part

    def load(self, value: Any, rows: int) -> None:
        """Write the entries of a batch, and padding over all that an earlier one left, up to `rows`
        and beyond."""
        target = self.host
        used = 0 if value is None else value.shape[0]
        if used:
            self._entries(target, used).copy_(value, non_blocking=True)  # type: ignore[arg-type]
        if self.padding is not Padding.KEEP:
            stop = self._used.get(id(target), 0)
            if (
                self.stage is None or not self.stage.hosts
            ):  # a step may have written to its own inputs
                stop = target.shape[0] if self.stage else max(rows * self.per_row, stop)
            if used < stop:
                target[used:stop].fill_(self.fill)
            self._used[id(target)] = used

    def _entries(self, block: Tensor, count: int) -> Tensor:
        """The first entries of the tensor or of its host's part: a view, made once."""
        part = self._views.get((id(block), -2 - count))
        if part is None:
            with torch.inference_mode(False):
                part = self._views[id(block), -2 - count] = block[:count]
        return part

    def like(self, rows: int) -> Buffer:
        """One of the same kind for another number of rows."""
        length, device = rows * self.per_row + self.extra, self.tensor.device
        if self.padding is Padding.KEEP and not self.extra:
            return self
        stage = None if self.stage is None else Stage(length, device, self.stage.block.dtype)
        shape, kind = (length, *self.tensor.shape[1:]), self.tensor.dtype
        tensor = (
            torch.zeros(shape, dtype=kind, device=device)
            if stage is None
            else stage.block.view(kind)
        )
        return Buffer(
            tensor, self.padding, self.fill, self.per_row, self.extra, stage, 0, self.variants
        )


def staged(rows: int, device: torch.device | str, rules: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Buffers of int64 (or, as wide, float64) that share one :class:`Stage`.

    Parameters
    ----------
    rows
        Requests that each holds.
    device
        Of the step.
    rules
        Name and :func:`rule` of each.

    Examples
    --------
    >>> made = staged(4, "cpu", {"token_ids": rule(), "seq_lens": rule(Padding.FILL, 1)})
    >>> made["seq_lens"].load(torch.tensor([7, 9]), rows=4)
    >>> made["seq_lens"].view(4).tolist()
    [7, 9, 1, 1]
    """
    lengths = [rows * r.per_row + r.extra for r in rules.values()]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // 16) * 16)  # each on its own 128 bytes
    stage = Stage(starts[-1], torch.device(device))
    made = {}
    for (name, r), start, length in zip(rules.items(), starts, lengths, strict=False):
        part = stage.block[start : start + length].view(r.tensor.dtype)
        made[name] = Buffer(part, r.padding, r.fill, r.per_row, r.extra, stage, start, r.variants)
    return made


def rule(
    padding: Padding = Padding.ZERO,
    fill: float = 0,
    per_row: int = 1,
    extra: int = 0,
    dtype: torch.dtype = torch.int64,
    variants: tuple[str, ...] = (),
) -> Buffer:
    """A buffer without memory, for :func:`staged`."""
    return Buffer(torch.empty(extra, dtype=dtype), padding, fill, per_row, extra, variants=variants)
