"""An engine's counters in Prometheus' text format, for a server to export."""

from __future__ import annotations

from minikv.engine.events import Stats
from minikv.errors import StateError

_COUNTERS = {
    "added": "Requests that entered the queue",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "computed_tokens": "Tokens run through the model",
    "generated_tokens": "Tokens sampled",
    "steps": "Steps of the engine",
    "retractions": "Requests taken out of the batch for lack of pages",
    "evicted_tokens": "Tokens evicted from the prefix cache",
}
_GAUGES = {
    "waiting": "Requests in the queue",
    "running": "Requests that hold a row",
    "pool_size": "Tokens the KV pool holds",
    "pool_available": "Tokens in free pages",
    "pool_evictable": "Cached tokens that no request uses",
}
_HISTOGRAMS = {
    "queue_time": "Seconds from add to the first admission",
    "ttft": "Seconds from add to the first token",
    "inter_token": "Seconds between tokens of one request",
}


def render(stats: Stats) -> str:
    """``llm.stats()`` as text.

    Raises
    ------
    StateError
        When the optional package prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )
    except ImportError as e:
        install = "pip install -c constraints.txt -e '.[metrics]'"
        raise StateError(f"llm.stats().prometheus() needs prometheus_client: {install}") from e
    ended = CounterMetricFamily(
        "minikv_requests", "Requests that ended, by reason", labels=["reason"]
    )
    for reason, n in stats.requests.items():
        ended.add_metric([reason], n)
    families: list = [ended]
    for family, texts in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        families += [
            family(f"minikv_{name}", text, value=getattr(stats, name))
            for name, text in texts.items()
        ]
    for name, text in _HISTOGRAMS.items():
        h, family = getattr(stats, name), HistogramMetricFamily(f"minikv_{name}_seconds", text)
        below = [sum(h.counts[: i + 1]) for i in range(len(h.counts))]
        names = [*map(str, h.bounds), "+Inf"]
        family.add_metric([], list(zip(names, below, strict=True)), h.total)
        families.append(family)
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry).decode()


class _Fixed:
    """A Prometheus collector of metrics that are already there."""

    def __init__(self, families: list) -> None:
        self._families = families

    def collect(self) -> list:
        return self._families
