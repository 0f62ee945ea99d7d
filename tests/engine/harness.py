"""A model without weights: its KV is the tokens themselves, its next token a checksum of what the
page table shows it.

Any slot that two requests share by mistake, any stale line of the request table, any token computed
at a wrong position changes the text, and the right text needs no engine to be known.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from minikv.engine import Request, SamplingParams, Scheduler
from minikv.memory import PagedAllocator, RequestTable
from minikv.prefix import RadixCache

VOCAB = 50


def next_token(tokens) -> int:
    """The model: a checksum of (position, token) pairs."""
    pairs = np.arange(len(tokens)) * 1000 + np.asarray(tokens, np.int64)
    return zlib.crc32(pairs.tobytes()) % VOCAB


def solo(prompt, n: int, stop_ids=()) -> list[int]:
    """What an undisturbed run of n tokens gives."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class Engine:
    """Scheduler, cache, allocator and table, with the checksum model on top."""

    def __init__(
        self,
        size=64,
        page_size=4,
        max_requests=8,
        chunk_tokens=16,
        max_context=128,
        cache=True,
        drafts=0,
        **options,
    ):
        self.drafts, self.rng = drafts, np.random.default_rng(drafts)
        self.allocator = PagedAllocator(size, page_size)
        self.table = RequestTable(max_requests, max_context)
        self.cache = RadixCache(page_size, self.allocator, self.table, disable=not cache)
        self.events: list[dict] = []
        self.scheduler = Scheduler(
            self.cache,
            self.allocator,
            self.table,
            max_requests=max_requests,
            chunk_tokens=chunk_tokens,
            emit=lambda event, **fields: self.events.append({"event": event, **fields}),
            **options,
        )
        self.kv = np.full((self.allocator.num_pages + 1) * page_size, -1, np.int64)
        self.requests: list[Request] = []
        self.batches: list = []

    def add(self, prompt, max_tokens=4, stop_ids=(), **params) -> Request:
        params, most = (
            SamplingParams(max_tokens=max_tokens, **params),
            self.scheduler.max_context + 1,
        )
        request = Request(len(self.requests) + 1, list(prompt), params, frozenset(stop_ids), most)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        """One step; returns its batch, or None."""
        for r in self.scheduler.running:
            r.draft(self.guess(r))
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        self.scheduler.process(batch, self.compute(batch))
        self.batches.append(batch)
        self.invariants()
        return batch

    def guess(self, request) -> list[int]:
        """Drafts: the right tokens, up to a random one that is wrong."""
        if not self.drafts:
            return []
        right = solo(request.token_ids, int(self.rng.integers(0, self.drafts + 1)))
        at = int(self.rng.integers(0, self.drafts + 1))
        return [t if i != at else (t + 1) % VOCAB for i, t in enumerate(right)]

    def compute(self, batch) -> list[list[int]]:
        """K/V of all new tokens; what the model says after each, until a draft says otherwise."""
        slots = batch.out_slots.numpy()
        assert slots.min() >= self.allocator.page_size, "page 0 belongs to padding"
        assert len(set(slots.tolist())) == len(slots) == batch.num_tokens
        self.kv[slots] = batch.positions.numpy() * 1000 + batch.token_ids.numpy()
        tokens, wanted, offset = [], [], 0
        for request, row, start, n in zip(
            batch.requests,
            batch.rows.tolist(),
            batch.prefix_lens.tolist(),
            batch.new_lens.tolist(),
            strict=True,
        ):
            ids = batch.token_ids[offset : offset + n].tolist()
            if request in batch.sampled:
                first, said = n - 1 - request.drafts, []
                wanted += range(offset + first, offset + n)
                for i in range(first, n):
                    seen = self.kv[self.table.table[row, : start + i + 1].numpy()]
                    said.append(zlib.crc32(np.ascontiguousarray(seen).tobytes()) % VOCAB)
                    if i + 1 < n and ids[i + 1] != said[-1]:
                        break
                tokens.append(said)
                assert ids[first] == request.last_token
            offset += n
        assert batch.seq_lens.tolist() == (batch.prefix_lens + batch.new_lens).tolist()
        assert batch.logits_at.tolist() == wanted
        return tokens

    def run(self, limit=2000) -> None:
        for _ in range(limit):
            if self.step() is None:
                return
        raise AssertionError("the engine does not come to an end")

    def invariants(self) -> None:
        s = self.scheduler
        everyone = [*s.waiting, *s.prefilling, *s.running]
        assert len({r.id for r in everyone}) == len(everyone), "a request is in two queues"
        assert len(s.prefilling) <= 1, "two partial requests"
        assert len(s.running) + len(s.prefilling) <= s.max_requests

    def idle(self) -> None:
        """Nothing is lost once everything has ended."""
        assert not self.scheduler.has_work
        self.cache.check(owned=())
        assert self.cache.protected_size == 0
        assert self.allocator.available_size() + self.cache.evictable_size == self.allocator.size
        rows = self.table.alloc(self.scheduler.max_requests)
        assert rows is not None, "a row is lost"
        self.table.free(rows)

    def texts(self) -> list[list[int]]:
        return [r.output_ids.tolist() for r in self.requests]


class Around:
    """A runner whose calls go through a function; all else is the runner's own."""

    def __init__(self, runner: Any, call: Any, **changed: Any) -> None:
        self._runner, self._call = runner, call
        self.__dict__.update(changed)

    def __call__(self, batch: Any, variant: str) -> Any:
        return self._call(batch, variant)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
