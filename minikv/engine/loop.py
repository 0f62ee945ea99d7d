"""The loop of an engine: one step after the other, by one caller at a time.

Where the next batch is known before the tokens of this one are, it is launched first, so that the
device never waits for Python; SGLang's and vLLM's overlapped schedulers do the same. If a request
turns out to have ended, its row was computed in vain, into a slot that is freed with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minikv.engine.batch import Batch, settle
from minikv.engine.request import Request, State
from minikv.engine.sampler import Sampler
from minikv.engine.scheduler import Scheduler
from minikv.engine.turns import Turns
from minikv.errors import StateError
from minikv.graphs.runner import GraphRunner
from minikv.kernels.staging import Landing


@dataclass
class Flight:
    """A step that was launched: its batch, and what waits for its tokens and gives them."""

    batch: Batch
    read: Callable[[], torch.Tensor]


class Loop:
    """Steps of one engine.

    Parameters
    ----------
    scheduler, runner
        What runs next, and what runs it.
    overlaps
        Whether a step is launched before the tokens of the one before it are read.

    Attributes
    ----------
    flight
        The step that was launched before its turn, if there is one.
    steps
        Steps that were begun.
    """

    def __init__(self, scheduler: Scheduler, runner: GraphRunner, overlaps: bool) -> None:
        self.scheduler, self.runner, self.overlaps = scheduler, runner, overlaps
        self.sampler, self.landing = Sampler(), Landing(scheduler.table.device)
        self.turns = Turns()
        self.flight = None
        self.steps = 0
        self._aborts: list[int] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What nothing else may come between; deltas are delivered at its end."""
        with self.turns:
            try:
                yield
            finally:
                if self.turns.depth == 1:
                    while self._aborts:
                        self.scheduler.abort(self._aborts.pop(0))
                    self._deliver()
                    if not self.scheduler.has_work:
                        self.flight = None  # its requests have ended

    def abort(self, id: int) -> bool:
        """End a request with this turn, or with the one that is under way; False: there is none."""
        with self.turn():
            found = self.scheduler.find(id) is not None
            if found:
                self._aborts.append(id)
        return found

    def end(self, requests: Sequence[Request]) -> None:
        """Abort those that have not ended."""
        with self.turn():
            for request in requests:
                self.scheduler.abort(request.id)

    def step(self) -> None:
        """Run one step: schedule, run the model, record, tell.

        Threads that wait for one while another thread runs one share the next.
        """
        seen = self.steps
        with self.turn():
            if self.steps != seen:
                return  # a whole step has run since
            if self.turns.depth > 1:
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
            self._deliver(flight.batch)

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
                out = self.runner(batch, variant)
            if variant == "logits":
                out = self.sampler.choose(out, batch.sampled, batch)
                rows = [r.row for r in batch.sampled]
                tokens = out if out.dim() == 1 else out[:, 0].long()
                self.scheduler.table.last_tokens[rows] = tokens.clamp_min(0)
            return Flight(batch, self.landing.send(out))

    def _deliver(self, batch: Batch | None = None) -> None:
        """Deltas of the requests that got tokens, and of those that ended, to their callers."""
        going = [r for r in batch.sampled if r.state is State.RUNNING] if batch else []
        for request in (*going, *self.scheduler.ended):
            if request.sink is not None:
                request.sink.append(request.delta())
        self.scheduler.ended.clear()
