"""The loop of an engine: one step after the other, by one caller at a time.

Where the next batch is known before the tokens of this one are, it is launched first, so that the
device never waits for Python; SGLang's and vLLM's overlapped schedulers do the same. If a request
turns out to have ended, its row was computed in vain, into a slot that is freed with the others.

Threads take turns, and Ctrl-C waits for the end of a turn.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch

from minikv.attention.backend import AttentionBackend
from minikv.engine.batch import Batch, settle
from minikv.engine.sampler import Sampler
from minikv.engine.scheduler import Scheduler
from minikv.errors import StateError
from minikv.graphs.runner import GraphRunner
from minikv.kernels.staging import Landing


class Turns:
    """A re-entrant lock that threads get in the order in which they asked for it.

    A page that was taken but is in no table yet is lost if the code between is left. So what
    changes an engine happens within a turn, which neither an interrupt nor another thread can
    enter.

    It is handed over, so a thread that asks again at once cannot overtake one that waits. While the
    main thread waits for it or holds it, SIGINT (Ctrl-C) is kept, and its handler runs afterwards;
    Python never interrupts other threads.

    Parameters
    ----------
    at_end
        A method that each turn ends with; its object is not kept alive.

    Attributes
    ----------
    depth
        How often the thread that holds it has entered it; 0 when it is free.
    """

    def __init__(self, at_end: Callable[[], None] | None = None) -> None:
        self.depth = 0
        self._at_end = WeakMethod(at_end) if at_end else None
        self._owner: int | None = None
        self._waiting: deque[threading.Lock] = deque()  # a locked gate for each thread that waits
        self._guard = threading.Lock()
        self._handler: Any = None
        self._missed: list[tuple] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            if me == threading.main_thread().ident:
                self._missed = missed = []
                self._handler = signal.signal(signal.SIGINT, lambda *seen: missed.append(seen))
            gate = None
            with self._guard:
                if self._owner is None:
                    self._owner = me
                else:
                    gate = threading.Lock()
                    gate.acquire()
                    self._waiting.append(gate)
            if gate is not None:
                gate.acquire()  # the thread before opens it
                self._owner = me
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            at_end = self._at_end() if self._at_end and self.depth == 1 else None
            if at_end is not None:
                at_end()
        finally:
            self.depth -= 1
            if self.depth == 0:
                with self._guard:
                    self._owner = None
                    if self._waiting:
                        self._owner = -1  # the next one, which is about to wake up
                        self._waiting.popleft().release()
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, self._handler)
                    if self._missed and callable(self._handler):
                        self._handler(*self._missed[0])


@dataclass
class Flight:
    """A step that was launched: its batch, and what waits for its tokens and gives them."""

    batch: Batch
    read: Callable[[], torch.Tensor]


class Loop:
    """Steps of one engine.

    Parameters
    ----------
    scheduler, attention, runner
        What runs next, how it attends, and what runs it.
    overlaps
        Whether a step is launched before the tokens of the one before it are read.

    Attributes
    ----------
    turn
        What nothing else may come between; deltas are delivered at its end.
    flight
        The step that was launched before its turn, if there is one.
    steps
        Steps that were begun.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        attention: AttentionBackend,
        runner: GraphRunner,
        overlaps: bool,
    ) -> None:
        self.scheduler, self.attention = scheduler, attention
        self.runner, self.overlaps = runner, overlaps
        self.sampler, self.landing = Sampler(), Landing(scheduler.table.device)
        self.turn = Turns(self._settle)
        self.flight = None
        self.steps = 0
        self._aborts: list[int] = []

    def abort(self, *ids: int) -> bool:
        """End requests with this turn, or with the one that is under way; False: there is none."""
        with self.turn:
            found = [id for id in ids if self.scheduler.find(id) is not None]
            self._aborts += found
        return bool(found)

    def step(self) -> None:
        """Run one step: schedule, run the model, record, tell.

        Threads that wait for one while another thread runs one share the next.
        """
        seen = self.steps
        with self.turn:
            if self.steps != seen:
                return  # a whole step has run since
            if self.turn.depth > 1:
                raise StateError("event listeners cannot run steps: one is under way")
            self.steps += 1
            try:
                flight, self.flight = self.flight or self._start(self.scheduler.next_batch()), None
                if flight is None:
                    return
                if self.overlaps:
                    self.flight = self._start(self.scheduler.follow(flight.batch))
                sampled = self.sampler.read(flight.read(), flight.batch.sampled)
                tokens = [[token] for token in sampled.tokens]
                logprobs = [[record] for record in sampled.logprobs or ()]
                self.scheduler.process(flight.batch, tokens, logprobs)
            except BaseException:  # no memory, say: the requests of this step will run it again
                self.flight = None
                self.scheduler.rollback()
                raise

    def _start(self, batch: Batch | None) -> Flight | None:
        """Launch a step; nothing waits for it."""
        if batch is None:
            return None
        with torch.inference_mode():
            variant = self.sampler.variant(batch.sampled)
            if variant not in self.runner.variants:
                variant = "logits"
            self.sampler.fill(batch, variant)
            out = None
            if batch.continues:
                out = self.runner.again(batch, variant)
                if out is None:
                    settle(batch, self.scheduler.table)
            if out is None:
                if not (batch.decode and self.runner.can_run(len(batch.requests))):
                    batch.metadata = self.attention.prepare(batch)
                out = self.runner(batch, variant)
            if variant == "logits":
                out = self.sampler.choose(out, batch.sampled, batch)
                rows = [r.row for r in batch.sampled]
                tokens = out if out.dim() == 1 else out[:, 0].long()
                self.scheduler.table.last_tokens[rows] = tokens.clamp_min(0)
            return Flight(batch, self.landing.send(out))

    def _settle(self) -> None:
        """What a turn ends with: aborts that were asked for, and deltas to their callers."""
        while self._aborts:
            self.scheduler.abort(self._aborts.pop(0))
        for request in dict.fromkeys(self.scheduler.news):
            if request.sink is not None:
                request.sink.append(request.delta())
        self.scheduler.news.clear()
        if not self.scheduler.has_work:
            self.flight = None  # its requests have ended
