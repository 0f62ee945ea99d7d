"""``minikv check NOTEBOOK``: grade a notebook from outside, in a fresh process with limits on time
and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from minikv.errors import ArgumentError
from minikv.lessons.engine import exercises

SECONDS = 600
GIGABYTES = 16


@dataclass(frozen=True)
class Grade:
    """One exercise of a graded notebook: solved or not, the check's message, and the cell that ran
    the check."""

    exercise: str
    passed: bool
    message: str
    cell: str


def grade(
    notebook: str | os.PathLike[str], *, seconds: int = SECONDS, gigabytes: int = GIGABYTES
) -> list[Grade]:
    """Run a notebook's cells in a fresh process and judge every exercise it should contain.

    A cell that raises does not stop the others. An exercise without a check cell counts as not
    solved; one with two check cells is judged by the last, and the message names both cells.

    Raises
    ------
    ArgumentError
        When the file is not a notebook.
    """
    path = Path(notebook)
    cells = _read(path)
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "result.jsonl", Path(folder) / "errors.txt"
        command = [
            sys.executable,
            "-m",
            "minikv.lessons.worker",
            str(path.resolve()),
            str(result),
            str(gigabytes),
        ]
        code = _run(command, errors, seconds)
        records = _records(result)
        place = next(
            (record["running"] for record in reversed(records) if "running" in record), "its start"
        )
        trouble = ""
        if code is None:
            trouble = f"the notebook ran longer than {seconds} s, it was ended in {place}"
        elif code != 0:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:] or [
                f"exit code {code}"
            ]
            trouble = f"the notebook's process ended early, in {place} ({last[0]})"
    return _grades(path, cells, [record for record in records if "exercise" in record], trouble)


def _run(command: list[str], errors: Path, seconds: int) -> int | None:
    """The exit code of `command`, or None when it took too long; it and what it has started are
    ended then."""
    # Output goes nowhere: the learner's prints are not the grade. No pipe, which a child's child
    # could keep open.
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also after Ctrl-C, which does not reach a session of its own
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _records(result: Path) -> list[dict]:
    """The worker's lines; the last one may be cut off."""
    records = []
    for line in result.read_text().splitlines() if result.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _read(path: Path) -> list[dict]:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            "".join(cell["source"])
    except FileNotFoundError as e:
        raise ArgumentError("notebook", str(path), "there is no such file") from e
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise ArgumentError(
            "notebook", str(path), f"this is not a Jupyter notebook ({type(e).__name__}: {e})"
        ) from e
    return cells


def _grades(path: Path, cells: list[dict], records: list[dict], trouble: str) -> list[Grade]:
    source = "\n".join("".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code")
    named = re.findall(r"check\(\s*[\"']([0-9]{2}-[a-z0-9-]+)[\"']", source)
    numbers = sorted({name[:2] for name in named} | set(re.findall(r"^\d\d(?=_)", path.name)))
    wanted = [task.id for number in numbers for task in exercises(number)]
    grades = []
    for id in dict.fromkeys([*wanted, *named]):
        mine = [record for record in records if record["exercise"] == id]
        if not mine:
            why = trouble or ("its check cell did not run" if id in named else "no cell checks it")
            grades.append(Grade(id, False, why, ""))
            continue
        last = mine[-1]
        places = list(dict.fromkeys(record["cell"] for record in mine))
        twice = (
            f" (checked in {len(places)} cells, {' and '.join(places)}; the last one counts)"
            if len(places) > 1
            else ""
        )
        grades.append(Grade(id, last["passed"], last["message"] + twice, last["cell"]))
    return grades


def main(notebook: str, as_json: bool = False) -> int:
    """Print the grades; exit code 0 when all exercises are solved, else 1."""
    grades = grade(notebook)
    solved = sum(g.passed for g in grades)
    if as_json:
        print(
            json.dumps(
                {
                    "notebook": notebook,
                    "solved": solved,
                    "of": len(grades),
                    "exercises": [asdict(g) for g in grades],
                }
            )
        )
    else:
        for g in grades:
            print(f"{'solved ' if g.passed else 'not yet'}  {g.exercise}: {g.message}")
        print(f"{solved} of {len(grades)} exercises solved")
    return 0 if grades and solved == len(grades) else 1
