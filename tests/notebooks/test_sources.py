"""What a notebook prints as the package's code is the package's code of today."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_printed_sources_are_current(path: Path) -> None:
    """Cells named ``show-…`` need only the imports; their committed text equals what they print
    now."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    names: dict[str, object] = {}
    exec(cells[0].source, names)  # the imports
    shown = [c for c in cells if c.id.startswith("show-")]
    assert shown, "every notebook shows the package's own code"
    for cell in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(cell.source, names)
        committed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
        assert committed == printed.getvalue(), (
            f"run {path.name} again: what cell {cell.id} prints has changed"
        )
