"""Exercises of notebook 08: the index arrays of a ragged batch, and the order in which to run
requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

from minikv.lessons.engine import Case, Exercise
from minikv.lessons.states import batch_state, order_state
from minikv.viz.style import Drawing

# ------------------------------------------------------------------------------------------------- metadata arrays


def _arrays_oracle(requests: list[dict[str, Any]], page_size: int) -> dict[str, list[int]]:
    """Write down every token and every slot one by one, then count."""
    positions, slots, q_counts, kv_counts = [], [], [], []
    for request in requests:
        every = [page * page_size + i for page in request["pages"] for i in range(page_size)]
        positions += [request["prefix"] + i for i in range(request["new"])]
        slots += every[: request["prefix"]]
        q_counts.append(request["new"])
        kv_counts.append(request["prefix"])
    return {
        "qo_indptr": [sum(q_counts[:i]) for i in range(len(requests) + 1)],
        "kv_indptr": [sum(kv_counts[:i]) for i in range(len(requests) + 1)],
        "kv_indices": slots,
        "positions": positions,
    }


def _row(prefix: int, new: int, pages: list[int]) -> dict[str, Any]:
    return {"prefix": prefix, "new": new, "pages": pages}


def _arrays_grid() -> Iterator[Case]:
    yield Case(([], 4), "an empty batch: an indptr has one entry more than requests")
    yield Case(([_row(0, 3, [2])], 4), "no prefix: no slots to read")
    yield Case(([_row(4, 1, [2, 5])], 4), "a full page of prefix")
    yield Case(([_row(5, 2, [2, 5])], 4), "the prefix ends inside a page")
    yield Case(([_row(3, 0, [1]), _row(0, 2, [4])], 4), "a request with nothing new")
    yield Case(([_row(6, 2, [7, 1]), _row(0, 3, [4]), _row(4, 1, [3, 2])], 4), "three requests")
    yield Case(([_row(2, 1, [5, 3, 9])], 1), "page size 1")


def _arrays_random(rng: np.random.Generator) -> Case:
    p = int(rng.choice([1, 2, 4, 16]))
    pages = (rng.permutation(80) + 1).tolist()
    rows = []
    for _ in range(int(rng.integers(1, 6))):
        prefix, new = int(rng.integers(0, 3 * p + 1)), int(rng.integers(0, 2 * p + 1))
        need = -(-(prefix + new) // p)
        rows.append(_row(prefix, new, [pages.pop() for _ in range(need)]))
    return Case((rows, p))


ARRAYS = Exercise(
    id="08-batch-arrays",
    title="The arrays of a ragged batch",
    statement=(
        "Each request is a dict with `prefix` (tokens whose K and V are in the pool), `new` (tokens to compute) and `pages`. "
        "Return a dict of four lists: `qo_indptr` (where each request's new tokens begin, one entry more than requests), "
        "`kv_indptr` (where its prefix slots begin), `kv_indices` (the prefix slots, requests end to end) and `positions` "
        "(of every new token).\n\n"
        "One request with prefix 5, 2 new tokens, pages `[2, 5]` of 4: `qo_indptr [0, 2]`, `kv_indptr [0, 5]`, "
        "`kv_indices [8, 9, 10, 11, 20]`, `positions [5, 6]`."
    ),
    signature="def batch_arrays(requests: list[dict], page_size: int) -> dict[str, list[int]]",
    worked=Case(([_row(5, 2, [2, 5])], 4), "the worked case"),
    grid=_arrays_grid,
    random=_arrays_random,
    oracle=_arrays_oracle,
    picture=lambda case, expected, got: batch_state(expected, case.args[1]),
    hints=(
        "An indptr is a running sum that begins with 0.",
        "The slot of prefix token t is pages[t // page_size] * page_size + t % page_size.",
        "positions of a request are prefix, prefix + 1, ... prefix + new - 1.",
    ),
)

# ------------------------------------------------------------------------------------------- an order of requests


def computed_tokens(prompts: list[list[int]], order: list[int]) -> int:
    """Tokens computed when the cache holds just the request before: each prompt minus what it
    shares with that one."""
    total, before = 0, []
    for index in order:
        prompt, shared = prompts[index], 0
        while shared < min(len(prompt), len(before)) and prompt[shared] == before[shared]:
            shared += 1
        total += len(prompt) - shared
        before = prompt
    return total


def _order_oracle(prompts: list[list[int]]) -> int:
    return min(computed_tokens(prompts, list(order)) for order in permutations(range(len(prompts))))


def _judge_order(case: Case, expected: int, got: Any) -> str | None:
    prompts = case.args[0]
    if not isinstance(got, list | tuple) or sorted(got) != list(range(len(prompts))):
        return f"returned {got!r}; return every index 0..{len(prompts) - 1} once"
    computed = computed_tokens(prompts, list(got))
    return (
        None
        if computed == expected
        else f"order {list(got)} computes {computed} tokens; {expected} are enough"
    )


def _order_picture(case: Case, expected: int, got: Any) -> Drawing:
    """The prompts in the order that came, or as they stand when that is none."""
    prompts, every = case.args[0], list(range(len(case.args[0])))
    whole = (
        isinstance(got, list | tuple)
        and len(got) == len(every)
        and all(type(i) is int for i in got)
    )
    if whole and sorted(got) == every:
        return order_state(prompts, list(got), expected, "Your order of these prompts")
    return order_state(
        prompts, every, expected, "The prompts as they came (no order of them was returned)"
    )


def _order_grid() -> Iterator[Case]:
    yield Case(([],), "no requests")
    yield Case(([[1, 2]],), "one request")
    yield Case(([[1, 2], [3, 4]],), "nothing shared: any order does")
    yield Case(([[1, 2, 3], [9], [1, 2, 4]],), "two that share, one between them")
    yield Case(([[1, 2], [5, 6], [1, 3], [5, 7]],), "two families, mixed")
    yield Case(([[1, 1, 1, 1], [2], [1, 1, 2], [1, 1, 1, 2]],), "a family inside a family")
    yield Case(([[1], [1, 2], [1, 2, 3]],), "each begins with the one before")


def _order_random(rng: np.random.Generator) -> Case:
    return Case(
        (
            [
                rng.integers(1, 3, int(rng.integers(1, 7))).tolist()
                for _ in range(int(rng.integers(1, 7)))
            ],
        )
    )


ORDER = Exercise(
    id="08-best-order",
    title="Run what shares a prefix one after the other",
    statement=(
        "The pool is so small that the cache holds only the request that ran just before. Return an order of the prompts "
        "(their indices) that computes as few tokens as possible; the check compares with all permutations. "
        "For `[[1, 2, 3], [9], [1, 2, 4]]`, running 0, 2, 1 computes 3 + 1 + 1 = 5 tokens, but 0, 1, 2 computes 7."
    ),
    signature="def best_order(prompts: list[list[int]]) -> list[int]",
    worked=Case(([[1, 2, 3], [9], [1, 2, 4]],), "the worked case"),
    grid=_order_grid,
    random=_order_random,
    oracle=_order_oracle,
    judge=_judge_order,
    picture=_order_picture,
    alone=True,
    hints=(
        "Think of the prompts as paths in a tree. Which walk through the tree visits each edge once?",
        "A depth-first walk does: it finishes a family before it begins the next.",
        "Python compares lists from the left, like words in a dictionary. Where do words that begin alike stand there?",
    ),
)

EXERCISES = [ARRAYS, ORDER]
