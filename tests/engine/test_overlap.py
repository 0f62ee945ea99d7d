"""Steps launched before the tokens of the one before are read: the same tokens, and nothing left
behind.

On the CPU nothing is gained, and everything must work: eagerly, and with graphs as tapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import give_graphs

from minikv import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "max_requests": 6,
    "chunk_tokens": 32,
    "progress": False,
    "kv_tokens": 512,
}
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def engines(device: str, tapes: bool = False, **options: Any) -> tuple[LLM, LLM]:
    """One that never overlaps its steps, and one that does, on a CPU too."""
    options = {
        **OPTIONS,
        "device": device,
        "dtype": "float32",
        "graphs": device == "cuda",
        **options,
    }
    plain, overlapped = LLM("tiny", **options), LLM("tiny", **options)
    plain.loop.overlaps, overlapped.loop.overlaps = False, True
    if tapes and device == "cpu":
        give_graphs(overlapped, [1, 2, 4])
        overlapped.runner.debug = True
    return plain, overlapped


def followed(llm: LLM) -> list[int]:
    """Rows of each step that is launched before its turn from now on."""
    real, rows = llm.scheduler.follow, []

    def follow(batch: Any) -> Any:
        after = real(batch)
        if after is not None:
            rows.append(len(after.requests))
        return after

    llm.scheduler.follow = follow
    return rows


def load(
    n: int, seed: int, longest: int = 20, stops: int = 40
) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.randrange(1, longest))] for _ in range(n)]
    stop_ids = [
        tuple(draw.sample(range(512), stops)) for _ in range(n)
    ]  # of 40, most outputs soon meet one
    params = [
        SamplingParams(
            max_tokens=draw.randrange(1, 40), temperature=0, stop_token_ids=s, ignore_eos=True
        )
        for s in stop_ids
    ]
    return prompts, params


def idle(llm: LLM) -> None:
    """Nothing is lost once everything has ended."""
    assert llm.loop.flight is None
    assert not llm.has_work
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    rows = llm.table.alloc(llm.scheduler.max_requests)
    assert rows is not None, "a row is lost"
    assert not llm.table.table.any(), "free rows are zero, and so is that of padding"
    llm.table.free(rows)


WORLDS = [
    {},
    {"kv_tokens": 96},
    {"prefix_cache": False},
    {"mixed": True},
    {"page_size": 1},
    {"page_size": 16},
    {"page_size": 3, "kv_tokens": 510},
    {"deterministic": True},
    {"tapes": True},
    {"chunk_tokens": 5},
]


def told(out: Any) -> tuple:
    return out.token_ids, out.text, out.finish_reason, out.logprobs


@on_devices
@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_tokens_are_the_same_and_nothing_is_left(options, device) -> None:
    plain, overlapped = engines(device, **options)
    rows = followed(overlapped)
    for seed in range(3):
        prompts, params = load(10, seed)
        want, got = plain.generate(prompts, params), overlapped.generate(prompts, params)
        assert list(map(told, got)) == list(map(told, want))
        idle(overlapped)
    assert overlapped.stats().generated_tokens == plain.stats().generated_tokens
    assert overlapped.stats().computed_tokens == plain.stats().computed_tokens
    assert rows, "some steps were launched before the tokens before them were known"


SAMPLED = {
    "draws": {"temperature": 1.0},
    "cuts": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "bias": {"temperature": 0, "logit_bias": {7: 2.0}},
    "stops": {"temperature": 1.0, "stop": ["a", "b", "xy"]},
}


@on_devices
@pytest.mark.parametrize("tapes", [False, True])
@pytest.mark.parametrize("how", SAMPLED)
def test_draws_are_known_ahead(how, tapes, device) -> None:
    plain, overlapped = engines(device, tapes)
    rows = followed(overlapped)
    prompts = [[i, 3, i + 1] for i in range(8)]
    params = [
        SamplingParams(max_tokens=5 + 3 * i, seed=i, ignore_eos=True, **SAMPLED[how])
        for i in range(8)
    ]
    want, got = plain.generate(prompts, params), overlapped.generate(prompts, params)
    assert [o[:3] for o in map(told, got)] == [o[:3] for o in map(told, want)]
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert (x.token_id, list(x.top)) == (y.token_id, list(y.top))
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    assert rows
    idle(overlapped)


@pytest.mark.parametrize(
    "how", [{"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}]
)
def test_a_step_whose_logits_depend_on_the_last_token_waits_for_it(how) -> None:
    plain, overlapped = engines("cpu")
    rows = followed(overlapped)
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **how)
    assert told(overlapped.generate([1, 2], params)[0]) == told(plain.generate([1, 2], params)[0])
    assert rows == []
    ruled = SamplingParams(max_tokens=40, json_schema={"enum": ["yes", "no"]}, seed=1)
    assert told(overlapped.generate([1, 2], ruled)[0]) == told(plain.generate([1, 2], ruled)[0])
    assert rows == []


@on_devices
def test_steady_decoding_is_all_overlapped_and_wastes_nothing(device) -> None:
    _, overlapped = engines(device, tapes=True)
    rows, before = followed(overlapped), dict(overlapped.runner.stats)
    overlapped.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert rows == [1] * 18, "no step was launched after the one that gives the last token"
    replays = before["replays"] + 19
    assert overlapped.runner.stats == before | {"replays": replays}


@pytest.mark.parametrize("call", ["generate", "stream", "step"])
def test_every_way_of_calling_overlaps(call) -> None:
    plain, overlapped = engines("cpu")
    rows, params = followed(overlapped), SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    want = plain.generate([5, 6], params)[0].token_ids
    got: list[int] = []
    if call == "generate":
        got = overlapped.generate([5, 6], params)[0].token_ids
    elif call == "stream":
        got = [t for delta in overlapped.stream([5, 6], params) for t in delta.token_ids]
    else:
        overlapped.add([5, 6], params)
        while overlapped.has_work:
            got += [t for delta in overlapped.step() for t in delta.token_ids]
    assert got == want
    assert rows == [1] * 7
    idle(overlapped)


@on_devices
def test_neither_a_queue_without_rows_nor_a_full_cache_ends_it(device) -> None:
    plain, overlapped = engines(device, max_requests=4, kv_tokens=256, page_size=4)
    prompts = [[i] * 9 for i in range(24)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    rows = followed(overlapped)
    want, got = plain.generate(prompts, params), overlapped.generate(prompts, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert overlapped.stats().evicted_tokens > 0
    assert len(rows) >= 6 * 10, "most of the 15 decode steps of each four"
    idle(overlapped)


@on_devices
@pytest.mark.parametrize("n", [3, 6], ids=["padded", "without a graph of its size"])
@pytest.mark.parametrize("tapes", [False, True])
def test_steps_of_all_kinds_take_turns(tapes, n, device) -> None:
    """Requests that come, are aborted and end amid flights; normal steps find everything where it
    must be."""
    plain, overlapped = engines(device, tapes)
    for seed in range(2):
        draw, rows = random.Random(seed), followed(overlapped)
        prompts, params = load(16, 100 + seed)
        want = [
            plain.generate(prompt, p)[0].token_ids
            for prompt, p in zip(prompts, params, strict=True)
        ]
        coming = [overlapped._request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        requests, aborted = list(coming), set[int]()
        while coming or overlapped.scheduler.has_work:
            while coming and (
                not overlapped.scheduler.has_work
                or (draw.random() < 0.2 and _living(overlapped) < n)
            ):
                overlapped.scheduler.add(coming.pop())
            kind = draw.choice(["step"] * 8 + ["abort"])
            if kind == "step":
                joins = overlapped.scheduler.has_work and overlapped.scheduler._may_admit()
                overlapped.step()
                assert not (joins and overlapped.loop.flight), "a request that waits is admitted"
                for r in overlapped.scheduler.running if device == "cpu" else ():
                    assert overlapped.table._ends[r.row] == overlapped.table.end(r.row), (
                        "the host's count, and what is there"
                    )
            elif running := overlapped.scheduler.running:
                aborted.add(draw.choice(running).id)
                overlapped.abort(max(aborted))
        overlapped.step()
        for request, tokens in zip(requests, want, strict=True):
            got = request.output_ids.tolist()
            assert got == tokens[: len(got)]
            assert request.id in aborted or got == tokens
        assert rows
        idle(overlapped)


def _living(llm: LLM) -> int:
    return len(llm.scheduler.waiting) + len(llm.scheduler.prefilling) + len(llm.scheduler.running)


@on_devices
@pytest.mark.parametrize("where", ["replay", "reading"])
def test_an_interrupt_lands_what_was_launched(where, device) -> None:
    plain, overlapped = engines(device, tapes=True)
    params, calls = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), []

    def interrupted(real: Callable) -> Callable:
        def call(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 7:
                raise KeyboardInterrupt
            return real(*args)

        return call

    if where == "replay":
        overlapped.runner._replay = interrupted(overlapped.runner._replay)
    else:
        send = overlapped.loop.landing.send
        overlapped.loop.landing.send = lambda out: interrupted(send(out))
    with pytest.raises(KeyboardInterrupt):
        overlapped.generate([[1, 2, 3], [4, 5]], params)
    idle(overlapped)
    assert (
        overlapped.generate([1, 2, 3], params)[0].token_ids
        == plain.generate([1, 2, 3], params)[0].token_ids
    )
    idle(overlapped)


@on_devices
def test_a_request_whose_logits_break_ends_and_the_others_go_on(device) -> None:
    plain, overlapped = engines(device, tapes=True)
    params, real, calls = (
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        overlapped.runner._replay,
        [],
    )

    def broken(*args: Any) -> torch.Tensor:
        out = real(*args)
        calls.append(args)
        if len(calls) == 9:
            out[1] = -1
        return out

    overlapped.runner._replay = broken
    outs = overlapped.generate([[1, 2, 3], [4, 5], [6]], params)
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    for out, prompt in zip(outs, ([1, 2, 3], [4, 5], [6]), strict=True):
        assert out.token_ids == plain.generate(prompt, params)[0].token_ids[: len(out.token_ids)]
    assert len(outs[1].token_ids) == 9
    idle(overlapped)


def test_others_in_the_engine_go_on_meanwhile() -> None:
    plain, overlapped = engines("cpu")
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (25, 6))
    id = overlapped.add([7, 8, 9], long)
    overlapped.generate([1, 2], short)
    told = []
    while overlapped.has_work:
        told += [t for delta in overlapped.step() if delta.id == id for t in delta.token_ids]
    assert told == plain.generate([7, 8, 9], long)[0].token_ids
    idle(overlapped)


@pytest.mark.gpu
def test_many_requests_of_many_lengths_on_the_gpu() -> None:
    plain, overlapped = engines("cuda", max_requests=70, kv_tokens=20_000, page_size=16)
    rows = followed(overlapped)
    for seed in range(2):
        prompts, params = load(150, seed, longest=200, stops=4)
        want, got = plain.generate(prompts, params), overlapped.generate(prompts, params)
        assert [(o.token_ids, o.finish_reason) for o in got] == [
            (o.token_ids, o.finish_reason) for o in want
        ]
        idle(overlapped)
    assert max(rows) > 40
