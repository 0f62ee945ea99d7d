"""The inputs of a captured step: memory whose address never changes, and what its unused rows hold.

A graph of 8 rows that serves 5 requests computes 3 rows more. What those read and write must be
harmless, and must not be what a larger batch left there: every buffer names its rule
(:class:`Padding`), and one loop applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from minikv.errors import ArgumentError
from minikv.kernels.staging import Stage


class Padding(Enum):
    """What a padded row of a buffer holds.

    ``ZERO``: token 0, position 0, out slot 0 (in page 0, which no request owns). ``FILL``: a value
    that says "no request", such as a state slot of -1, or the shortest length. ``RESERVED``: the
    index of a row kept for padding, such as table row 0 or the last row of a state, which padding
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
    _dirty: dict[int, int] = field(init=False, repr=False, default_factory=dict)  # of each block
    _views: dict[tuple[int, int], Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.padding is Padding.ZERO and self.fill != 0:
            raise ArgumentError(
                "fill", self.fill, "is for Padding.FILL and Padding.RESERVED; Padding.ZERO fills 0"
            )
        if self.padding is not Padding.KEEP:
            blocks = [self.tensor]
            if self.stage is not None:
                blocks += [self._cut(block) for block in self.stage.hosts]
            for block in blocks:
                block.fill_(self.fill)

    @property
    def rows(self) -> int:
        """Requests that it holds."""
        return (self.tensor.shape[0] - self.extra) // self.per_row

    def _cut(self, block: Tensor) -> Tensor:
        """Its part of a block of the stage."""
        end = self.offset + self.tensor.shape[0]
        return block[self.offset : end].view(self.tensor.dtype)

    def _first(self, count: int, on_host: bool) -> Tensor:
        """Its first entries, on the device or where the host writes them: a view, made once."""
        staged = on_host and self.stage is not None
        block = self.stage.host if staged else self.tensor  # type: ignore[union-attr]
        part = self._views.get((id(block), count))
        if part is None:
            with torch.inference_mode(False):  # it outlives the step that first needs it
                part = (self._cut(block) if staged else block)[:count]
            self._views[id(block), count] = part
        return part

    def serves(self, variant: str) -> bool:
        """Whether this variant reads it."""
        return not self.variants or variant in self.variants

    def view(self, rows: int, on_host: bool = False) -> Tensor:
        """The part that a step of so many rows reads; all of a ``KEEP`` buffer without `extra`."""
        count = rows * self.per_row + self.extra
        if self.padding is Padding.KEEP and not self.extra:
            count = self.tensor.shape[0]
        return self._first(count, on_host)

    def load(self, value: Any, rows: int) -> None:
        """Write the entries of a batch, and padding over all else that an earlier batch, or the
        step itself, left there; `rows` is the size of the step."""
        used = 0
        if value is not None:
            used = value.shape[0]
            self._first(used, True).copy_(value, non_blocking=True)
        if self.padding is Padding.KEEP:
            return
        pinned = self.stage is not None and self.stage.hosts
        block = self.stage.host if pinned else self.tensor  # type: ignore[union-attr]
        dirty = self._dirty.get(id(block), 0)
        if used < dirty:
            self._first(dirty, True)[used:].fill_(self.fill)
        # Pinned memory holds what was loaded; a step writes to its inputs on the device.
        self._dirty[id(block)] = used if pinned else rows * self.per_row

    def like(self, rows: int) -> Buffer:
        """One of the same kind for another number of rows."""
        if self.padding is Padding.KEEP and not self.extra:
            return self
        length, device = rows * self.per_row + self.extra, self.tensor.device
        shape, kind = (length, *self.tensor.shape[1:]), self.tensor.dtype
        if self.stage is None:
            return replace(self, tensor=torch.zeros(shape, dtype=kind, device=device))
        stage = Stage(length, device, self.stage.block.dtype)
        return replace(self, tensor=stage.block.view(kind), stage=stage, offset=0)


class Inputs:
    """Buffers that are loaded together: those that one variant of a step reads."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers = buffers
        stages = {id(b.stage): b.stage for b in buffers.values() if b.stage is not None}
        self.stages = list(stages.values())
        self._views: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def views(self, size: int, on_host: bool = False) -> dict[str, Tensor]:
        """Each as a step of this size sees it, or where the host writes it; looked up once."""
        key = (size,)
        if on_host:  # pinned blocks take turns
            key = (size, *(id(stage.host) for stage in self.stages), 0)
        if key not in self._views:
            self._views[key] = {name: b.view(size, on_host) for name, b in self.buffers.items()}
        return self._views[key]

    def load(
        self,
        values: Mapping[str, Any],
        size: int,
        prepare: Callable[[dict[str, Tensor], int], None] | None = None,
    ) -> dict[str, Tensor]:
        """Write the values of a batch, pad them to `size`, let `prepare` see them on the host, and
        send them to the device: the views there."""
        for stage in self.stages:
            stage.turn()
        for name, buffer in self.buffers.items():
            buffer.load(values.get(name), size)
        if prepare is not None:
            prepare(self.views(size, on_host=True), size)
        for stage in self.stages:
            stage.send()
        return self.views(size)


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
    places = [-(-length // 16) * 16 for length in lengths]  # each on its own 128 bytes
    stage = Stage(sum(places), torch.device(device))
    made, start = {}, 0
    for (name, r), length, place in zip(rules.items(), lengths, places, strict=True):
        part = stage.block[start : start + length].view(r.tensor.dtype)
        made[name] = replace(r, tensor=part, stage=stage, offset=start)
        start += place
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
