"""The page allocator once more, in plain Python lists, token by token: what the real one is
compared with."""

from __future__ import annotations

import random
from collections import deque


class PlainAllocator:
    """Lists and loops; raises nothing, so tests ask it only what is allowed."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size, self.free_pages = page_size, list(range(1, num_pages + 1))

    def alloc_extend(
        self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int]
    ) -> list[int] | None:
        free, slots = deque(self.free_pages), []
        for prefix, length, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
            for position in range(prefix, length):
                if position % self.page_size == 0:
                    if not free:
                        return None
                    last = free.popleft() * self.page_size - 1
                last += 1
                slots.append(last)
        self.free_pages = list(free)
        return slots

    def alloc_decode(self, seq_lens: list[int], last_loc: list[int]) -> list[int] | None:
        return self.alloc_extend([n - 1 for n in seq_lens], seq_lens, last_loc)

    def free(self, slots: list[int]) -> None:
        self.free_pages = sorted({slot // self.page_size for slot in slots}) + self.free_pages


class Requests:
    """Random requests whose pages are really held, so that `last_loc` is as it would be in a
    server."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.page_size, self.random = page_size, random.Random(seed)
        self.slots: list[list[int]] = []

    def lengths(self) -> list[int]:
        return [len(s) for s in self.slots]

    def last(self) -> list[int]:
        return [s[-1] if s else -1 for s in self.slots]

    def grow(self, new: list[int], slots: list[int]) -> None:
        at = 0
        for mine, count in zip(self.slots, new, strict=True):
            mine += slots[at : at + count]
            at += count
        assert at == len(slots)
