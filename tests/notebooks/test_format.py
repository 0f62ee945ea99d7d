"""The notebooks as files: valid, executed in order, without stray metadata, readable by
everybody."""

from __future__ import annotations

import ast
import base64
import itertools
import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
TIERS = ("**T**", "**I**", "**G**")


@pytest.fixture(params=PATHS, ids=lambda p: p.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def book(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks() -> None:
    assert {p.name[:2] for p in PATHS} >= {f"{n:02}" for n in range(9)}


def test_valid_and_plain(book, path) -> None:
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert set(book.metadata) <= {"kernelspec", "language_info"}
    assert book.metadata.kernelspec.name == "python3"
    for cell in book.cells:
        assert re.fullmatch(r"[a-z][a-z0-9-]+", cell.id), f"{cell.id}: ids are written by hand"
        assert not re.fullmatch(r"[0-9a-f]{8}", cell.id)
        assert set(cell.metadata) <= {"tags", "jupyter"}, cell.id
    assert path.stat().st_size < 3_000_000


def test_executed_in_order_without_errors(book) -> None:
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(out.output_type != "error" for out in cell.outputs), cell.id
        assert all(out.get("name") != "stderr" for out in cell.outputs), (
            f"{cell.id} prints to stderr"
        )


def test_headings(book) -> None:
    levels = []
    for cell in book.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", "", cell.source, flags=re.S)
            levels += [len(mark) for mark in re.findall(r"^(#+) ", text, re.M)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels


def test_the_first_cell_states_question_time_and_tiers(book) -> None:
    text = book.cells[0].source
    assert any(tier in text for tier in TIERS)
    assert re.search(r"\d+ ?(s|min)", text)


def test_links_say_where_they_go(book) -> None:
    for cell in book.cells:
        if cell.cell_type == "markdown":
            for label in re.findall(r"(?<!!)\[([^\]]*)\]\(", cell.source):
                assert len(label) > 3, cell.id
                assert label.lower() not in {"here", "link", "this"}, cell.id


def test_pictures_have_words_and_are_small(book) -> None:
    for cell in book.cells:
        for alt in re.findall(r"!\[([^\]]*)\]\(", cell.source):
            assert len(alt) > 10, f"{cell.id}: a picture needs alt text"
        for out in cell.get("outputs", []):
            data = out.get("data", {})
            if "image/png" in data:
                assert len(base64.b64decode(data["image/png"])) < 200_000, cell.id
            if "image/svg+xml" in data:
                svg = data["image/svg+xml"]
                assert len(svg) < 200_000, f"{cell.id}: {len(svg)}"
                assert "<title" in svg, cell.id
                assert "<desc" in svg, cell.id
                assert 'role="img"' in svg, cell.id
                assert "viewBox" in svg, cell.id


def test_a_page_without_widgets_reads_well(book) -> None:
    for cell in book.cells:
        for out in cell.get("outputs", []):
            if "application/vnd.jupyter.widget-view+json" in out.get("data", {}):
                assert out.data["text/plain"].startswith("(in JupyterLab: "), (
                    f"{cell.id}: {out.data['text/plain']}"
                )


def test_formulas_are_words_and_code(book) -> None:
    for cell in book.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.S)
            assert not re.search(r"\$[^$\s][^$]*\$", prose), (
                f"{cell.id}: the tour's pages load no MathJax"
            )


def test_relative_links_lead_somewhere(book) -> None:
    for cell in book.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", cell.source):
                assert (FOLDER / target).exists(), f"{cell.id}: {target}"


def test_no_shell_lines(book) -> None:
    for cell in book.cells:
        if cell.cell_type == "code" and "colab" not in cell.metadata.get("tags", []):
            assert not re.search(r"^\s*[!%]", cell.source, re.M), (
                f"{cell.id}: shell lines and magics do not belong here"
            )


def test_each_exercise_is_checked_once(book, path) -> None:
    from minikv.lessons import exercises
    from minikv.lessons.worker import SKIPPED

    graded = [
        c.source
        for c in book.cells
        if c.cell_type == "code" and not SKIPPED & set(c.metadata.get("tags", []))
    ]
    for task in exercises(path.name[:2]):
        calls = sum(len(re.findall(rf"check\(\s*[\"']{task.id}[\"']", source)) for source in graded)
        assert calls == 1, f"{task.id}: {calls} cells check it, and grading takes the last"


def test_exercises_are_the_lessons_own(book, path) -> None:
    from minikv.lessons import exercises

    source = "\n".join(cell.source for cell in book.cells)
    for task in exercises(path.name[:2]):
        assert task.id in source, f"{task.id} is not in the notebook"
        assert task.title in source
        assert task.statement in source, f"{task.id}: the statement differs"
        assert task.signature in source, f"{task.id}: the signature differs"
        [stub] = [cell.source for cell in book.cells if cell.id == f"stub-{task.id}"]
        [function] = [node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)]
        [wanted] = ast.parse(f"{task.signature}: ...").body
        assert ast.dump(function.args) == ast.dump(wanted.args), (
            f"{task.id}: the stub's parameters differ"
        )
        assert ast.dump(function.returns or ast.Pass()) == ast.dump(wanted.returns or ast.Pass())
