"""Exercises of notebook 03: contiguous memory, first fit, and a refusal with memory to spare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.engine import Case, Exercise
from minikv.lessons.states import events, memory_state
from minikv.viz.style import Drawing, many

# A trace is a list of ("alloc", name, size) and ("free", name); freeing a refused request does
# nothing.


def _first_fit_oracle(capacity: int, trace: list[Any]) -> list[int | None]:
    """Try every address from the left, cell by cell."""
    cells: list[Any] = [None] * capacity
    starts: list[int | None] = []
    for event in trace:
        if event[0] == "free":
            cells = [None if cell == event[1] else cell for cell in cells]
            continue
        _, name, size = event
        places = (
            i
            for i in range(capacity - size + 1)
            if all(cell is None for cell in cells[i : i + size])
        )
        start = next(places, None)
        starts.append(start)
        if start is not None:
            cells[start : start + size] = [name] * size
    return starts


def _first_fit_picture(case: Case, expected: Any, got: Any) -> Drawing:
    """Memory before the first alloc that got another address than it should."""
    capacity, trace = case.args
    come = got if isinstance(got, list | tuple) else []
    wrong = next(
        (i for i, (a, b) in enumerate(zip(expected, come, strict=False)) if a is not b and a != b),
        len(come),
    )
    allocs = [i for i, event in enumerate(trace) if event[0] == "alloc"]
    if not allocs:
        return memory_state(capacity, [], [], "Memory without any request")
    wrong = min(wrong, len(allocs) - 1)
    _, name, size = trace[allocs[wrong]]
    title = f"Memory when {name} asks for {many(size, 'cell')}"
    return memory_state(
        capacity,
        trace[: allocs[wrong] + 1],
        expected,
        title,
        f"alloc number {wrong}, counted from 0",
    )


def _first_fit_grid() -> Iterator[Case]:
    yield Case((8, []), "no requests")
    yield Case((8, [("alloc", "a", 8)]), "exactly all of it")
    yield Case((8, [("alloc", "a", 9)]), "one cell too many: None")
    yield Case(
        (8, [("alloc", "a", 3), ("alloc", "b", 3), ("free", "a"), ("alloc", "c", 2)]),
        "a hole is used again, from its left",
    )
    yield Case(
        (
            8,
            [
                ("alloc", "a", 3),
                ("alloc", "b", 2),
                ("alloc", "c", 3),
                ("free", "a"),
                ("free", "c"),
                ("alloc", "d", 4),
            ],
        ),
        "six cells free, but no four of them together",
    )
    yield Case(
        (
            8,
            [("alloc", "a", 2), ("alloc", "b", 2), ("free", "a"), ("free", "b"), ("alloc", "c", 4)],
        ),
        "two holes become one",
    )
    yield Case(
        (4, [("alloc", "a", 4), ("alloc", "b", 1), ("free", "a"), ("alloc", "c", 1)]),
        "a refused request leaves no trace",
    )
    yield Case(
        (
            10,
            [
                ("alloc", "a", 2),
                ("alloc", "b", 4),
                ("alloc", "c", 2),
                ("free", "b"),
                ("alloc", "d", 2),
            ],
        ),
        "first, not best",
    )


def _first_fit_random(rng: np.random.Generator) -> Case:
    alive, trace = [], []
    for i in range(int(rng.integers(1, 14))):
        if alive and rng.random() < 0.4:
            trace.append(("free", alive.pop(int(rng.integers(len(alive))))))
        else:
            name = chr(97 + i)
            alive.append(name)
            trace.append(("alloc", name, int(rng.integers(1, 9))))
    return Case((16, trace))


FIRST_FIT = Exercise(
    id="03-first-fit",
    title="First fit",
    statement=(
        "Memory is `capacity` cells in a row. The trace has `('alloc', name, size)` and `('free', name)`. Give each request the "
        "leftmost place with `size` free cells side by side. Return one start address per alloc, in order, or None where no "
        "place is large enough. With capacity 8: alloc a 3, alloc b 3, free a, alloc c 2 gives `[0, 3, 0]`."
    ),
    signature="def first_fit(capacity: int, trace: list[tuple]) -> list[int | None]",
    worked=Case(
        (8, [("alloc", "a", 3), ("alloc", "b", 3), ("free", "a"), ("alloc", "c", 2)]),
        "the worked case",
    ),
    grid=_first_fit_grid,
    random=_first_fit_random,
    oracle=_first_fit_oracle,
    picture=_first_fit_picture,
    hints=(
        "A list of cells, each None or a name, is the simplest state.",
        "A start i is good when all of cells[i : i + size] are free and i + size <= capacity.",
        "Loop i upwards and take the first good one; a refused request changes nothing.",
    ),
)


def _judge_refused(case: Case, expected: Any, got: Any) -> str | None:
    (capacity,) = case.args
    if not isinstance(got, list | tuple) or not got or got[-1][0] != "alloc":
        return f"returned {got!r:.80}; return a trace (a list of events) that ends with an alloc"
    starts = _first_fit_oracle(capacity, list(got))
    if starts[-1] is not None:
        return f"the last alloc is not refused: it fits at address {starts[-1]}"
    free, sizes = capacity, {}
    for event, start in _with_starts(got, starts[:]):
        if event[0] == "alloc" and start is not None:
            free, sizes[event[1]] = free - event[2], event[2]
        elif event[0] == "free":
            free += sizes.pop(event[1], 0)
    if got[-1][2] > free:
        return f"the last alloc asks for {got[-1][2]} cells and only {free} are free: it is refused for want of memory"
    return None


def _with_starts(trace: Any, starts: list[int | None]) -> Iterator[tuple[Any, int | None]]:
    for event in trace:
        yield event, starts.pop(0) if event[0] == "alloc" else None


def _refused_picture(case: Case, expected: Any, got: Any) -> Drawing:
    """Memory before the last alloc of the learner's trace, as far as it is one."""
    (capacity,) = case.args
    trace = events(got)
    starts = _first_fit_oracle(capacity, trace)
    last: tuple[Any, ...] = trace[-1] if trace else ("free", "")
    asked = (
        f"{last[1]} asks for {many(last[2], 'cell')}" if last[0] == "alloc" else "your trace ends"
    )
    return memory_state(
        capacity,
        trace,
        starts,
        f"Memory when {asked}",
        f"after {many(len(trace), 'event')} of your trace",
    )


REFUSED = Exercise(
    id="03-refused",
    title="Refused, though enough is free",
    statement=(
        "Build a trace for `capacity` cells (at least 3) whose last event is an alloc that first fit refuses although that many "
        "cells are free in all. This is external fragmentation: the memory is there, but not in one piece.\n\n"
        "With 8 cells, `[('alloc', 'a', 8), ('alloc', 'b', 1)]` does not count: `b` is refused, but nothing is free."
    ),
    signature="def refused_trace(capacity: int) -> list[tuple]",
    worked=Case((8,), "the worked case"),
    grid=lambda: iter(
        [
            Case((3,), "three cells are enough"),
            Case((4,), "an even capacity"),
            Case((5,), "an odd capacity"),
        ]
    ),
    random=lambda rng: Case((int(rng.integers(3, 200)),)),
    oracle=lambda capacity: capacity,
    judge=_judge_refused,
    picture=_refused_picture,
    alone=True,
    hints=(
        "Fill the memory with small requests, then free some that are not neighbours.",
        "With three requests of one cell, freeing the first and the last leaves two free cells apart.",
        "alloc a 1, alloc b 1, alloc c capacity-2; free a, free c; now capacity-1 cells are free, but b stands between them.",
    ),
)

EXERCISES = [FIRST_FIT, REFUSED]
