"""Counters that a server would export, kept up to date by the same events that the event log
writes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

REASONS = ("stop", "length", "abort", "error", "refused")
MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)


@dataclass
class Histogram:
    """Observations counted by upper bound, as Prometheus does; seconds.

    Examples
    --------
    >>> h = Histogram((0.1, 1.0)); h.add(0.1); h.add(5.0); h.counts, h.total, h.count
    ([1, 0, 1], 5.1, 2)
    """

    bounds: tuple[float, ...] = tuple(ms / 1000 for ms in MILLISECONDS)
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count one observation, or several equal ones."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times


@dataclass
class Stats:
    """Totals since the engine was built; the levels (`waiting` to `graphs`) are filled in when
    `llm.stats()` is called.

    `requests` counts ends by finish reason ("refused" for those that never entered the queue).
    `evicted_tokens` are tokens of the prefix cache; `pool_*` are tokens; `graphs` are the decode
    runner's counters.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    added: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    retractions: int = 0
    waiting: int = 0
    running: int = 0
    evicted_tokens: int = 0
    pool_size: int = 0
    pool_available: int = 0
    pool_evictable: int = 0
    graphs: dict[str, int] = field(default_factory=dict)
    queue_time: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    # by id: when it was added, until the first token; then, when its last token came
    _queued: dict[int, float] = field(default_factory=dict, repr=False)
    _last: dict[int, float] = field(default_factory=dict, repr=False)

    def update(self, e: dict) -> None:
        """Take one event of :mod:`minikv.engine.events`."""
        kind, t = e["event"], e["t"]
        if kind == "step":
            self.steps += 1
            self.computed_tokens += sum(n for _, n in (*e["extends"], *e["decodes"]))
            ids = [id for id, _ in e["sampled"]]
            tokens = sum(n for _, n in e["sampled"])
            self.generated_tokens += tokens
            since = Counter(map(self._last.get, ids))  # mostly one: the time of the step before
            for last, times in since.items():
                if last is not None:
                    self.inter_token.add(t - last, times)
            if tokens > len(ids):  # those of one step come together
                self.inter_token.add(0.0, tokens - len(ids))
            self._last.update(dict.fromkeys(ids, t))
            for id in self._queued.keys() & ids:
                self.ttft.add(t - self._queued.pop(id))
        elif kind == "add":
            self.added += 1
            self.prompt_tokens += e["prompt_tokens"]
            self._queued[e["id"]] = t
        elif kind == "admit" and not e["again"]:
            self.cached_tokens += e["cached_tokens"]
            self.queue_time.add(t - self._queued[e["id"]])
        elif kind == "retract":
            self.retractions += 1
        elif kind == "finish":
            self.requests[e["reason"]] += 1
            self._queued.pop(e["id"], None)
            self._last.pop(e["id"], None)
        elif kind == "refuse":
            self.requests["refused"] += 1

    def snapshot(self, **levels: Any) -> Stats:
        """A copy that no longer changes, with the levels filled in."""
        return replace(deepcopy(self), **levels, _queued={}, _last={})

    def prometheus(self) -> str:
        """The same numbers in Prometheus' text format.

        Raises
        ------
        StateError
            When the optional package prometheus_client is not installed.
        """
        from minikv.measure.prometheus import render

        return render(self)
