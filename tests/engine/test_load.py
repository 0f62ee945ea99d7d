"""Conversations through a pool that holds a tenth of them: aborts, nonsense, retractions, and
nothing lost.

``MINIKV_LOAD=2000`` runs the long form of the load test.
"""

from __future__ import annotations

import os

import psutil
import pytest
from traffic import Client

from minikv import LLM


@pytest.fixture(scope="module")
def alone():
    return LLM(
        "tiny", device="cpu", kv_tokens=2048, max_requests=1, prefix_cache=False, chunk_tokens=2048
    )


MIXES = [
    {"page_size": 1, "policy": "lpm", "chunk_tokens": 16},
    {"page_size": 4, "policy": "fcfs", "chunk_tokens": 7},
    {"page_size": 16, "policy": "dfs-weight", "chunk_tokens": 64},
    {"page_size": 4, "policy": "lpm", "chunk_tokens": 24, "mixed": True},
    {"page_size": 16, "policy": "lpm", "chunk_tokens": 50, "prefix_cache": False},
    {"page_size": 1, "policy": "fcfs", "chunk_tokens": 9, "prefix_cache": False, "mixed": True},
    {"page_size": 4, "policy": "lpm", "chunk_tokens": 32, "eviction": "lfu", "max_requests": 3},
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: "-".join(map(str, m.values())))
def test_random_traffic_on_a_real_decoder(mix, alone):
    llm = LLM("tiny", device="cpu", **{"kv_tokens": 192, "max_requests": 6, **mix})
    client = Client(llm, seed=len(mix), requests=30, turns=3, most_tokens=10)
    client.run(at_once=8)
    client.check(alone)


@pytest.mark.timeout(1800 if "MINIKV_LOAD" in os.environ else 300)
def test_load_of_conversations_loses_nothing(alone):
    requests = int(os.environ.get("MINIKV_LOAD", "200"))
    llm = LLM(
        "tiny",
        device="cpu",
        kv_tokens=requests * 6,
        page_size=4,
        max_requests=requests // 2,
        chunk_tokens=requests,
    )
    llm.scheduler.ratio = (
        0.1  # promise little, so that too many are admitted and some must be retracted
    )
    client = Client(llm, seed=0, requests=requests, turns=5, most_tokens=48)
    rss: dict[str, int] = {}

    def watch(done: int) -> None:
        if done >= requests // 4:
            rss["now"] = psutil.Process().memory_info().rss
            rss.setdefault("quarter", rss["now"])

    client.run(
        at_once=requests // 2, watch=watch
    )  # many at once: they grow together, and the pool runs out
    client.check(alone)
    assert client.malformed == requests // 100
    stats = llm.stats()
    assert sum(stats.requests.values()) == requests
    assert stats.requests["error"] == 0
    assert stats.evicted_tokens > 0
    assert stats.retractions > 0
    assert stats.cached_tokens > stats.prompt_tokens // 4
    assert llm.allocator.size <= client.tokens / 10
    grown = (rss["now"] - rss["quarter"]) / 2**20
    assert grown < 50
    print(
        f"{stats.requests}, pool {llm.allocator.size} of {client.tokens} tokens, "
        f"{stats.retractions} retractions,"
    )
    print(
        f"{stats.evicted_tokens} evicted, {stats.cached_tokens} of {stats.prompt_tokens} prompt "
        "tokens cached,"
    )
    print(f"{client.ties} rounding ties, {grown:.1f} MiB more after the first quarter")
