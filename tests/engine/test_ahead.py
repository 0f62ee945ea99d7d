"""Steps launched before the tokens of the one before are read: the same tokens, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from minikv import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "page_size": 4, "max_requests": 6, "chunk_tokens": 32, "progress": False}


class Greedy:
    """A runner that chooses tokens, as a graph does, and notes which batches were launched ahead."""

    variants = ("greedy",)

    def __init__(self, llm: LLM) -> None:
        self.llm, self.stats, self.known, self.rows = llm, {}, [], 0

    def __call__(self, batch: Any, variant: str) -> torch.Tensor:
        last = torch.tensor([r.last_token for r in batch.requests])
        self.known.append(bool((batch.token_ids == last).all()) and int(batch.seq_lens[0]) == batch.requests[0].length)
        self.rows += len(batch.requests)
        return self.llm._decode_step(batch).argmax(-1)


def engines(**options: Any) -> tuple[LLM, LLM]:
    plain, ahead = (LLM("tiny", graphs=False, **{**OPTIONS, "kv_tokens": 512, **options}) for _ in range(2))
    ahead.runner, ahead._ahead.enabled = Greedy(ahead), True
    return plain, ahead


def load(n: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.randrange(1, 20))] for _ in range(n)]
    stops = [tuple(draw.sample(range(512), 40)) for _ in range(n)]  # most outputs meet one of so many before long
    params = [
        SamplingParams(max_tokens=draw.randrange(1, 40), temperature=0, stop_token_ids=s, ignore_eos=True)
        for s in stops
    ]
    return prompts, params


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 96}, {"prefix_cache": False}, {"mixed": True}], ids=str)
def test_tokens_are_the_same_and_nothing_is_left(options) -> None:
    plain, ahead = engines(**options)
    for seed in range(3):
        prompts, params = load(10, seed)
        want, got = plain.generate(prompts, params), ahead.generate(prompts, params)
        assert [(o.token_ids, o.text, o.finish_reason) for o in got] == [
            (o.token_ids, o.text, o.finish_reason) for o in want
        ]
        assert ahead._ahead.flight is None
        ahead.cache.check(owned=())
        assert ahead.allocator.available_size() + ahead.cache.evictable_size == ahead.allocator.size
    assert ahead.stats().generated_tokens == plain.stats().generated_tokens
    if "kv_tokens" not in options:
        assert not all(ahead.runner.known), "some steps were launched before their tokens were known"


def test_steady_decoding_is_all_ahead_and_wastes_nothing() -> None:
    _, ahead = engines()
    ahead.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert ahead.runner.known == [True, *[False] * 18]
    assert ahead.runner.rows == 19, "no step was launched after the one that gives the last token"


def test_single_steps_and_streams_never_run_ahead() -> None:
    _, ahead = engines()
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    ahead.add([5, 6], params)
    while ahead.has_work:
        ahead.step()
        assert ahead._ahead.flight is None
    assert len(list(ahead.stream([5, 6], params))) == 9
    assert all(ahead.runner.known)


def test_an_interrupt_lands_what_was_launched() -> None:
    plain, ahead = engines()
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    real, calls = ahead.runner, []

    def interrupted(batch: Any, variant: str) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(batch, variant)

    interrupted.variants, interrupted.stats = real.variants, {}  # type: ignore[attr-defined]
    ahead.runner = interrupted
    with pytest.raises(KeyboardInterrupt):
        ahead.generate([[1, 2, 3], [4, 5]], params)
    assert not ahead.has_work
    ahead.cache.check(owned=())
    ahead.runner = real
    assert ahead.generate([1, 2, 3], params)[0].token_ids == plain.generate([1, 2, 3], params)[0].token_ids


def test_others_in_the_engine_go_on_meanwhile() -> None:
    plain, ahead = engines()
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (25, 6))
    id = ahead.add([7, 8, 9], long)
    ahead.generate([1, 2], short)
    told = []
    while ahead.has_work:
        told += [t for delta in ahead.step() if delta.id == id for t in delta.token_ids]
    assert told == plain.generate([7, 8, 9], long)[0].token_ids
    ahead.cache.check(owned=())


@pytest.mark.gpu
def test_graphs_run_ahead_on_the_gpu() -> None:
    llm = LLM("tiny", dtype="float32", graphs=True, **{**OPTIONS, "device": "cuda", "kv_tokens": 512})
    for seed in range(3):
        prompts, params = load(10, seed)
        found = []
        for llm._ahead.enabled in (False, True):
            outs = llm.generate(prompts, params)
            found.append([(o.token_ids, o.finish_reason) for o in outs])
            llm.cache.check(owned=())
            assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
        assert found[0] == found[1]
