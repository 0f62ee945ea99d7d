"""A small server without a model: requests that allocate, write, cache and end like real ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from minikv.memory import PagedAllocator, RequestTable
from minikv.prefix import RadixCache


@dataclass(eq=False)
class Req:
    token_ids: list[int]
    row: int = 0
    computed: int = 0
    node: Any = None
    protected_len: int = 0
    namespace: Hashable = None
    cache: bool = True


class World:
    """Allocator, table and cache; `content[slot]` is what the last write put there: namespace and
    tokens up to it."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        rows: int = 8,
        context: int = 64,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.device = device
        self.allocator = PagedAllocator(pages * page_size, page_size, device=device)
        self.table = RequestTable(rows, context, device=device)
        self.cache = RadixCache(page_size, self.allocator, self.table, **options)
        self.content: dict[int, tuple] = {}
        self.running: list[Req] = []

    def start(
        self, tokens: list[int], namespace: Hashable = None, cache: bool = True
    ) -> Req | None:
        """Match all but the last token, lock, take a row."""
        rows = self.table.alloc(1)
        if rows is None:
            return None
        r = Req(list(tokens), rows[0], namespace=namespace, cache=cache)
        match = self.cache.match_prefix(tokens[:-1] if cache else [], namespace)
        self.cache.lock(match.node)
        r.node, r.computed, r.protected_len = match.node, match.length, match.length
        self.table.write([r.row], [0], [match.length], match.slots)
        self.running.append(r)
        return r

    def reserve(self, r: Req, n: int) -> torch.Tensor | None:
        """Slots for `n` more tokens, in the row but not written; evicts when short."""
        before, after = torch.tensor([r.computed]), torch.tensor([r.computed + n])
        last = (
            self.table.table[r.row, r.computed - 1 : r.computed].long()
            if r.computed
            else torch.tensor([-1], device=self.device)
        )
        slots = self.allocator.alloc_extend(before, after, last, n)
        if slots is None:
            size = self.cache.page_size
            pages = -(-(r.computed + n) // size) + -r.computed // size
            self.cache.evict(pages * size - self.allocator.available_size())
            slots = self.allocator.alloc_extend(before, after, last, n)
        if slots is not None:
            self.table.write([r.row], before, after, slots)
        return slots

    def compute(self, r: Req, n: int | None = None) -> bool:
        """Write the next `n` tokens (default: all that are left)."""
        n = len(r.token_ids) - r.computed if n is None else n
        slots = self.reserve(r, n)
        if slots is None:
            return False
        for i, slot in enumerate(slots.tolist(), r.computed):
            self.content[slot] = (repr(r.namespace), tuple(r.token_ids[: i + 1]))
        r.computed += n
        return True

    def verify(self, r: Req, draft: list[int], accepted: int) -> bool:
        """Compute drafted tokens after all others and keep the first `accepted`, as speculative
        decoding does."""
        known = len(r.token_ids)
        r.token_ids += draft
        fits = self.compute(r)
        del r.token_ids[known + (accepted if fits else 0) :]
        if fits:
            self.shrink(r, len(r.token_ids))
        return fits

    def shrink(self, r: Req, length: int) -> None:
        """Take the tokens from `length` on out of the row; their pages go back, but for a page that
        the tokens before need, too."""
        left = self.table.truncate(r.row, length)
        self.allocator.free(left[-length % self.cache.page_size :])
        r.computed = length

    def chunk(self, r: Req, n: int | None = None) -> None:
        assert self.compute(r, n)
        self.cache.cache_unfinished(r)

    def finish(self, r: Req) -> None:
        self.cache.cache_finished(r)
        self.running.remove(r)

    def run(self, tokens: list[int], namespace: Hashable = None) -> int:
        """A request from start to end; how many tokens it found in the cache."""
        r = self.start(tokens, namespace)
        assert r is not None
        found = r.computed
        self.chunk(r)
        self.finish(r)
        return found

    def row(self, r: Req) -> list[int]:
        return self.table.table[r.row, : r.computed].tolist()

    def owned(self) -> list[torch.Tensor]:
        return [self.table.table[r.row, r.protected_len : r.computed] for r in self.running]

    def check(self) -> None:
        """All invariants, and every running request still reads what it wrote."""
        self.cache.check(owned=self.owned())
        for r in self.running:
            for i, slot in enumerate(self.row(r)):
                assert self.content[slot] == (repr(r.namespace), tuple(r.token_ids[: i + 1]))
