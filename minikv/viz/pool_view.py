"""What is known of every page of a pool: who holds it, what its slots show, its place in the free
list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.live import Texts, holders, ints

DETAIL_PAGES, DETAIL_SLOTS = 65, 8


@dataclass
class Page:
    """One page as drawn: who holds it, what its slots show, where it stands in the free list (-1:
    it is held)."""

    number: int
    free_at: int = -1
    letters: list[str] = field(default_factory=list)
    cached: bool = False
    locks: int = 0
    cells: list[tuple[str, str, style.Request | None]] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "free" if self.free_at >= 0 else "cached" if self.cached else "held"


@dataclass
class Pool:
    """What is known of every page, by its number; page 0 is among them and is never drawn.

    Whole pools lie in arrays, as there may be a million pages: a `Page` is made for those that are
    drawn one by one.
    """

    free: np.ndarray  # the free list, next first
    free_at: np.ndarray  # each page's place in it
    cached: np.ndarray
    locks: np.ndarray
    letters: dict[int, list[str]] = field(default_factory=dict)
    cells: dict[int, list[tuple[str, str, style.Request | None]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.free_at) - 1

    def page(self, n: int) -> Page:
        at, cached, locks = int(self.free_at[n]), bool(self.cached[n]), int(self.locks[n])
        return Page(n, at, self.letters.get(n, []), cached, locks, self.cells.get(n, []))

    def pages(self, numbers: Iterable[int] | None = None) -> list[Page]:
        """The pages of these numbers; None: all."""
        return [self.page(n) for n in (range(1, self.count + 1) if numbers is None else numbers)]


def read(
    allocator: Any, requests: Any = None, cache: Any = None, table: Any = None, decode: Any = None
) -> Pool:
    """All pages of `allocator`, with what is known about each of their slots (not in a large pool).

    Raises
    ------
    ArgumentError
        When requests or cache hold slots that this allocator does not have.
    """
    size, text, detail, many = (
        allocator.page_size,
        Texts(decode),
        detailed(allocator),
        allocator.num_pages + 1,
    )
    unknown = "plain" if requests is None and cache is None else "empty"
    free = _array(allocator.free_pages)
    pool = Pool(free, np.full(many, -1), np.zeros(many, bool), np.zeros(many, np.int64))
    pool.free_at[free] = np.arange(len(free))
    if detail:
        kinds = {True: [("", "free", None)] * size, False: [("", unknown, None)] * size}
        pool.cells = {n: list(kinds[bool(pool.free_at[n] >= 0)]) for n in range(many)}
    for node in cache.nodes() if cache is not None else ():
        slots = _array(node.slots)[: len(node.key)]
        held = _numbers("cache", slots, allocator)
        pool.cached[held], pool.locks[held] = True, np.maximum(pool.locks[held], node.lock_count)
        for token, slot in zip(ints(node.key), slots.tolist(), strict=False) if detail else ():
            pool.cells[slot // size][slot % size] = (text(token), "plain", None)
    for one in holders(requests, table):
        for n in _numbers("requests", np.array(one.slots, np.int64), allocator).tolist():
            if n and one.letter not in pool.letters.setdefault(n, []):
                pool.letters[n].append(one.letter)
        for i, slot in enumerate(one.slots if detail else ()):
            cells = pool.cells[slot // size]
            if slot < size:
                continue
            shown, kind, who = cells[slot % size]
            shown = text(one.tokens[i]) if i < len(one.tokens) else shown
            if i >= one.reused and kind != "computed":
                kind, who = "computed", one.look
            elif who is None:
                kind, who = "reused", one.look
            cells[slot % size] = (shown, kind, who)
    return pool


def _array(values: Any) -> np.ndarray:
    """A tensor, array or sequence of integers as int64 on the host."""
    values = values.cpu() if hasattr(values, "cpu") else [] if values is None else values
    return np.asarray(values, dtype=np.int64).reshape(-1)


def _numbers(argument: str, slots: np.ndarray, allocator: Any) -> np.ndarray:
    """The pages of `slots`, each once."""
    size, end = allocator.page_size, (allocator.num_pages + 1) * allocator.page_size
    outside = slots[(slots < 0) | (slots >= end)]
    if len(outside):
        raise ArgumentError(
            argument, int(outside[0]), f"is no slot of this allocator, whose slots end at {end - 1}"
        )
    return np.unique(slots // size)


def detailed(allocator: Any) -> bool:
    """Whether each slot can be drawn."""
    return allocator.num_pages < DETAIL_PAGES and allocator.page_size <= DETAIL_SLOTS
