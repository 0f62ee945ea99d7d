"""What happened, one event per line of JSON, and the metrics that follow from it.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.engine.request import Moments
from minikv.errors import ArgumentError


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
        """Tell everybody. Whoever fails gets no more events and a warning: requests do not suffer
        for it."""
        record = {"t": time.perf_counter(), "event": event, **fields}
        for listen in list(self.listeners):
            try:
                listen(record)
            except Exception as e:
                self.listeners.remove(listen)
                self._lost(f"the listener {getattr(listen, '__qualname__', listen)}", e)
        try:
            if self._file:
                self._file.write(json.dumps(record) + "\n")
        except (OSError, ValueError) as e:
            self._lost("event_log", e)
            self.close()

    def _lost(self, who: str, why: Exception) -> None:
        text = f"{who} failed at an event and gets no more of them: {type(why).__name__}: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Close the file, if there is one."""
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError):  # a full disk, of which a warning told
                file.close()


def read_events(path: str | Path) -> list[dict]:
    """The events of a JSON-lines file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@dataclass
class RequestMetrics(Moments):
    """One request, as its events tell it; times in seconds, None where the moment never came."""

    prompt_tokens: int = 0
    reason: str | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
        return self.per_token(self.generated_tokens)


def request_metrics(events: Iterable[dict]) -> dict[int, RequestMetrics]:
    """Everything about each request, from the events of one engine alone (another one's ids begin
    at 1 again).

    Examples
    --------
    >>> log = [{"t": 0.0, "event": "add", "id": 1, "prompt_tokens": 3},
    ...        {"t": 1.0, "event": "admit", "id": 1, "cached_tokens": 2, "again": False},
    ...        {"t": 2.0, "event": "step", "extends": [[1, 1]], "decodes": [], "sampled": [[1, 1]]},
    ...        {"t": 2.5, "event": "step", "extends": [], "decodes": [[1, 1]], "sampled": [[1, 1]]}]
    >>> m = request_metrics(log)[1]
    >>> m.queue_time, m.ttft, m.time_per_output_token, m.cached_tokens, m.computed_tokens
    (1.0, 2.0, 0.5, 2, 2)
    """
    found: dict[int, RequestMetrics] = {}
    for e in events:
        kind, t = e["event"], e["t"]
        if kind == "add":
            found[e["id"]] = RequestMetrics(t, prompt_tokens=e["prompt_tokens"])
        elif kind == "admit" and not e["again"]:
            found[e["id"]].admitted, found[e["id"]].cached_tokens = t, e["cached_tokens"]
        elif kind == "retract":
            found[e["id"]].retractions += 1
        elif kind == "finish":
            found[e["id"]].finished, found[e["id"]].reason = t, e["reason"]
        elif kind == "step":
            for id, n in (*e["extends"], *e["decodes"]):
                found[id].computed_tokens += n
            for id, n in e["sampled"]:
                m = found[id]
                m.first_token = t if m.first_token is None else m.first_token
                m.last_token = t
                m.generated_tokens += n
    return found
