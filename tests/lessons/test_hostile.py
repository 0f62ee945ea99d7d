"""Answers that nobody foresaw: a check says what is wrong, and never raises."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from minikv.lessons import check


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


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
        ("00-pages-needed", _one_line_loop, "never end"),
        ("00-pages-needed", _swallows, "never end"),
        ("00-pages-needed", _swallows_around, "never end"),
        ("00-pages-needed", _swallows_and_answers, "never end"),
        ("00-pages-needed", _swallows_and_raises, "never end"),
    ],
)
def test_any_answer_gets_a_verdict(id, answer, says) -> None:
    verdict = check(id, answer, quiet=True)
    assert not verdict
    assert says in verdict.message


def test_after_an_endless_loop_nothing_lingers() -> None:
    before, threads = sys.gettrace(), threading.active_count()
    for _ in range(5):
        assert not check("00-pages-needed", _swallows, quiet=True)
    sum(i for i in range(10**6))  # a late exception would arrive here
    assert sys.gettrace() is before
    assert threading.active_count() == threads
    assert check("00-pages-needed", lambda tokens, size: -(-tokens // size), quiet=True)
