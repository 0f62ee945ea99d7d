"""What happened, one event per line of JSON; :mod:`minikv.measure.request_metrics` reads them.

Six events, each with its time `t` in seconds: ``add`` (id, prompt_tokens), ``admit`` (id,
cached_tokens, again), ``step`` (kind; extends, decodes: pairs [id, tokens computed] of the prompts
and of the running requests; sampled: pairs [id, tokens it got]; waiting, running, available,
evictable, size), ``retract`` (id), ``finish`` (id, reason, generated), ``refuse`` (error).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minikv.errors import ArgumentError

REASONS = ("stop", "length", "abort", "error", "refused")
MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)


class EventLog:
    """Passes events to listeners and, with a path, appends them to a JSON-lines file.

    Parameters
    ----------
    path
        File to append to; None writes nothing.
    listeners
        Called with each event, a dict.
    """

    def __init__(
        self, path: str | Path | None = None, listeners: Iterable[Callable[[dict], None]] = ()
    ) -> None:
        try:
            self._file = None
            if path is not None:
                self._file = open(os.fspath(path), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except (OSError, TypeError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            remedy = f"cannot be appended to ({reason}); name a file in a folder that exists"
            raise ArgumentError("event_log", path, remedy) from e
        self.listeners = list(listeners)

    def __call__(self, event: str, **fields: Any) -> None:
        """Tell the listeners and the file. One that fails gets a warning and no more events:
        requests do not suffer for it."""
        record = {"t": time.perf_counter(), "event": event, **fields}
        for listen in list(self.listeners):
            try:
                listen(record)
            except Exception as e:
                self.listeners.remove(listen)
                self._lost(f"the listener {getattr(listen, '__qualname__', listen)}", e)
        if self._file:
            try:
                self._file.write(json.dumps(record) + "\n")
            except (OSError, ValueError) as e:
                self._lost("event_log", e)
                self.close()

    def _lost(self, what: str, why: Exception) -> None:
        text = f"{what} failed at an event and gets no more of them: {type(why).__name__}: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Close the file, if there is one."""
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError):  # a full disk: the warning came before
                file.close()


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
