"""Grading a file from outside: fresh process, all exercises judged whatever single cells do."""

from __future__ import annotations

import json

import nbformat
import pytest

from minikv.cli import main
from minikv.errors import ArgumentError
from minikv.lessons import check
from minikv.lessons.grade import grade

RIGHT = "def pages_needed(num_tokens, page_size):\n    return -(-num_tokens // page_size)"
CHECK = "from minikv.lessons import check\ncheck('00-pages-needed', pages_needed)"


def _notebook(path, *sources):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s, id=f"c{i}") for i, s in enumerate(sources)])
    nbformat.write(book, path)
    return path


def test_a_solved_notebook(tmp_path, capsys) -> None:
    path = _notebook(tmp_path / "00_mine.ipynb", RIGHT, CHECK)
    main(["check", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    row = next(e for e in told["exercises"] if e["exercise"] == "00-pages-needed")
    assert row["passed"]
    assert row["cell"] == "cell 2 (c1)"


def test_b134_a_copied_check_cell_is_named_and_the_rest_still_runs(tmp_path) -> None:
    path = _notebook(tmp_path / "copy.ipynb", "1 / 0", RIGHT, CHECK, CHECK)
    (row,) = [g for g in grade(path) if g.exercise == "00-pages-needed"]
    assert row.passed
    assert "cell 3 (c2) and cell 4 (c3)" in row.message


def test_limits_on_time(tmp_path) -> None:
    path = _notebook(tmp_path / "00_slow.ipynb", "import time\ntime.sleep(60)", CHECK)
    row = grade(path, seconds=6)[0]
    assert not row.passed
    assert "longer than 6 s" in row.message


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
