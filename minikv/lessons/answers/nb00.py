"""Notebook 00: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def pages_needed(num_tokens: int, page_size: int) -> int:
    return (num_tokens + page_size - 1) // page_size


def _rounds_down(num_tokens: int, page_size: int) -> int:
    return num_tokens // page_size


def _always_one_more(num_tokens: int, page_size: int) -> int:
    return num_tokens // page_size + 1


def _rounds_to_nearest(num_tokens: int, page_size: int) -> int:
    return round(num_tokens / page_size)


def _at_least_one(num_tokens: int, page_size: int) -> int:
    return max(1, (num_tokens + page_size - 1) // page_size)


SOLUTIONS = {"00-pages-needed": pages_needed}
MISTAKES = {
    "00-pages-needed": [
        Mistake("division that rounds down forgets the last, partly filled page", _rounds_down),
        Mistake("one page too many when the tokens fill their pages exactly", _always_one_more),
        Mistake(
            "rounding to the nearest forgets a page that is less than half full", _rounds_to_nearest
        ),
        Mistake("zero tokens need zero pages, not one", _at_least_one),
    ]
}
