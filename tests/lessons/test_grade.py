"""Grading a file from outside: fresh process, all exercises judged whatever single cells do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

from minikv.cli import main
from minikv.errors import ArgumentError
from minikv.lessons import check, exercises
from minikv.lessons.grade import grade

RIGHT = "def pages_needed(num_tokens, page_size):\n    return -(-num_tokens // page_size)"
CHECK = "from minikv.lessons import check\ncheck('00-pages-needed', pages_needed)"
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def _notebook(path, *sources):
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(s, id=f"c{i}") for i, s in enumerate(sources)]
    )
    nbformat.write(book, path)
    return path


def test_a_solved_notebook(tmp_path, capsys) -> None:
    path = _notebook(tmp_path / "00_mine.ipynb", RIGHT, CHECK)
    main(["check", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    row = next(e for e in told["exercises"] if e["exercise"] == "00-pages-needed")
    assert row["passed"]
    assert row["cell"] == "cell 2 (c1)"


def test_the_first_notebook_can_be_solved(tmp_path) -> None:
    book = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4)
    for cell in book.cells:
        if cell.id == "stub-00-pages-needed":
            cell.source = RIGHT
    nbformat.write(book, tmp_path / "00_solved.ipynb")
    assert main(["check", str(tmp_path / "00_solved.ipynb")]) == 0


def test_b134_a_copied_check_cell_is_named_and_the_rest_still_runs(tmp_path) -> None:
    path = _notebook(tmp_path / "copy.ipynb", "1 / 0", RIGHT, CHECK, CHECK)
    (row,) = [g for g in grade(path) if g.exercise == "00-pages-needed"]
    assert row.passed
    assert "cell 3 (c2) and cell 4 (c3)" in row.message


def test_b134_doubled_cell_ids_lose_no_marks(tmp_path) -> None:
    book = json.loads(
        _notebook(tmp_path / "00_twice.ipynb", RIGHT, CHECK, CHECK, "2 + 2", CHECK).read_text()
    )
    for cell in book["cells"][1:]:
        cell["id"] = "check"
    (tmp_path / "00_twice.ipynb").write_text(json.dumps(book))
    (row,) = grade(tmp_path / "00_twice.ipynb")
    assert row.passed
    places = re.findall(r"cell \d+", row.message)
    assert places == ["cell 2", "cell 3", "cell 5"], row.message


def test_limits_on_time(tmp_path) -> None:
    path = _notebook(tmp_path / "00_slow.ipynb", "import time\ntime.sleep(60)", CHECK)
    row = grade(path, seconds=6)[0]
    assert not row.passed
    assert "longer than 6 s" in row.message
    assert "cell 1 (c0)" in row.message


def test_a_loop_that_no_exception_leaves_ends_by_the_limit(tmp_path) -> None:
    # a loop inside one call of C
    stubborn = "def pages_needed(num_tokens, page_size):\n    return sum(iter(int, 1))"
    child = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])"
    )
    path = _notebook(tmp_path / "00_stubborn.ipynb", child, stubborn, CHECK)
    row = grade(path, seconds=8)[0]  # waits neither for the loop nor for the child
    assert not row.passed
    assert "longer than 8 s" in row.message
    assert "cell 3 (c2)" in row.message


def test_limits_on_memory(tmp_path) -> None:
    if sys.platform == "win32":
        pytest.skip("Windows has no such limit")
    path = _notebook(tmp_path / "00_big.ipynb", "block = bytearray(64 << 30)", RIGHT, CHECK)
    assert grade(path)[0].passed, "the cell that asks for too much fails alone"
    greedy = "def pages_needed(num_tokens, page_size):\n    return len(bytearray(64 << 30))"
    row = grade(_notebook(tmp_path / "00_greedy.ipynb", greedy, CHECK))[0]
    assert not row.passed
    assert "MemoryError" in row.message


def test_a_process_that_dies_says_where(tmp_path) -> None:
    path = _notebook(tmp_path / "00_dies.ipynb", RIGHT, "import os\nos._exit(7)", CHECK)
    row = grade(path)[0]
    assert not row.passed
    assert "ended early, in cell 2 (c1) (exit code 7)" in row.message


def test_the_exit_code_says_whether_all_is_solved(tmp_path, capsys) -> None:
    others = [task for task in exercises("00") if task.id != "00-pages-needed"]
    assert others == [], "add their solutions below"
    assert main(["check", str(_notebook(tmp_path / "00_right.ipynb", RIGHT, CHECK))]) == 0
    assert "1 of 1 exercises solved" in capsys.readouterr().out
    wrong = RIGHT.replace("-(-num_tokens // page_size)", "num_tokens // page_size")
    assert main(["check", str(_notebook(tmp_path / "00_wrong.ipynb", wrong, CHECK)), "--json"]) == 1
    out = capsys.readouterr().out
    told = json.loads(out)
    assert (told["solved"], told["of"]) == (0, 1)
    assert "svg" not in out, "grades are words; pictures are for the notebook"


def test_not_a_notebook(tmp_path, capsys) -> None:
    with pytest.raises(ArgumentError, match="no such file"):
        grade(tmp_path / "none.ipynb")
    (tmp_path / "bad.ipynb").write_text("{")
    assert main(["check", str(tmp_path / "bad.ipynb")]) == 2
    assert "not a Jupyter notebook" in capsys.readouterr().err


def test_check_never_raises(capsys) -> None:
    assert not check("00-nothing", len)
    assert not check("zz", len)
    assert not check("00-pages-needed", 3)  # type: ignore[arg-type]
    assert "pass your function itself" in capsys.readouterr().out
