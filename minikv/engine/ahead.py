"""Launching a decode step before the tokens of the one before it are read, so that the device never waits for Python.

A greedy step of the same requests needs nothing from the host but lengths and slots: its token ids are the output of
the step before, which stays on the device. If a request turns out to have ended, its row of the step ahead was computed
for nobody, into a slot that is freed with the request's others. SGLang's and vLLM's overlapped schedulers do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.engine.batch import Batch
from minikv.engine.request import State
from minikv.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from minikv.engine.llm import LLM


@dataclass
class Flight:
    """A step that was launched: its batch, the tokens it chooses (on the device), and what reads them."""

    batch: Batch
    out: Tensor
    read: Callable[[], list[int]]


def follow(scheduler: Scheduler, flight: Flight) -> Batch | None:
    """The decode step after one whose tokens are not known yet; None where that step may change who runs.

    It may when somebody waits, when a request will have all its tokens, or when pages would have to be evicted.
    """
    last, allocator = flight.batch, scheduler.allocator
    others = scheduler.waiting or scheduler.prefilling or scheduler.running != last.requests
    if others or any(r.length + 1 >= r.capacity for r in last.requests):
        return None
    lens = last.seq_lens + 1
    if int((last.seq_lens % scheduler.page_size == 0).sum()) * scheduler.page_size > allocator.available_size():
        return None
    slots = allocator.alloc_decode(lens, last.out_slots)
    if slots is None:
        return None
    scheduler.table.write(last.rows, last.seq_lens, lens, slots)
    tokens = flight.out.clamp_min(0)  # -1 stands for broken logits, whose request ends
    return replace(last, token_ids=tokens, positions=last.seq_lens, prefix_lens=last.seq_lens, seq_lens=lens,
                   out_slots=slots, sampled=last.requests)  # fmt: skip


def landed(flight: Flight) -> tuple[Batch, list[int]]:
    """The batch and its tokens, without requests that ended after it was launched."""
    batch, tokens = flight.batch, flight.read()
    live = [i for i, r in enumerate(batch.requests) if r.state is State.RUNNING]
    if len(live) == len(tokens):
        return batch, tokens
    at = torch.tensor(live, dtype=torch.int64)
    parts = {name: getattr(batch, name)[at] for name in ("positions", "rows", "prefix_lens", "seq_lens")}
    requests = [batch.requests[i] for i in live]
    batch = replace(batch, requests=requests, sampled=requests, logits_at=torch.arange(len(live)),
                    out_slots=batch.out_slots[at.to(batch.out_slots.device)], **parts)  # fmt: skip
    return batch, [tokens[i] for i in live]


class Landing:
    """Two places of pinned memory for tokens on their way back: one is read while the next is written."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._places = [torch.empty(most, dtype=torch.int64, pin_memory=self._on_cuda) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in self._places] if self._on_cuda else []

    def flight(self, batch: Batch, out: Tensor) -> Flight:
        """Send tokens on their way; what is launched later does not delay them."""
        self._places.reverse()
        self._arrived.reverse()
        place = self._places[0][: out.shape[0]]
        place.copy_(out, non_blocking=True)
        if not self._on_cuda:
            return Flight(batch, out, place.tolist)
        arrived = self._arrived[0]
        arrived.record()

        def read() -> list[int]:
            arrived.synchronize()
            return place.tolist()

        return Flight(batch, out, read)


class Ahead:
    """Takes an engine's steps as ``LLM._advance`` does, but overlaps the greedy decode steps of the same requests.

    `flight` is the step that was launched before its turn, if there is one. On a CPU it is not `enabled`: there is no
    device that could work meanwhile.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        self.llm, self.landing = llm, Landing(llm.device, most)
        self.enabled, self.flight = llm.device.type == "cuda", None

    def advance(self) -> None:
        """One step; the one after it is launched before this one's tokens are read, where it can be."""
        if self.flight is None and not self._steady():
            self.llm._advance()
        else:
            self._step(more=True)

    def land(self) -> None:
        """Finish the step that was launched before its turn, if there is one, and launch no other."""
        if self.flight is not None:
            self._step(more=False)

    def _steady(self) -> bool:
        """Whether the next step is a greedy decode for which nobody joins, leaves or loses pages."""
        llm, now = self.llm, self.llm.scheduler
        if not self.enabled or not now.running or now.waiting or now.prefilling or not now.decodes_fit:
            return False
        return llm.sampler.variant(now.running) == "greedy" and "greedy" in llm.runner.variants

    def _step(self, more: bool) -> None:
        llm, flight, self.flight = self.llm, self.flight, None
        try:
            with torch.inference_mode():
                if flight is None:
                    batch = llm.scheduler.next_batch()
                    assert batch is not None, "somebody runs, and has room"
                    flight = self._launch(batch)
                if more and (following := follow(llm.scheduler, flight)) is not None:
                    self.flight = self._launch(following)
                batch, tokens = landed(flight)
        except BaseException:  # as in LLM._advance
            self.flight = None
            llm.scheduler.rollback()
            raise
        if batch.requests:
            llm.scheduler.process(batch, tokens)
        llm._deliver(batch.sampled)

    def _launch(self, batch: Batch) -> Flight:
        return self.landing.flight(batch, self.llm._forward(batch, "greedy"))
