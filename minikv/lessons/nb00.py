"""Exercises of notebook 00: what a check is, and the smallest sum in paging."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minikv.lessons.engine import Case, Exercise


def _pages_oracle(num_tokens: int, page_size: int) -> int:
    """Count pages by filling them one token at a time."""
    pages = room = 0
    for _ in range(num_tokens):
        if room == 0:
            pages, room = pages + 1, page_size
        room -= 1
    return pages


def _pages_grid() -> Iterator[Case]:
    for page_size in (1, 4, 16):
        for num_tokens, why in (
            (0, "no tokens need no page"),
            (1, "one token opens a page"),
            (page_size - 1, "one token fewer than a page"),
            (page_size, "exactly one full page"),
            (page_size + 1, "one token more than a page"),
            (3 * page_size, "exactly three full pages"),
        ):
            yield Case((num_tokens, page_size), why)


def _pages_random(rng: np.random.Generator) -> Case:
    return Case((int(rng.integers(0, 2000)), int(rng.integers(1, 65))))


PAGES_NEEDED = Exercise(
    id="00-pages-needed",
    title="Repair pages_needed",
    statement=(
        "A page holds `page_size` tokens. How many pages do `num_tokens` tokens need? "
        "With pages of 4, six tokens need 2 pages: one full page and one half full. "
        "The function below is wrong for some inputs."
    ),
    signature="def pages_needed(num_tokens: int, page_size: int) -> int",
    worked=Case((6, 4), "the worked case"),
    grid=_pages_grid,
    random=_pages_random,
    oracle=_pages_oracle,
    hints=(
        "Try it by hand for 0, 3, 4 and 5 tokens with pages of 4. For which does your function answer wrongly?",
        "You need division that rounds up. Python's // rounds down.",
        "Add page_size - 1 to the tokens before dividing with //.",
    ),
)

EXERCISES = [PAGES_NEEDED]
