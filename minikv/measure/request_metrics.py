"""What an engine's event log says about each request.

The events are those of :mod:`minikv.engine.events`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minikv.engine.request import Moments


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
