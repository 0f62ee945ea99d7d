"""A full batch on a CUDA device for ``MINIKV_LOAD_SECONDS`` (20): nothing lost, nothing wrong, no
growth."""

from __future__ import annotations

import os
from time import perf_counter

import psutil
import pytest
import torch
from traffic import Client

from minikv import LLM

SECONDS = float(os.environ.get("MINIKV_LOAD_SECONDS", "20"))


class Steady(Client):
    """Asks until its time is over; every 1,000 outputs are checked and forgotten, so that only the
    engine can grow."""

    rounding, tie_share = 1e-4, 1 / 100

    def __init__(self, llm: LLM, alone: LLM, seconds: float) -> None:
        super().__init__(llm, seed=0, requests=1 << 40, turns=8, most_tokens=64)
        self.alone, self.started, self.seconds = alone, perf_counter(), seconds
        self.rss: list[tuple[float, int]] = []

    def watch(self, done: int) -> None:
        if len(self.ended) >= 1000:
            self.settle(self.alone)
            self.rss.append((perf_counter() - self.started, psutil.Process().memory_info().rss))
        if perf_counter() - self.started > self.seconds:
            self.left = 0


def serve(device: str, seconds: float, rows: int, pool: int) -> Steady:
    """Conversations, twice as many at once as there are rows, each cut short at random."""
    options = {"device": device, "dtype": "float32", "page_size": 16, "progress": False}
    alone = LLM(
        "tiny",
        kv_tokens=256 * rows,
        max_requests=rows,
        prefix_cache=False,
        chunk_tokens=8192,
        **options,
    )
    llm = LLM("tiny", kv_tokens=pool, max_requests=rows, chunk_tokens=2048, **options)
    llm.scheduler.ratio = (
        0.1  # promise little, so that too many are admitted when there are few pages
    )
    client = Steady(llm, alone, seconds)
    client.run(at_once=2 * rows, watch=client.watch)
    client.check(alone)
    stats = llm.stats()
    assert stats.requests["error"] == 0
    assert sum(stats.requests.values()) == client.sent
    print(
        f"{client.sent} requests in {perf_counter() - client.started:.0f} s on {device}: "
        f"{stats.requests},"
    )
    print(
        f"{client.tokens} tokens through a pool of {llm.allocator.size}, {stats.retractions} "
        "retractions,"
    )
    print(
        f"{stats.evicted_tokens} evicted, {stats.cached_tokens} of {stats.prompt_tokens} prompt "
        "tokens cached,"
    )
    print(f"{client.ties} rounding ties, {stats.graphs}")
    assert min(stats.evicted_tokens, stats.requests["abort"], client.malformed) > 0
    return client


@pytest.mark.gpu
@pytest.mark.timeout(120 + 3 * SECONDS)
@pytest.mark.parametrize(("kind", "per_row"), [("every row busy", 128), ("pages short", 32)])
def test_full_batch_loses_nothing(kind: str, per_row: int) -> None:
    client = serve("cuda", SECONDS / 2, rows=256, pool=256 * per_row)
    if kind == "pages short":
        assert client.llm.stats().retractions > 0
        assert client.llm.allocator.size <= client.tokens / 10
    later = [size for moment, size in client.rss if moment >= SECONDS / 8]
    if len(later) > 1:
        print(f"RSS {(later[-1] - later[0]) / 2**20:+.1f} MiB after the first quarter")
        assert later[-1] - later[0] < 50 * 2**20
    print(f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB on the device at most")
