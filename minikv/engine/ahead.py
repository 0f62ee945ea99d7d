"""Launching a decode step before the tokens of the one before it are read, so that the device never
waits for Python.

A greedy step of the same requests needs nothing from the host but, now and then, a new page: all
else is one more than in the step before, and its token ids are that step's output. So the graph's
inputs are moved on where they lie (:mod:`minikv.engine.advance`), and the graph is replayed. If a
request turns out to have ended, its row of the step ahead was computed for nobody, into a slot that
is freed with the request's others. SGLang's and vLLM's overlapped schedulers do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minikv.engine.batch import Batch
from minikv.engine.request import State
from minikv.engine.undivided import shielded

if TYPE_CHECKING:
    from minikv.engine.llm import LLM


@dataclass
class Flight:
    """A step that was launched.

    Attributes
    ----------
    batch, out
        The step, and the tokens it chooses (on the device).
    inputs
        The graph's, by name; the batch's `token_ids` and `out_slots` are the first rows of them.
        They hold this step until the next one is launched.
    left
        Tokens that each of its requests may still get, this step's included.
    read
        Waits for the tokens.
    """

    batch: Batch
    out: Tensor
    inputs: dict[str, Tensor]
    left: int
    read: Callable[[], list[int]]


class Landing:
    """Two places of pinned memory for tokens on their way back: one is read while the next is
    written."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._places = [
            torch.empty(most, dtype=torch.int64, pin_memory=self._on_cuda) for _ in range(2)
        ]
        self._arrived = [torch.cuda.Event() for _ in self._places] if self._on_cuda else []

    def send(self, out: Tensor) -> Callable[[], list[int]]:
        """Send tokens on their way, before anything overwrites them; what is launched later does
        not delay them."""
        self._places.reverse()
        self._arrived.reverse()
        place = self._places[0][: out.shape[0]]
        place.copy_(out, non_blocking=True)
        if not self._on_cuda:
            return place.tolist
        arrived = self._arrived[0]
        arrived.record()

        def read() -> list[int]:
            arrived.synchronize()
            return place.tolist()

        return read


class Ahead:
    """Takes an engine's steps as ``LLM._advance`` does, but overlaps the greedy decode steps of the
    same requests.

    `flight` is the step that was launched before its turn, if there is one. On a CPU it is not
    `enabled`: there is no device that could work meanwhile.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        self.llm, self.landing = llm, Landing(llm.device, most)
        self.enabled, self.flight = llm.device.type == "cuda", None

    def advance(self) -> None:
        """One step; the one after it is launched before this one's tokens are read, where it can
        be."""
        if self.flight is None and not self._steady():
            self.llm._advance()
        else:
            self._step(more=True)

    def land(self) -> None:
        """Finish the step that was launched before its turn, if there is one, and launch no other."""
        if self.flight is not None:
            self._step(more=False)

    def _steady(self) -> bool:
        """Whether the next step is a greedy decode in a graph, for which nobody joins, leaves or
        loses pages."""
        llm, now = self.llm, self.llm.scheduler
        if not self.enabled or not now.running or not now.nobody_joins or not now.decodes_fit:
            return False
        greedy = llm.sampler.variant(now.running) == "greedy" and "greedy" in llm.runner.variants
        return greedy and llm.runner.can_run(len(now.running))

    @shielded  # as a whole: the wait in it is that for one step
    def _step(self, more: bool) -> None:
        llm, flight, self.flight = self.llm, self.flight, None
        try:
            with torch.inference_mode():
                flight = flight or self._launch()
                self.flight = self._follow(flight) if more else None
                batch, tokens = self._landed(flight)
            if batch.requests:
                llm.scheduler.process(batch, tokens)
        except BaseException:  # as in LLM._advance
            self.flight = None
            llm.scheduler.rollback()
            raise
        llm._deliver(batch.sampled)

    def _launch(self) -> Flight:
        """The first of such steps, like any other."""
        llm, runner = self.llm, self.llm.runner
        batch = llm.scheduler.next_batch()
        assert batch is not None, "somebody runs, and has room"
        out, n = llm._forward(batch, "greedy"), len(batch.requests)
        inputs = runner.views(runner.bucket(n), "greedy")
        batch.token_ids, batch.out_slots = inputs["token_ids"][:n], inputs["out_slots"][:n]
        return Flight(
            batch,
            out,
            inputs,
            min(r.capacity - r.length for r in batch.requests),
            self.landing.send(out),
        )

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch the step after one whose tokens are not known yet; None where that step may change
        who runs.

        It may when somebody can join, when a request will have all its tokens, or when there are no
        pages left.
        """
        last, inputs, now, runner = flight.batch, flight.inputs, self.llm.scheduler, self.llm.runner
        if not now.nobody_joins or flight.left < 2 or now.running != last.requests:
            return None
        n, lens, slots = len(last.requests), last.seq_lens + 1, None
        if pages := n - np.count_nonzero(
            last.seq_lens.numpy() % now.page_size
        ):  # so many begin one
            if not now.make_room(pages * now.page_size):
                return None
            slots = now.allocator.alloc_decode(lens, last.out_slots)
        runner.step.advance(inputs, flight.out, last.rows, lens, slots)
        now.table.wrote(last.rows, lens)
        out = runner.again("greedy", n, inputs, inputs["rows"].shape[0])[:n]
        moved = dict[str, Any](positions=last.seq_lens, prefix_lens=last.seq_lens, seq_lens=lens)
        batch = Batch(**vars(last) | moved)  # several times faster than replace()
        return Flight(batch, out, inputs, flight.left - 1, self.landing.send(out))

    def _landed(self, flight: Flight) -> tuple[Batch, list[int]]:
        """The batch and its tokens, without requests that ended after it was launched."""
        batch, tokens = flight.batch, flight.read()  # the step's only wait
        if batch.requests == self.llm.scheduler.running:
            return batch, tokens
        live = [i for i, r in enumerate(batch.requests) if r.state is State.RUNNING]
        at = torch.tensor(live, dtype=torch.int64)
        parts = {
            name: getattr(batch, name)[at]
            for name in ("positions", "rows", "prefix_lens", "seq_lens")
        }
        requests = [batch.requests[i] for i in live]
        batch = replace(batch, requests=requests, sampled=requests, logits_at=torch.arange(len(live)),
                        out_slots=batch.out_slots[at.to(batch.out_slots.device)], **parts)  # fmt: skip
        return batch, [tokens[i] for i in live]
