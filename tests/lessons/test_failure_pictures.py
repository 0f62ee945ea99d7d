"""What a failing check draws: for every known wrong answer a picture, for hostile ones at least the
verdict."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from minikv.lessons import check, exercises
from minikv.lessons.engine import draw, mistakes
from minikv.lessons.picture import side_by_side, stack
from minikv.viz.style import Drawing

SVG = "{http://www.w3.org/2000/svg}"


def assert_picture(drawing) -> None:
    assert isinstance(drawing, Drawing), drawing
    assert drawing.title.strip()
    assert drawing.desc.strip()
    assert drawing.text.strip()
    root = ET.parse(io.StringIO(drawing.svg)).getroot()
    assert root.get("role") == "img"
    assert root.get("viewBox")
    assert (root[0].tag, root[1].tag) == (SVG + "title", SVG + "desc")
    assert root[0].text
    assert root[1].text
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert len(drawing.svg) < 200_000


@pytest.mark.parametrize("task", exercises(), ids=lambda t: t.id)
def test_every_wrong_answer_is_drawn(task) -> None:
    for mistake in mistakes(task):
        verdict = check(task.id, mistake.function, quiet=True)
        assert_picture(verdict.drawing)
        assert "image/svg+xml" in verdict._repr_mimebundle_()
        assert isinstance(verdict.drawing, Drawing)
        assert bool(task.picture) == (verdict.drawing.title != "Expected, and yours"), (
            "the state failed to be drawn"
        )


class Bad:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise SystemExit

    def __eq__(self, other) -> bool:
        raise ValueError

    def __len__(self) -> int:
        raise ValueError

    def __iter__(self):
        raise ValueError

    __hash__ = None  # type: ignore[assignment]


class BadList(list):
    def __len__(self) -> int:
        raise ValueError

    def __iter__(self):
        raise ValueError


LOOP: list = []
LOOP.append(LOOP)
HOSTILE = [
    *(
        None,
        True,
        float("nan"),
        float("-inf"),
        10**5000,
        "",
        "\x00\ud800\u202e<&>" * 900,
        b"x",
        object(),
        Bad,
        len,
        {1},
    ),
    *(
        [],
        (),
        {},
        [[]],
        [None],
        [[None], 3],
        {"a": {}},
        {Bad: 1},
        {None: [1]},
        LOOP,
        [LOOP] * 9,
        [Bad(), [Bad()]],
    ),
    *(
        list(range(10**5)),
        [[1]] * 10**5,
        np.zeros((0, 3)),
        np.full((3, 3, 3), np.nan),
        np.array(3),
        np.array("x"),
    ),
    *(
        torch.zeros(3),
        torch.tensor(1.5),
        torch.zeros(2, 2, requires_grad=True),
        torch.float32,
        iter([1]),
        range(3),
    ),
    *(
        SystemExit(),
        [("alloc", "x" * 500, 10**30)],
        [("alloc", "\x00", 1), ("free", 3)],
        [("free", "q"), ("alloc",)],
    ),
]


@pytest.mark.parametrize("task", exercises(), ids=lambda t: t.id)
def test_hostile_results_are_drawn_or_told(task) -> None:
    for got in [*HOSTILE, Bad(), BadList([1])]:
        expected = task.oracle(*task.worked.args)
        drawing = draw(task, task.worked, expected, got)
        if isinstance(drawing, str):
            assert drawing == f"(no picture of a {type(got).__name__})"
        else:
            assert_picture(drawing)


@pytest.mark.parametrize(
    "id", ["00-pages-needed", "03-refused", "04-alloc-decode", "07-duplicate-insert"]
)
def test_a_check_survives_hostile_results(id) -> None:
    for got in [*HOSTILE, Bad(), [Bad(), Bad()], BadList([1])]:
        assert not check(id, lambda *args, got=got: got, quiet=True)


def test_a_result_that_cannot_be_read_is_told_in_words() -> None:
    verdict = check("00-pages-needed", lambda *a: BadList([1]), quiet=True)
    assert not verdict
    assert verdict.drawing == "(no picture of a BadList)"
    assert set(verdict._repr_mimebundle_()) == {"text/plain"}


@pytest.mark.parametrize(
    ("expected", "got", "part", "at"),
    [
        (2, 1, "", 0),
        ([1, 2, 3], [1, 2, 4], "", 2),
        ([1, 2], [1, 2, 3], "", 2),
        ([1, 2], [1], "", 1),
        ([], [5], "", 0),
        ([0.5, 1.0], [0.5, float("nan")], "", 1),
        ([[1, 2], [3, 4]], np.array([[1, 2], [3, 5]]), "[1]", 1),
        ({"a": [1], "b": [2]}, {"a": [1], "b": [3]}, "b", 0),
        (list(range(900)), [*range(700), 0, *range(701, 900)], "", 700),
        ([[i] for i in range(50)], [[i] for i in range(40)], "[40]", 0),
    ],
)
def test_the_first_difference_is_marked(expected, got, part, at) -> None:
    drawing = side_by_side(expected, got)
    assert drawing.desc.endswith(f"they differ first {part} at {at}.".replace("  ", " "))
    assert drawing.svg.count("<circle") == 1
    assert drawing.text.count("^ differs") == 1
    assert any((row["part"], row["at"]) == (part, at) for row in drawing.data), (
        "what differs lies in the cells shown"
    )


def test_long_results_are_cut_and_say_so() -> None:
    drawing = side_by_side(list(range(100)), [*range(70), 0, *range(71, 100)], note="a case")
    assert "+63 before" in drawing.text
    assert "more" in drawing.text
    assert (
        "+34 more before, +10 more after"
        in side_by_side([[i] for i in range(50)], [[i] for i in range(37)]).text
    )


def test_numbers_that_look_alike_are_written_out() -> None:
    assert "2.00005" in side_by_side([2.0], [2.00005]).text


def test_a_raised_error_is_drawn_beside_what_was_expected() -> None:
    verdict = check("04-slots-of", lambda *a: 1 // 0, quiet=True)
    assert_picture(verdict.drawing)
    assert "raised ZeroDivisionError" in str(verdict.drawing)


def test_pictures_stack() -> None:
    one = side_by_side([1], [2])
    both = stack(one, side_by_side([1], [3]))
    assert_picture(both)
    assert both.text.count("^ differs") == 2


def test_a_terminal_gets_words_and_a_notebook_the_picture_once(capsys) -> None:
    verdict = check("00-pages-needed", lambda tokens, size: tokens // size)
    assert "^ differs" in capsys.readouterr().out
    assert "image/svg+xml" in verdict._repr_mimebundle_()
    had = InteractiveShell.initialized()
    InteractiveShell.instance()
    try:
        with capture_output() as seen:
            verdict = check("00-pages-needed", lambda tokens, size: tokens // size)
    finally:
        if not had:
            InteractiveShell.clear_instance()
    assert [sorted(output.data) for output in seen.outputs] == [["image/svg+xml", "text/plain"]]
    assert "^ differs" not in seen.stdout
    assert set(verdict._repr_mimebundle_()) == {"text/plain"}
