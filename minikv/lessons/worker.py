"""The process that runs a notebook for grading: one IPython shell, cells in order, each check
recorded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SKIPPED = {"measure", "demo"}
"""Tags of cells that are no learner's work: measuring takes long, and a demonstrated failure is no
answer."""


def run(notebook: Path, result: Path, gigabytes: int) -> None:
    """Run the cells, and append a JSON line to `result` for each cell that begins and for each
    check."""
    _limit_memory(gigabytes)
    os.environ.setdefault("MPLBACKEND", "agg")
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell

    from minikv import lessons
    from minikv.lessons import engine

    place = {"cell": ""}
    judge = engine.check

    def tell(record: dict[str, Any]) -> None:
        with result.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def recording_check(id: str, function: Any, *, quiet: bool = False) -> engine.Verdict:
        verdict = judge(id, function, quiet=quiet)
        tell(
            {
                "exercise": id,
                "passed": verdict.passed,
                "message": verdict.message,
                "cell": place["cell"],
            }
        )
        return verdict

    lessons.check = engine.check = recording_check  # type: ignore[assignment]
    cells = nbformat.read(notebook, as_version=4).cells
    os.chdir(notebook.parent)
    shell = InteractiveShell.instance()
    for number, cell in enumerate(cells):
        if cell.cell_type == "code" and not SKIPPED & set(cell.get("metadata", {}).get("tags", [])):
            place["cell"] = f"cell {number + 1} ({cell.get('id', 'no id')})"
            tell({"running": place["cell"]})
            shell.run_cell(cell.source, store_history=False)


def _limit_memory(gigabytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: no such limit there
        return
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30, gigabytes << 30))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
