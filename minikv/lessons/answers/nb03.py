"""Notebook 03: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def _holes(cells):
    """(start, length) of every free run."""
    holes, start = [], None
    for i, cell in enumerate([*cells, "end"]):
        if cell is None and start is None:
            start = i
        elif cell is not None and start is not None:
            holes.append((start, i - start))
            start = None
    return holes


def _simulate(capacity, trace, choose):
    cells, starts = [None] * capacity, []
    for event in trace:
        if event[0] == "free":
            cells = [None if cell == event[1] else cell for cell in cells]
            continue
        _, name, size = event
        start = choose(cells, size)
        starts.append(start)
        if start is not None:
            cells[start : start + size] = [name] * size
    return starts


def first_fit(capacity, trace):
    return _simulate(
        capacity, trace, lambda cells, size: next((s for s, n in _holes(cells) if n >= size), None)
    )


def _best_fit(capacity, trace):
    def choose(cells, size):
        fits = [(n, s) for s, n in _holes(cells) if n >= size]
        return min(fits)[1] if fits else None

    return _simulate(capacity, trace, choose)


def _bump_only(capacity, trace):
    top, starts = 0, []
    for event in trace:
        if event[0] == "alloc":
            fits = top + event[2] <= capacity
            starts.append(top if fits else None)
            top += event[2] if fits else 0
    return starts


def _counts_free_cells(capacity, trace):
    def choose(cells, size):
        if cells.count(None) < size:
            return None
        return next((s for s, n in _holes(cells) if n >= size), cells.index(None))

    return _simulate(capacity, trace, choose)


def _last_fit(capacity, trace):
    return _simulate(
        capacity,
        trace,
        lambda cells, size: next((s for s, n in reversed(_holes(cells)) if n >= size), None),
    )


def refused_trace(capacity):
    return [
        ("alloc", "a", 1),
        ("alloc", "b", 1),
        ("alloc", "c", capacity - 2),
        ("free", "a"),
        ("free", "c"),
        ("alloc", "d", capacity - 1),
    ]


def _refused_too_large(capacity):
    return [("alloc", "a", capacity + 1)]


def _refused_fits(capacity):
    return [("alloc", "a", 1), ("alloc", "b", capacity - 1), ("free", "a"), ("alloc", "c", 1)]


def _refused_neighbours(capacity):
    return [
        ("alloc", "a", 1),
        ("alloc", "b", 1),
        ("alloc", "c", capacity - 2),
        ("free", "a"),
        ("free", "b"),
        ("alloc", "d", 2),
    ]


SOLUTIONS = {"03-first-fit": first_fit, "03-refused": refused_trace}
MISTAKES = {
    "03-first-fit": [
        Mistake("the smallest hole that fits is best fit; first fit takes the leftmost", _best_fit),
        Mistake("freed cells are never used again", _bump_only),
        Mistake("free cells are counted, but they must lie side by side", _counts_free_cells),
        Mistake("the rightmost hole is taken; first fit takes the leftmost", _last_fit),
    ],
    "03-refused": [
        Mistake("more is asked for than there is at all", _refused_too_large),
        Mistake("the freed cell is just what the last request needs", _refused_fits),
        Mistake("two neighbours that are freed become one hole", _refused_neighbours),
    ],
}
