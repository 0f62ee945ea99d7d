"""What runs next: admission, chunks, decodes, retraction; only pages, rows and lengths.

All room is counted in whole pages, because that is how the allocator hands it out. Evictable pages
of the prefix cache count as free: they are evicted at the moment they are needed. Continuous
batching is Orca's (Yu et al. 2022), chunked prefill Sarathi's (Agrawal et al. 2023), the growth
ratio with retraction SGLang's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minikv.engine.batch import Batch, Span, make_batch
from minikv.engine.policy import POLICIES, order, shared_key
from minikv.engine.request import Request, State
from minikv.errors import ArgumentError
from minikv.numbers import whole

RATIO = 0.7  # the share of its remaining tokens that a running request is expected to use
LEAST_RATIO = 0.1
DECAY = 0.001  # what the ratio loses at each step
TOO_LONG = "needs more than the KV pool of {} tokens; raise kv_tokens or lower max_tokens"
NO_ROOM = "the KV pool has no room: pages or nodes are held outside the engine"


class Scheduler:
    """Turns waiting and running requests into batches.

    Parameters
    ----------
    cache, allocator, table
        Prefix cache, page allocator and request table. While requests run, nothing else may use
        them.
    max_requests
        Most requests that hold a row at once.
    chunk_tokens
        Most tokens of one extend step; clamped to the pool.
    policy
        ``"fcfs"``, ``"lpm"`` or ``"dfs-weight"``.
    mixed
        Whether running requests are decoded in every extend step, too, or wait for it.
    emit
        Receives events, see :mod:`minikv.engine.events`.

    Attributes
    ----------
    waiting, prefilling, running
        Requests by state. Between steps at most one is in `prefilling`: the partial request.
    news
        Requests that got tokens or ended, whose delta is still to be delivered.
    """

    def __init__(
        self,
        cache: Any,
        allocator: Any,
        table: Any,
        *,
        max_requests: int,
        chunk_tokens: int,
        policy: str = "lpm",
        mixed: bool = False,
        emit: Callable[..., None] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
        self.cache, self.allocator, self.table = cache, allocator, table
        self.max_requests = whole("max_requests", max_requests, 1)
        self.chunk_tokens = min(whole("chunk_tokens", chunk_tokens, 1), allocator.size)
        self.policy, self.mixed = policy, mixed
        self.max_context = table.max_context  # tokens of the longest prompt
        self.page_size = allocator.page_size
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.news: list[Request] = []
        self.ratio = RATIO
        self.moves_on = False  # whether what runs the steps can move their inputs on by itself
        self._emit = emit or (lambda event, **fields: None)
        self._arrivals = self._admissions = 0
        self._last: Batch | None = None  # the step before, if it was a decode

    # ---- the queue

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def active(self) -> int:
        """Requests that hold a row."""
        return len(self.running) + len(self.prefilling)

    def check_prompt(self, length: int) -> None:
        """Raise ArgumentError for a prompt length that could never run."""
        for most, what, remedy in (
            (self.max_context, "context", "shorten it"),
            (self.allocator.size, "KV pool", "raise kv_tokens or shorten the prompt"),
        ):
            if length > most:
                refused = f"tokens are more than the {what} of {most}; {remedy}"
                raise ArgumentError("prompt", length, refused)

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises ArgumentError for a prompt that could never run."""
        self.check_prompt(request.length)
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.append(request)
        self._emit("add", id=request.id, prompt_tokens=request.prompt_len)
        if request.length == request.capacity:  # nothing to generate, nothing to compute
            self.finish(request, "length")

    def find(self, id: int) -> Request | None:
        """The unfinished request with this id."""
        live = (*self.waiting, *self.prefilling, *self.running)
        return next((r for r in live if r.id == id), None)

    def abort(self, id: int) -> Request | None:
        """End a request, between steps; None when no unfinished one has this id."""
        request = self.find(id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request: its whole pages go to the prefix cache, all else is given back."""
        self._release(request, State.FINISHED)
        request.finish_reason, request.error = reason, error
        request.timing.finished = time.perf_counter()
        self.news.append(request)
        generated = request.length - request.prompt_len
        self._emit("finish", id=request.id, reason=reason, generated=generated)

    def _release(self, request: Request, state: State) -> None:
        if request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            holders = self.running if request.state is State.RUNNING else self.prefilling
            holders.remove(request)
            if request.drafts:
                request.drop_drafts()
            self.cache.cache_finished(request)
            request.computed, request.probe = 0, None
        request.state = state

    # ---- a step

    def next_batch(self) -> Batch | None:
        """What to run now, with rows and slots assigned; None when every request is done."""
        while self.has_work:
            decodes = self._next_tokens() if self.mixed else []
            chunks = self._plan_chunks(decodes)
            if chunks:
                self.make_room(chunks + decodes)
                return make_batch(chunks + decodes, self.allocator, self.table)
            if self.running:
                decodes = self._next_tokens()
                if decodes:
                    last = self._last
                    return make_batch(decodes, self.allocator, self.table, last, self.moves_on)
            elif self.has_work:  # no request runs that will give pages back
                self.finish((*self.prefilling, *self._queue())[0], "error", NO_ROOM)
        return None

    def follow(self, batch: Batch) -> Batch | None:
        """The same rows one token further, while the tokens of `batch` are still on the device.

        Rows that end by length are left out. None when there is no such step: when `batch` is no
        decode step, when a waiting request could be admitted or a prompt goes on, when a grammar or
        a penalty must see the token first, and when room would need a retraction.
        """
        if not batch.decode or self._may_admit():
            return None
        live = [r for r in batch.requests if r.state is State.RUNNING]
        going = [r for r in live if r.length + 1 < r.capacity]
        ending = self.waiting and len(going) < len(batch.requests)  # and a row could be taken
        if not going or ending or any(r.grammar is not None or r.penalised for r in going):
            return None
        spans = [(r, r.length, r.length + 1) for r in going]
        if not self.make_room(spans):
            return None
        return make_batch(spans, self.allocator, self.table, batch, self.moves_on)

    def process(
        self,
        batch: Batch,
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Record a step that has run: progress, and the tokens it chose.

        Parameters
        ----------
        batch
            From :meth:`next_batch` or :meth:`follow`. Requests that ended while it ran are skipped.
        tokens
            For each of ``batch.sampled`` the tokens it gets, at least one: those of its drafts that
            were accepted, and one more. -1 as the last stands for unusable logits. A request that
            gets fewer tokens than it computed gives the slots of the others back.
        logprobs
            For each of ``batch.sampled`` as many records as tokens, or nothing at all.
        """
        self.ratio = max(LEAST_RATIO, self.ratio - DECAY)
        self._last = batch if batch.decode else None
        extends, decodes, got, ended = [], [], [], []
        for request, new in zip(batch.requests, batch.new_lens.tolist(), strict=True):
            if request.state is not State.FINISHED:
                request.computed += new
                steps = decodes if request.state is State.RUNNING else extends
                steps.append([request.id, new])
        for i, request in enumerate(batch.sampled):
            if request.state is State.FINISHED:
                continue
            length, computed = request.length, request.computed
            try:
                reason = request.extend(tokens[i])
            except Exception as e:  # a grammar or tokenizer failed: the others go on
                reason, request.error = "error", f"{type(e).__name__}: {e}"
            if request.length > length:
                got.append([request.id, request.length - length])
            if logprobs and request.logprobs is not None:
                request.logprobs += logprobs[i][: request.length - length]
            if reason:
                ended.append((request, reason))
                continue
            self.news.append(request)
            if request.computed < computed:  # drafts that were not accepted
                tail = self.table.truncate(request.row, request.computed)
                self.allocator.free(tail[-request.computed % self.page_size :])
        if extends or decodes:
            self._emit(
                "step",
                kind="decode" if batch.decode else "extend",
                extends=extends,
                decodes=decodes,
                sampled=got,
                waiting=len(self.waiting),
                running=self.active,
                available=self.allocator.available_size(),
                evictable=self.cache.evictable_size,
                size=self.allocator.size,
            )
        if ended or not batch.decode:
            with self.allocator.free_group():
                for request in batch.requests:
                    if request.state is State.PREFILL:
                        self.cache.cache_unfinished(request)
                for request in batch.sampled:
                    if request.state is State.PREFILL:
                        self.prefilling.remove(request)
                        request.state = State.RUNNING
                        self.running.append(request)
                for request, reason in ended:
                    self.finish(request, reason, request.error)

    def rollback(self) -> None:
        """After a step that failed: requests that hold rows wait again; their pages are cached."""
        self._last = None
        for request in (*self.prefilling, *self.running):
            self._retract(request)

    # ---- admission

    @property
    def _row_wanted(self) -> bool:
        """Whether a request waits, and there is a row for it."""
        free = self.active < self.max_requests and self.table.available_size() > 0
        return free and bool(self.waiting)

    def _may_admit(self) -> bool:
        """Whether the next step may do more than decode."""
        if self.prefilling:
            return True
        return self._row_wanted and self._fits(self._queue()[0], self._claim(self.running))

    def _plan_chunks(self, decodes: Sequence[Span]) -> list[Span]:
        """Requests, and from where to where each is computed in this step, beside its decodes."""
        if not self.prefilling and not self._row_wanted:
            return []
        budget = self.chunk_tokens - len(decodes)
        partial = [(r, r.computed, min(r.length, r.computed + budget)) for r in self.prefilling]
        room = self.allocator.available_size() + self.cache.evictable_size
        if self._need([*partial, *decodes]) > room:
            return []  # decodes go on and will give pages back
        claimed = self._claim(self.prefilling + self.running)
        chunks: list[Span] = []
        busy: set[Any] = set()  # beginnings that are computed in this step
        queue = [*self.prefilling, *self._queue()]
        shares = len(queue) > 1
        for r in queue:
            if budget < 1:
                break
            if r.state is State.WAITING:
                if shares and shared_key(self.cache, r, *self._probe(r)) in busy:
                    continue  # wait for that cache
                if not self._row_wanted or not self._fits(r, claimed):
                    break
                self._admit(r)
                claimed += self._claim([r])
            if shares:
                busy |= {shared_key(self.cache, r, r.node, r.protected_len)} - {None}
            end = min(r.length, r.computed + budget)
            budget -= end - r.computed
            chunks.append((r, r.computed, end))
        return chunks

    def _queue(self) -> Sequence[Request]:
        """Waiting requests in the order of admission."""
        if len(self.waiting) < 2:
            return self.waiting
        return order(self.policy, self.waiting, self._probe)

    def _fits(self, r: Request, claimed: int) -> bool:
        """Whether there is room to admit `r` beside what is claimed. It only looks: a request that
        goes on waiting does not use its prefix."""
        node, cached = self._probe(r)
        locks = self.cache.evictable_part(node, cached)  # what it locks is no longer room
        room = self.allocator.available_size() + self.cache.evictable_size
        return claimed + self._need([(r, cached, r.length)]) + locks <= room

    def _admit(self, r: Request) -> None:
        match = self.cache.match_prefix(r.token_ids[:-1] if r.cache else (), r.namespace)
        self.cache.lock(match.node)
        (r.row,) = self.table.alloc(1)
        r.node, r.computed, r.protected_len = match.node, match.length, match.length
        self.table.write([r.row], [0], [match.length], match.slots)
        self.waiting.remove(r)
        self.prefilling.append(r)
        r.state = State.PREFILL
        self._admissions += 1
        r.admission = self._admissions
        again = r.cached_tokens is not None
        if not again:
            r.cached_tokens, r.timing.admitted = match.length, time.perf_counter()
        self._emit("admit", id=r.id, cached_tokens=match.length, again=again)

    # ---- decode

    def _next_tokens(self) -> list[Span]:
        """The next tokens of every running request; the newest are retracted until all fit."""
        spans = [(r, r.computed, r.length + r.drafts) for r in self.running]
        if self.make_room(spans):
            return spans
        if any(r.drafts for r in self.running):
            for r in self.running:
                r.drop_drafts()
            return self._next_tokens()
        *_, newest = sorted((*self.running, *self.prefilling), key=lambda r: r.admission)
        if self.active == 1:
            self.finish(newest, "error", TOO_LONG.format(self.allocator.size))
            return []
        self._retract(newest)
        used = sum(r.length - r.prompt_len for r in self.running)
        most = sum(r.capacity - r.prompt_len for r in self.running)
        self.ratio = min(1.0, max(LEAST_RATIO, used / max(1, most)))
        return self._next_tokens()

    def _retract(self, request: Request) -> None:
        self._release(request, State.WAITING)
        self.waiting.append(request)
        self._emit("retract", id=request.id)

    # ---- room, in tokens of whole pages

    def _need(self, spans: Iterable[Span]) -> int:
        """Room for the new pages of requests that grow from `start` to `end` tokens."""
        size = self.page_size
        return size * sum(-(-end // size) + -start // size for _, start, end in spans)

    def _claim(self, requests: Iterable[Request]) -> int:
        """Room that requests are expected to need beyond what they have."""
        return self._need(
            (r, r.computed, r.length - 1 + math.ceil(self.ratio * (r.capacity - r.length)))
            for r in requests
        )

    def make_room(self, spans: Sequence[Span]) -> bool:
        """Evict until there is room for these tokens; False when there cannot be."""
        need = self._need(spans)
        short = need - self.allocator.available_size()
        if short > 0:
            self.cache.evict(short)
        return self.allocator.available_size() >= need

    def _probe(self, r: Request) -> tuple[Any, int]:
        stats = self.cache.stats
        version = (stats.inserted, stats.evicted, stats.splits)
        if r.probe is None or r.probe[0] != version:
            r.probe = (version, *self.cache.peek(r.token_ids[:-1] if r.cache else (), r.namespace))
        return r.probe[1:]
