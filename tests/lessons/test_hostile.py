"""Answers that nobody foresaw: a check says what is wrong, and never raises."""

from __future__ import annotations

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
    ],
)
def test_any_answer_gets_a_verdict(id, answer, says) -> None:
    verdict = check(id, answer, quiet=True)
    assert not verdict
    assert says in verdict.message
