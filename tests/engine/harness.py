"""A model without weights: its KV is the tokens themselves, its next token a checksum of what the
page table shows it.

Any slot that two requests share by mistake, any stale line of the request table, any token computed
at a wrong position changes the text, and the right text needs no engine to be known.
"""

from __future__ import annotations

import zlib

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
        **options,
    ):
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
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        self.scheduler.process(batch, self.compute(batch))
        self.batches.append(batch)
        self.invariants()
        return batch

    def compute(self, batch) -> list[list[int]]:
        slots = batch.out_slots.numpy()
        assert slots.min() >= self.allocator.page_size, "page 0 belongs to padding"
        assert len(set(slots.tolist())) == len(slots) == batch.num_tokens
        self.kv[slots] = batch.positions.numpy() * 1000 + batch.token_ids.numpy()
        tokens = []
        for request, row, n in zip(
            batch.requests, batch.rows.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            seen = self.kv[self.table.table[row, :n].numpy()]
            if request in batch.sampled:
                tokens.append([zlib.crc32(np.ascontiguousarray(seen).tobytes()) % VOCAB])
        assert batch.token_ids[batch.logits_at].tolist() == [r.last_token for r in batch.sampled]
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
