"""Who runs next: admission, chunks, decodes, retraction. No model, no kernels; only pages, rows and
lengths.

All room is counted in whole pages, because that is how the allocator hands it out. Evictable pages
of the prefix cache count as free: they are evicted at the moment somebody needs them. Continuous
batching is Orca's (Yu et al. 2022), chunked prefill Sarathi's (Agrawal et al. 2023), the growth
ratio with retraction SGLang's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minikv.engine.batch import Batch
from minikv.engine.policy import POLICIES, order, shared_key
from minikv.engine.request import Request, State
from minikv.engine.undivided import undivided
from minikv.errors import ArgumentError, StateError

_now = time.perf_counter
RATIO, LEAST_RATIO, DECAY = (
    0.7,
    0.1,
    0.001,
)  # share of its remaining tokens that a running request is expected to use


class Scheduler:
    """Turns waiting and running requests into batches.

    Parameters
    ----------
    cache, allocator, table
        Prefix cache, page allocator and request table; shared with nobody else while requests run.
    max_requests
        Most requests that hold a row at once.
    chunk_tokens
        Most tokens of one extend step; clamped to the pool.
    policy
        ``"fcfs"``, ``"lpm"`` or ``"dfs-weight"``.
    mixed
        Decode the running requests in every extend step as well, instead of letting them wait for
        it.
    max_context
        Longest prompt; default: the table's width.
    emit
        Receives events, see :mod:`minikv.engine.events`.
    on_token
        Called after each token with the request and its reason to stop, if any; returns the reason
        that counts. This is how stop texts end a request without the scheduler knowing a tokenizer.
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
        max_context: int | None = None,
        emit: Callable[..., None] | None = None,
        on_token: Callable[[Request, str | None], str | None] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
        for name, value in (("max_requests", max_requests), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ArgumentError(name, value, "must be 1 or more")
        self.cache, self.allocator, self.table = cache, allocator, table
        self.max_requests, self.chunk_tokens = max_requests, min(chunk_tokens, allocator.size)
        self.policy, self.mixed = policy, mixed
        self.max_context = table.table.shape[1] if max_context is None else max_context
        self.page_size = allocator.page_size
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []  # between steps at most one: the partial request
        self.running: list[Request] = []
        self.ratio = RATIO
        self.ended: list[Request] = []  # since whoever tells the callers last cleared it
        self._emit = emit or (lambda event, **fields: None)
        self._on_token = on_token or (lambda request, reason: reason)
        self._arrivals = self._admissions = 0
        self.busy, self.aborts = (
            False,
            [],
        )  # amid a method that is not to be divided; ids to abort after it
        self._before: tuple[Batch, Sequence[int]] | None = (
            None  # the step before and its tokens, if it was a decode
        )

    # ---- the queue

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def decodes_fit(self) -> bool:
        """Whether every running request can take its next token without retraction."""
        return self._decode_need() <= self._room()

    @property
    def nobody_joins(self) -> bool:
        """Whether the next step only decodes: nobody is being prefilled, and nobody waits or finds
        a row."""
        return not self.prefilling and (not self.waiting or not self._rows_left())

    def check_prompt(self, length: int) -> None:
        """Raise ArgumentError for a prompt length that could never run."""
        if length < 1:
            raise ArgumentError("prompt", [], "is empty; give at least one token")
        if length > self.max_context:
            raise ArgumentError(
                "prompt",
                length,
                f"tokens are more than the context of {self.max_context}; shorten it",
            )
        if length > self.allocator.size:
            remedy = f"tokens are more than the KV pool of {self.allocator.size}; raise kv_tokens or shorten the prompt"
            raise ArgumentError("prompt", length, remedy)

    @undivided
    def add(self, request: Request) -> None:
        """Put a request into the queue.

        Raises
        ------
        ArgumentError
            For a prompt that could never run: empty, longer than the context or than the pool.
        """
        self.check_prompt(request.length)
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.append(request)
        self._emit("add", id=request.id, prompt_tokens=request.prompt_len)
        if request.length == request.capacity:  # nothing to generate, nothing to compute
            self.finish(request, "length")

    def abort(self, id: int) -> Request | None:
        """End a request wherever it is; returns it, or None when no unfinished request has this id."""
        found = next(
            (r for r in (*self.waiting, *self.prefilling, *self.running) if r.id == id), None
        )
        if (
            found is not None and self.busy
        ):  # a listener asks, amid a method of this class: it comes after that
            self.aborts.append(id)
        elif found is not None:
            self.finish(found, "abort")
        return found

    @undivided
    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request: its whole pages go to the prefix cache, all else is given back."""
        self._release(request, State.FINISHED)
        request.finish_reason, request.error = reason, error
        request.timing.finished = _now()
        self.ended.append(request)
        self._emit(
            "finish", id=request.id, reason=reason, generated=request.length - request.prompt_len
        )

    def _release(self, request: Request, state: State) -> None:
        holders = {
            State.WAITING: self.waiting,
            State.PREFILL: self.prefilling,
            State.RUNNING: self.running,
        }
        holders[request.state].remove(request)
        if request.state is not State.WAITING:
            self.cache.cache_finished(request)
            request.computed, request.probe = 0, None
        request.state = state

    # ---- a step

    @undivided
    def next_batch(self) -> Batch | None:
        """What to run now, with rows and slots assigned; None when every request is done."""
        self.ratio = max(LEAST_RATIO, self.ratio - DECAY)
        while self.has_work:
            if self.mixed:
                self._make_decode_room()
            chunks = self._plan_chunks()
            if chunks:
                return self._extend_batch(chunks)
            if self.running:
                self._make_decode_room()
                if self.running:
                    return self._decode_batch()
            elif self.waiting or self.prefilling:  # nobody runs, so nobody will give pages back
                stuck = (*self.prefilling, *order(self.policy, self.waiting, self._probe))[0]
                self.finish(
                    stuck,
                    "error",
                    "the KV pool has no room: pages or nodes are held outside the engine",
                )
        return None

    @undivided
    def process(
        self, batch: Batch, tokens: Sequence[int], logprobs: Sequence[Any] | None = None
    ) -> None:
        """Record a step that has run: progress, then the token of each of `batch.sampled` (-1:
        unusable logits)."""
        now, ended = _now(), []
        sampled = zip(batch.sampled, tokens, strict=True)
        live = [
            (i, r, t) for i, (r, t) in enumerate(sampled) if r.state is not State.FINISHED
        ]  # not aborted since
        self._before = (batch, tokens) if batch.kind == "decode" else None
        for request, computed in zip(batch.requests, batch.seq_lens.tolist(), strict=True):
            request.computed = computed
        for i, request, token in live:
            if token < 0:
                request.cache = False  # K/V behind broken logits must not be shared
                ended.append(
                    (
                        request,
                        "error",
                        "the model's logits hold no finite maximum (NaN or infinity)",
                    )
                )
                continue
            timing = request.timing
            timing.first_token, timing.last_token = timing.first_token or now, now
            if logprobs is not None and request.logprobs is not None:
                request.logprobs.append(logprobs[i])
            try:
                reason = self._on_token(request, request.append(token))
            except Exception as e:  # of its grammar or its tokenizer: the others go on
                reason, request.error = "error", f"{type(e).__name__}: {e}"
            if reason:
                ended.append((request, reason, request.error))
        self._emit_step(batch, [r.id for _, r, token in live if token >= 0])
        if ended or batch.kind == "extend":
            with self.allocator.free_group():
                self._after_prefill(batch)
                for request, reason, error in ended:
                    self.finish(request, reason, error)

    def _after_prefill(self, batch: Batch) -> None:
        for request in batch.requests:
            if request.state is State.PREFILL:
                self.cache.cache_unfinished(request)
        for request in batch.sampled:
            if request.state is State.PREFILL:
                self.prefilling.remove(request)
                request.state = State.RUNNING
                self.running.append(request)

    @undivided
    def rollback(self) -> None:
        """After a step that failed: whoever holds a row waits again; what was computed before goes
        to the cache."""
        for request in (*self.prefilling, *self.running):
            self._retract(request)

    # ---- extend

    def _plan_chunks(self) -> list[tuple[Request, int]]:
        """Requests and how many tokens of each shall have K/V after the step."""
        if self.nobody_joins:
            return []
        budget = self.chunk_tokens - (len(self.running) if self.mixed else 0)
        claimed = sum(self._growth(r) for r in self.running)
        chunks: list[tuple[Request, int]] = []
        for r in self.prefilling:  # the partial request goes on first
            end = min(r.length, r.computed + budget)
            if (
                end == r.computed
                or self._new(r.computed, end) + self._decode_need() * self.mixed > self._room()
            ):
                return []  # decodes go on and will give pages back
            chunks.append((r, end))
            budget -= end - r.computed
            claimed += self._new(r.computed, r.length) + self._growth(r)
        if any(end < r.length for r, end in chunks):
            return chunks
        busy = {self._shared(r, r.node, r.protected_len) for r, _ in chunks} - {None}
        queue = (
            order(self.policy, self.waiting, self._probe)
            if budget > 0 and self._rows_left()
            else []
        )
        for r in queue:
            if budget < 1 or not self._rows_left():
                break
            if self._shared(r, *self._probe(r)) in busy:
                continue  # another request is computing this beginning right now: wait for its cache
            if not self._admit(r, claimed):
                break
            busy |= {self._shared(r, r.node, r.protected_len)} - {None}
            claimed += self._new(r.computed, r.length) + self._growth(r)
            end = min(r.length, r.computed + budget)
            budget -= end - r.computed
            chunks.append((r, end))
        return chunks

    def _admit(self, r: Request, claimed: int) -> bool:
        match = self.cache.match_prefix(r.token_ids[:-1] if r.cache else (), r.namespace)
        self.cache.lock(match.node)  # first: what is matched is no longer evictable
        if claimed + self._new(match.length, r.length) > self._room():
            self.cache.unlock(match.node)
            return False
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
            r.cached_tokens, r.timing.admitted = match.length, _now()
        self._emit("admit", id=r.id, cached_tokens=match.length, again=again)
        return True

    def _extend_batch(self, chunks: list[tuple[Request, int]]) -> Batch:
        requests = [r for r, _ in chunks]
        ends = [end for _, end in chunks]
        if self.mixed:
            requests, ends = requests + self.running, ends + [r.length for r in self.running]
        starts = [r.computed for r in requests]
        self.make_room(sum(map(self._new, starts, ends)))
        rows, prefix_lens, seq_lens = (
            torch.tensor(v) for v in ([r.row for r in requests], starts, ends)
        )
        ends_at = (seq_lens - prefix_lens).cumsum(0)
        last_slots = self.table.last_slots(rows, prefix_lens)
        slots = self.allocator.alloc_extend(prefix_lens, seq_lens, last_slots, int(ends_at[-1]))
        self._write(rows, prefix_lens, seq_lens, slots)
        spans = list(zip(requests, starts, ends, strict=True))
        whole = [i for i, r in enumerate(requests) if ends[i] == r.length]
        token_ids = torch.from_numpy(np.concatenate([r.token_ids[a:b] for r, a, b in spans]))
        positions = torch.from_numpy(np.concatenate([np.arange(a, b) for _, a, b in spans]))
        return Batch(
            kind="extend", requests=requests, token_ids=token_ids, positions=positions, rows=rows,
            prefix_lens=prefix_lens, seq_lens=seq_lens, out_slots=slots,
            sampled=[requests[i] for i in whole], logits_at=ends_at[whole] - 1,
        )  # fmt: skip

    # ---- decode

    def _decode_batch(self) -> Batch:
        requests, before = list(self.running), self._before
        if (
            before is not None and before[0].requests == requests
        ):  # nobody joined or left: everyone has one token more
            last, tokens = before
            rows, prefix_lens, logits_at, last_slots = (
                last.rows,
                last.seq_lens,
                last.logits_at,
                last.out_slots,
            )
            seq_lens = prefix_lens + 1
        else:
            tokens, logits_at = [r.last_token for r in requests], torch.arange(len(requests))
            rows, seq_lens = (
                torch.tensor([r.row for r in requests]),
                torch.tensor([r.length for r in requests]),
            )
            prefix_lens = seq_lens - 1
            last_slots = self.table.last_slots(rows, prefix_lens)
        slots = self.allocator.alloc_decode(seq_lens, last_slots)
        self._write(rows, prefix_lens, seq_lens, slots)
        return Batch(
            kind="decode", requests=requests, token_ids=torch.tensor(tokens), positions=prefix_lens, rows=rows,
            prefix_lens=prefix_lens, seq_lens=seq_lens, out_slots=slots, sampled=requests, logits_at=logits_at,
        )  # fmt: skip

    def _make_decode_room(self) -> None:
        """Retract the newest requests until every running one can take its next token."""
        retracted = False
        while self.running and not self.make_room(self._decode_need()):
            holders = sorted((*self.running, *self.prefilling), key=lambda r: r.admission)
            if len(holders) == 1:
                size = self.allocator.size
                error = f"needs more than the KV pool of {size} tokens; raise kv_tokens or lower max_tokens"
                self.finish(holders[0], "error", error)
                return
            self._retract(holders[-1])
            retracted = True
        if retracted:
            used = sum(r.length - r.prompt_len for r in self.running)
            most = sum(r.capacity - r.prompt_len for r in self.running)
            self.ratio = min(1.0, max(LEAST_RATIO, used / max(1, most)))

    def _retract(self, request: Request) -> None:
        self._release(request, State.WAITING)
        self.waiting.append(request)
        self._emit("retract", id=request.id)

    # ---- room, in tokens of whole pages

    def _new(self, start: int, end: int) -> int:
        """Room for new pages when a request grows from `start` to `end` tokens."""
        return (-(-end // self.page_size) + -start // self.page_size) * self.page_size

    def _growth(self, r: Request) -> int:
        """Room that a request is expected to need after its present tokens have K/V."""
        kv = r.length if r.state is State.PREFILL else r.computed
        return self._new(kv, kv + math.ceil(self.ratio * (r.capacity - r.length)))

    def _decode_need(self) -> int:
        return sum((r.length - 1) % self.page_size == 0 for r in self.running) * self.page_size

    def _room(self) -> int:
        return self.allocator.available_size() + self.cache.evictable_size

    def make_room(self, tokens: int) -> bool:
        """Evict until `tokens` are free; False when they cannot be."""
        short = tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict(short)
        return self.allocator.available_size() >= tokens

    def _rows_left(self) -> bool:
        return (
            len(self.running) + len(self.prefilling) < self.max_requests
            and self.table.available_size() > 0
        )

    def _write(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> None:
        if slots is None:
            raise StateError(
                "the allocator refused pages it counted as free; llm.cache.check() names who holds them"
            )
        self.table.write(rows, starts, ends, slots)

    def _probe(self, r: Request) -> tuple[Any, int]:
        stats = self.cache.stats
        version = (stats.inserted, stats.evicted, stats.splits)
        if r.probe is None or r.probe[0] != version:
            r.probe = (version, *self.cache.peek(r.token_ids[:-1] if r.cache else (), r.namespace))
        return r.probe[1:]

    def _shared(self, r: Request, node: Any, cached: int) -> tuple | None:
        return None if self.cache.disable else shared_key(r, node, cached, self.page_size)

    def _emit_step(self, batch: Batch, got: list[int]) -> None:
        decode = batch.kind == "decode"
        new = () if decode else (batch.seq_lens - batch.prefix_lens).tolist()
        self._emit(
            "step",
            kind=batch.kind,
            extends=[[r.id, n] for r, n in zip(batch.requests, new, strict=False)],
            decodes=[r.id for r in batch.requests] if decode else [],
            sampled=got,
            waiting=len(self.waiting),
            running=len(self.running) + len(self.prefilling),
            available=self.allocator.available_size(),
            evictable=self.cache.evictable_size,
            size=self.allocator.size,
        )
