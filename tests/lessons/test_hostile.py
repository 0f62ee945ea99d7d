"""Answers that nobody foresaw: a check says what is wrong, and never raises."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest
import torch

from minikv.lessons import check
from minikv.lessons.budget import OutOfSteps, limited


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Odd(BaseException):
    pass


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Trap:
    """A result that runs code however it is looked at."""

    @property
    def detach(self):
        raise SystemExit

    def __eq__(self, other):
        raise Odd

    def __repr__(self) -> str:
        raise Odd

    __str__ = __repr__
    __hash__ = None  # type: ignore[assignment]


class OddFunction:
    def __call__(self, *args):
        return Trap()

    def __getattr__(self, name):
        raise Odd


def _raises(e):
    def answer(*args):
        raise e

    return answer


def _exits(*args):
    raise SystemExit


def _unprintable(*args):
    raise Unprintable


def _one_line_loop(*args):
    # fmt: off
    while True: pass  # noqa: E701
    # fmt: on


def _swallows(*args):
    while True:
        try:  # noqa: SIM105
            len("")
        except:  # noqa: E722
            pass


def _swallows_around(*args):
    try:
        while True:
            pass
    except:  # noqa: E722
        while True:
            try:
                _helper()
            except:  # noqa: E722
                continue


def _helper():
    return [len("") for _ in range(3)]


def _swallows_and_answers(num_tokens, page_size):
    try:
        while True:
            pass
    except BaseException:
        return -(-num_tokens // page_size)


def _swallows_and_raises(*args):
    try:
        while True:
            pass
    except BaseException as e:
        raise ValueError("something else") from e


@pytest.mark.parametrize(
    ("id", "answer", "says"),
    [
        ("03-refused", lambda *a: [1, 2, 3], "not of the kind"),
        ("07-duplicate-insert", lambda *a: [-1], "not of the kind"),
        ("06-insert-split", lambda *a: torch.zeros(3), "not of the kind"),
        ("00-pages-needed", lambda *a: 10**400, ""),
        ("00-pages-needed", _exits, "SystemExit"),
        ("00-pages-needed", _unprintable, "Unprintable"),
        ("00-pages-needed", _raises(Exits()), "Exits: (no message)"),
        ("00-pages-needed", _raises(Odd()), "Odd"),
        ("00-pages-needed", _raises(ValueError("\ud800" * 9999)), r"ValueError: \ud800"),
        ("00-pages-needed", lambda *a: Trap(), "not of the kind"),
        ("00-pages-needed", lambda *a: [Trap()], "not of the kind"),
        ("00-pages-needed", _one_line_loop, "never end"),
        ("00-pages-needed", _swallows, "never end"),
        ("00-pages-needed", _swallows_around, "never end"),
        ("00-pages-needed", _swallows_and_answers, "never end"),
        ("00-pages-needed", _swallows_and_raises, "never end"),
    ],
)
def test_any_answer_gets_a_verdict(id, answer, says) -> None:
    verdict = check(id, answer)
    assert not verdict
    print(verdict, verdict.message)
    assert says in verdict.message


def test_a_function_or_an_id_that_runs_code_gets_a_verdict() -> None:
    for id, answer, says in (
        ("00-pages-needed", OddFunction(), "Odd"),
        ("00-pages-needed", Trap(), "pass your function itself"),
        (Trap(), len, "cannot be judged"),
    ):
        verdict = check(id, answer)  # type: ignore[arg-type]
        assert not verdict
        assert says in verdict.message


def _continues(*args):
    while True:
        try:
            time.sleep(0)
        finally:
            continue  # noqa: B012


def _continues_inside(*args):
    while True:
        try:
            while True:
                try:
                    while True:
                        try:  # noqa: SIM105
                            time.sleep(0)
                        except BaseException:
                            pass
                finally:
                    continue  # noqa: B012
        finally:
            continue  # noqa: B012


def _suppresses(*args):
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0)


def _returns_from_finally(*args):
    try:
        while True:
            pass
    finally:
        return 3  # noqa: B012


class _Lingers:
    def __del__(self):
        _continues()


def _leaves_a_loop_to_the_collector(*args):
    _Lingers()
    return 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "answer",
    [
        _continues,
        _continues_inside,
        _suppresses,
        _returns_from_finally,
        _leaves_a_loop_to_the_collector,
    ],
)
def test_loops_that_catch_everything_end_by_the_budget(answer) -> None:
    for steps in range(1, 40):  # wherever the first exception strikes
        with pytest.raises(OutOfSteps):
            limited(answer, steps, answer)
    assert limited(answer, 1000, lambda: 5) == 5


def test_after_an_endless_loop_nothing_lingers() -> None:
    before, threads = sys.gettrace(), threading.active_count()
    for _ in range(5):
        assert not check("00-pages-needed", _swallows, quiet=True)
    sum(i for i in range(10**6))  # a late exception would arrive here
    assert sys.gettrace() is before
    assert threading.active_count() == threads
    assert check("00-pages-needed", lambda tokens, size: -(-tokens // size), quiet=True)
