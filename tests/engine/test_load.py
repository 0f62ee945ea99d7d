"""Conversations through a pool that holds a tenth of them: aborts, nonsense, retractions, and nothing lost.

``MINIKV_LOAD=2000`` runs the long form of the load test.
"""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest
import torch

from minikv import LLM, SamplingParams
from minikv.engine.sampler import uniforms

SYSTEM = list(b"You answer in bytes. ")


def margin_of(alone: LLM, tokens: list[int], params: SamplingParams, index: int) -> float:
    """How close the choice of the next token was, in float64: the two best logits, or the draw to the nearest border.

    Batches of other sizes round their logits differently (about 1e-7), so a choice this close may fall either way.
    """
    seen: list[torch.Tensor] = []
    forward = alone._forward
    alone._forward = lambda batch: seen.append(forward(batch)) or seen[-1]
    alone.generate([tokens], SamplingParams(max_tokens=1, temperature=0))
    alone._forward = forward
    logits = seen[-1][0].double()
    if params.temperature == 0:
        best = logits.topk(2).values
        return float(best[0] - best[1])
    p = torch.softmax(logits / params.temperature, -1)
    ranked, order = p.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    kept = torch.zeros_like(p).index_put((order,), (before < params.top_p).double()) * p
    u = float(uniforms([params.seed], [index])[0])
    return min(float((kept.cumsum(0) / kept.sum() - u).abs().min()), float((before - params.top_p).abs().min()))


class Client:
    """Keeps a number of conversations going and writes down how every request ended."""

    def __init__(self, llm: LLM, seed: int, requests: int, turns: int, most_tokens: int) -> None:
        self.llm, self.rng = llm, np.random.default_rng(seed)
        self.left, self.turns, self.most = requests, turns, most_tokens
        self.asked: dict[int, tuple[list[int], SamplingParams, int]] = {}  # id -> prompt, params, turn
        self.heard: dict[int, list[int]] = {}
        self.ended: dict[int, object] = {}
        self.malformed = self.sent = self.ties = 0

    def ask(self, history: list[int], turn: int) -> None:
        if self.left == 0:
            return
        self.left -= 1
        self.sent += 1
        rng = self.rng
        if self.sent % 100 == 50:  # one in a hundred is nonsense
            self.malformed += 1
            with pytest.raises(ValueError):
                self.llm.add([[], [512], [1] * 10_000][rng.integers(3)])
            return
        prompt = [*history, *rng.integers(97, 123, rng.integers(3, 12)).tolist(), 10]
        how = {"temperature": 0.9 * (rng.random() < 0.5), "top_p": 0.95, "seed": int(rng.integers(1000))}
        params = SamplingParams(max_tokens=int(rng.integers(0, self.most)), **how)
        id = self.llm.add(prompt, params)
        self.asked[id], self.heard[id] = (prompt, params, turn), []

    def run(self, at_once: int, watch=lambda done: None) -> None:
        steps = 0
        while self.left or self.llm.has_work:
            while self.left and len(self.asked) - len(self.ended) < at_once:
                self.ask(SYSTEM, 1)
            open_ids = [id for id in self.asked if id not in self.ended] if self.rng.random() < 0.03 else []
            if open_ids:
                self.llm.abort(int(self.rng.choice(open_ids)))
            for delta in self.llm.step():
                self.heard[delta.id] += delta.token_ids
                if delta.finish_reason is None:
                    continue
                assert delta.id not in self.ended
                self.ended[delta.id] = delta.output
                prompt, _, turn = self.asked[delta.id]
                if turn < self.turns and delta.finish_reason in ("stop", "length"):
                    self.ask([*prompt, *delta.output.token_ids], turn + 1)
                watch(len(self.ended))
            steps += 1
            assert steps < 200 * (self.sent + 10), "no progress"

    def check(self, alone: LLM) -> None:
        llm = self.llm
        assert set(self.ended) == set(self.asked)
        for id, out in self.ended.items():
            prompt, params, _ = self.asked[id]
            assert out.token_ids == self.heard[id]
            assert out.finish_reason in ("stop", "length", "abort"), out
            want = alone.generate([prompt], params)[0]
            cut = len(out.token_ids) if out.finish_reason == "abort" else None
            if out.token_ids != want.token_ids[:cut]:
                differ = [x != y for x, y in zip(out.token_ids, want.token_ids, strict=False)].index(True)
                margin = margin_of(alone, [*prompt, *want.token_ids[:differ]], params, differ)
                assert margin < 1e-5, f"request {id}, token {differ}: no rounding explains this ({margin:.1e})"
                self.ties += 1
            elif cut is None:
                assert (out.text, out.finish_reason) == (want.text, want.finish_reason)
        assert self.ties <= 1 + len(self.ended) // 500
        llm.cache.check(owned=())
        assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
        assert llm.table.available_size() == llm.table.max_requests


@pytest.fixture(scope="module")
def alone():
    return LLM("tiny", device="cpu", kv_tokens=2048, prefix_cache=False, chunk_tokens=2048)


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
        "tiny", device="cpu", kv_tokens=requests * 2, page_size=4, max_requests=requests // 8, chunk_tokens=requests
    )
    llm.scheduler.ratio = 0.1  # promise little, so that too many are admitted and some must be retracted
    client = Client(llm, seed=0, requests=requests, turns=5, most_tokens=16)
    rss: dict[str, int] = {}

    def watch(done: int) -> None:
        if done >= requests // 4:
            rss["now"] = psutil.Process().memory_info().rss
            rss.setdefault("quarter", rss["now"])

    client.run(at_once=requests // 5, watch=watch)
    client.check(alone)
    assert client.malformed == requests // 100
    assert rss["now"] - rss["quarter"] < 50 * 2**20
    stats = llm.stats()
    assert sum(stats.requests.values()) == requests
    assert stats.requests["error"] == 0
    assert stats.evicted_tokens > 0
    assert stats.retractions > 0 or requests > 200  # among hundreds of rows what is promised too little averages out
    assert stats.cached_tokens > stats.prompt_tokens // 4
    trace = sum(len(client.asked[id][0]) + len(tokens) for id, tokens in client.heard.items())
    assert llm.allocator.size <= trace / 10
