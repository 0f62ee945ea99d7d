"""Measured rows as an aligned table; a row is a dict, and rows of one table have the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text, numbers to the right.

    Examples
    --------
    >>> print(table([{"what": "copy", "us": 12.5}, {"what": "sum", "us": None}]))
    what    us
    copy  12.5
    sum      –
    """
    if not rows:
        return "(nothing measured)"
    keys = list(rows[0])
    cells = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    number = [any(isinstance(row.get(key), int | float) for row in rows) for key in keys]
    width = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, width, number, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
