"""A result read line by line and cell by cell, for the pictures, whatever it is.

A learner's result may be anything, so it is opened only as far as a picture can show it, and an
object of a strange kind is never asked for its own ``repr`` or equality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from minikv.lessons.compare import first_difference

CELLS, LINES, DEPTH = 2000, 60, 5  # cells read of a line, lines read of a result, levels opened
SIDES = ("expected", "yours")
Names = Sequence[Sequence[str]]  # of the parts of a result, of the parts of these parts, and so on


@dataclass
class Line:
    """One sequence of cells of the result, as it was expected and as it came (None: there is
    none)."""

    name: str
    cells: dict[str, list[Any] | None] = field(default_factory=lambda: dict.fromkeys(SIDES))
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))

    def differs_at(self) -> int | None:
        """Place of the first cell that is not as expected."""
        want, have = self.cells["expected"], self.cells["yours"]
        if want is None or have is None:
            return 0
        pairs = (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if not _same(a, b))
        return next(
            pairs,
            None if self.sizes["expected"] == self.sizes["yours"] else min(len(want), len(have)),
        )


def read(expected: Any, got: Any, names: Names = ()) -> list[Line]:
    """The lines of both results, by the names of their parts."""
    lines: dict[str, Line] = {}
    for side, value in zip(SIDES, (expected, got), strict=True):
        for name, cells, size in islice(_parts(value, names), LINES):
            line = lines.setdefault(name, Line(name))
            line.cells[side], line.sizes[side] = cells, size
    return list(lines.values())


def word(value: Any, exact: bool = False) -> str:
    """A cell's text, whatever it is."""
    if isinstance(value, BaseException):
        return f"raised {type(value).__name__}"
    if type(value) is float:
        return f"{value:.9g}" if exact else f"{value:.4g}"
    if type(value) is int and value.bit_length() > 64:
        return f"about 2^{value.bit_length()}"
    if type(value) is str:
        return repr(value[:40])
    return (
        str(value) if value is None or type(value) in (int, bool) else f"a {type(value).__name__}"
    )


def _open(value: Any) -> list[tuple[Any, Any]] | None:
    """Up to CELLS pairs of key and item of a list, tuple, dict, array or tensor; None for what is
    no such thing."""
    array = isinstance(value, np.ndarray) or type(value).__module__ == "torch"
    if isinstance(value, dict):
        return list(islice(value.items(), CELLS))
    return (
        list(enumerate(islice(value, CELLS)))
        if isinstance(value, list | tuple) or (array and value.ndim)
        else None
    )


def _parts(
    value: Any, names: Names, name: str = "", depth: int = 0
) -> Iterator[tuple[str, list[Any], int]]:
    """(name, cells, size) of each innermost sequence of `value`, and of each value that stands
    alone between them."""
    items = _open(value)
    if items is None:
        yield name, [_bare(value)], 1
        return
    innermost = depth == DEPTH or not (
        names or isinstance(value, dict) or any(_open(v) is not None for _, v in items)
    )
    if innermost or not items:
        yield name, [_bare(v) for _, v in items], len(value)
    else:
        for key, item in items:
            own = key[:40] if type(key) is str else f"[{word(key)}]"
            own = names[0][key] if names and type(key) is int and key < len(names[0]) else own
            yield from _parts(
                item, names[1:], f"{name} {own}" if name and names else name + own, depth + 1
            )


def _bare(value: Any) -> Any:
    single = isinstance(value, np.generic | np.ndarray) or type(value).__module__ == "torch"
    return value.item() if single and value.ndim == 0 else value


def _same(a: Any, b: Any) -> bool:
    plain = (int, float, bool, str, type(None))
    return type(a) in plain and type(b) in plain and first_difference(a, b) is None
