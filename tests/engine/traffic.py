"""Conversations that are aborted at random, mixed with nonsense, and every output held against a
quiet run's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minikv import LLM, SamplingParams
from minikv.engine.sampler import uniforms

SYSTEM = list(b"You answer in bytes. ")


def margin_of(alone: LLM, tokens: list[int], params: SamplingParams, index: int) -> float:
    """How close the choice of the next token was, in float64: the two best logits, or the draw to
    the nearest border.

    Batches of other sizes round their logits differently (about 1e-7), so a choice this close may
    fall either way.
    """
    seen: list[torch.Tensor] = []
    choose = alone.loop.sampler.choose
    alone.loop.sampler.choose = lambda logits, *rest: seen.append(logits) or choose(logits, *rest)
    alone.generate([tokens], SamplingParams(max_tokens=1, temperature=0))
    del alone.loop.sampler.choose
    logits = seen[-1][0].double()
    if params.temperature == 0:
        best = logits.topk(2).values
        return float(best[0] - best[1])
    p = torch.softmax(logits / params.temperature, -1)
    ranked, order = p.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    kept = torch.zeros_like(p).index_put((order,), (before < params.top_p).double()) * p
    u = float(uniforms([params.seed], [index])[0])
    return min(
        float((kept.cumsum(0) / kept.sum() - u).abs().min()),
        float((before - params.top_p).abs().min()),
    )


class Client:
    """Keeps a number of conversations going and writes down how every request ended.

    `rounding` is how close a choice must be for batches of other sizes to choose otherwise,
    `tie_share` how many of the requests may come to such a choice.
    """

    rounding, tie_share = 1e-5, 1 / 500

    def __init__(self, llm: LLM, seed: int, requests: int, turns: int, most_tokens: int) -> None:
        self.llm, self.rng = llm, np.random.default_rng(seed)
        self.left, self.turns, self.most = requests, turns, most_tokens
        self.asked: dict[
            int, tuple[list[int], SamplingParams, int]
        ] = {}  # id -> prompt, params, turn
        self.heard: dict[int, list[int]] = {}
        self.ended: dict[int, object] = {}
        self.malformed = self.sent = self.ties = self.settled = self.tokens = 0

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
        how = {
            "temperature": 0.9 * (rng.random() < 0.5),
            "top_p": 0.95,
            "seed": int(rng.integers(1000)),
        }
        params = SamplingParams(max_tokens=int(rng.integers(0, self.most)), **how)
        id = self.llm.add(prompt, params)
        self.asked[id], self.heard[id] = (prompt, params, turn), []

    def run(self, at_once: int, watch=lambda done: None) -> None:
        steps = 0
        while self.left or self.llm.has_work:
            while self.left and len(self.asked) - len(self.ended) < at_once:
                self.ask(SYSTEM, 1)
            open_ids = (
                [id for id in self.asked if id not in self.ended]
                if self.rng.random() < 0.03
                else []
            )
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
                watch(self.settled + len(self.ended))
            steps += 1
            assert steps < 200 * (self.sent + 10), "no progress"

    def settle(self, alone: LLM) -> None:
        """Compare what has ended with what `alone` makes of it undisturbed, and forget it."""
        ids = list(self.ended)
        wanted = alone.generate(
            [self.asked[id][0] for id in ids], [self.asked[id][1] for id in ids]
        )
        for id, want in zip(ids, wanted, strict=True):
            prompt, params, _ = self.asked.pop(id)
            out = self.ended.pop(id)
            assert out.token_ids == self.heard.pop(id)
            assert out.finish_reason in ("stop", "length", "abort"), out
            self.settled += 1
            self.tokens += len(prompt) + len(out.token_ids)
            cut = len(out.token_ids) if out.finish_reason == "abort" else None
            if out.token_ids != want.token_ids[:cut]:
                differ = [
                    x != y for x, y in zip(out.token_ids, want.token_ids, strict=False)
                ].index(True)
                margin = margin_of(alone, [*prompt, *want.token_ids[:differ]], params, differ)
                assert margin < self.rounding, (
                    f"request {id}, token {differ}: no rounding explains this ({margin:.1e})"
                )
                self.ties += 1
            elif cut is None:
                assert (out.text, out.finish_reason) == (want.text, want.finish_reason)

    def check(self, alone: LLM) -> None:
        """Everything has ended, is right, and nothing is lost."""
        llm = self.llm
        assert set(self.ended) == set(self.asked)
        self.settle(alone)
        assert self.settled + self.malformed == self.sent
        assert self.ties <= 1 + self.settled * self.tie_share
        llm.cache.check(owned=())
        assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
        assert llm.table.available_size() == llm.table.max_requests
