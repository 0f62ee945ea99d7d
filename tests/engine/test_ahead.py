"""Steps launched before the tokens of the one before are read: the same tokens, and nothing left
behind.

On the CPU the decode steps are tapes, in sizes up to 4 of 6 requests: larger batches have none, and
never run ahead.
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


def engines(device: str, **options: Any) -> tuple[LLM, LLM]:
    """One that never runs ahead, and one that does and counts the steps that followed another."""
    options = {
        **OPTIONS,
        "device": device,
        "dtype": "float32",
        "graphs": device == "cuda",
        **options,
    }
    plain, ahead = LLM("tiny", **options), LLM("tiny", **options)
    plain._ahead.enabled, ahead._ahead.enabled = False, True
    if device == "cpu":
        give_graphs(ahead, [1, 2, 4])
    ahead.runner.debug = True
    return plain, ahead


def followed(llm: LLM) -> list[int]:
    """Rows of each step that is launched ahead from now on."""
    real, rows = llm.runner.step.advance, []

    def advance(*args: Any) -> None:
        real(*args)
        rows.append(len(args[2]))

    llm.runner.step.advance = advance
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
    assert llm._ahead.flight is None
    assert not llm.has_work
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    rows = llm.table.alloc(llm.scheduler.max_requests)
    assert rows is not None, "a row is lost"
    assert not llm.table.table.any(), "free rows are zero, and so is that of padding"
    llm.table.free(rows)


@on_devices
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_tokens": 96},
        {"prefix_cache": False},
        {"mixed": True},
        {"page_size": 1},
        {"page_size": 3, "kv_tokens": 510},
        {"deterministic": True},
    ],
    ids=str,
)
def test_tokens_are_the_same_and_nothing_is_left(options, device) -> None:
    plain, ahead = engines(device, **options)
    rows = followed(ahead)
    for seed in range(3):
        prompts, params = load(10, seed)
        want, got = plain.generate(prompts, params), ahead.generate(prompts, params)
        assert [(o.token_ids, o.text, o.finish_reason) for o in got] == [
            (o.token_ids, o.text, o.finish_reason) for o in want
        ]
        idle(ahead)
    assert ahead.stats().generated_tokens == plain.stats().generated_tokens
    assert rows, "some steps were launched before the tokens before them were known"
    assert device == "cuda" or max(rows) <= 4


@on_devices
def test_steady_decoding_is_all_ahead_and_wastes_nothing(device) -> None:
    _, ahead = engines(device)
    rows, before = followed(ahead), dict(ahead.runner.stats)
    ahead.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert rows == [1] * 18, "no step was launched after the one that gives the last token"
    assert ahead.runner.stats == before | {"replays": before["replays"] + 19}


@on_devices
def test_neither_a_queue_without_rows_nor_a_full_cache_ends_it(device) -> None:
    plain, ahead = engines(device, max_requests=4, kv_tokens=256, page_size=4)
    prompts = [[i] * 9 for i in range(24)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    rows = followed(ahead)
    want, got = plain.generate(prompts, params), ahead.generate(prompts, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert ahead.stats().evicted_tokens > 0
    assert len(rows) >= 6 * 10, "most of the 15 decode steps of each four"
    idle(ahead)


def test_single_steps_and_streams_never_run_ahead() -> None:
    _, ahead = engines("cpu")
    rows, params = followed(ahead), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    ahead.add([5, 6], params)
    while ahead.has_work:
        ahead.step()
        assert ahead._ahead.flight is None
    assert len(list(ahead.stream([5, 6], params))) == 9
    assert rows == []


@on_devices
@pytest.mark.parametrize("n", [3, 6], ids=["padded", "without a graph of its size"])
def test_steps_of_all_kinds_take_turns(n, device) -> None:
    """Requests that come, are aborted and end amid flights; normal steps find everything where it
    must be."""
    plain, ahead = engines(device)
    for seed in range(2):
        draw, rows = random.Random(seed), followed(ahead)
        prompts, params = load(16, 100 + seed)
        want = [
            plain.generate(prompt, p)[0].token_ids
            for prompt, p in zip(prompts, params, strict=True)
        ]
        coming = [ahead._request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        requests, aborted = list(coming), set[int]()
        while coming or ahead.scheduler.has_work:
            while coming and (
                not ahead.scheduler.has_work or (draw.random() < 0.2 and _living(ahead) < n)
            ):
                ahead.scheduler.add(coming.pop())
            kind = draw.choice(["ahead"] * 8 + ["land", "abort"])
            if kind == "ahead":
                somebody_joins = not ahead.scheduler.nobody_joins
                ahead._ahead.advance()
                assert not (somebody_joins and ahead._ahead.flight), "who waits is not kept waiting"
                for r in ahead.scheduler.running if device == "cpu" else ():
                    assert ahead.table._ends[r.row] == ahead.table.end(r.row), (
                        "the host's count, and what is there"
                    )
            elif kind == "land":
                ahead._ahead.land()
                ahead.step()
            elif running := ahead.scheduler.running:
                aborted.add(draw.choice(running).id)
                ahead.abort(max(aborted))
        ahead._ahead.land()
        ahead.step()
        for request, tokens in zip(requests, want, strict=True):
            got = request.output_ids.tolist()
            assert got == tokens[: len(got)]
            assert request.id in aborted or got == tokens
        assert rows
        idle(ahead)


def _living(llm: LLM) -> int:
    return len(llm.scheduler.waiting) + len(llm.scheduler.prefilling) + len(llm.scheduler.running)


@on_devices
@pytest.mark.parametrize("where", ["replay", "reading"])
def test_an_interrupt_lands_what_was_launched(where, device) -> None:
    plain, ahead = engines(device)
    params, calls = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), []

    def interrupted(real: Callable) -> Callable:
        def call(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 7:
                raise KeyboardInterrupt
            return real(*args)

        return call

    if where == "replay":
        ahead.runner._replay = interrupted(ahead.runner._replay)
    else:
        send = ahead._ahead.landing.send
        ahead._ahead.landing.send = lambda out: interrupted(send(out))
    with pytest.raises(KeyboardInterrupt):
        ahead.generate([[1, 2, 3], [4, 5]], params)
    idle(ahead)
    assert (
        ahead.generate([1, 2, 3], params)[0].token_ids
        == plain.generate([1, 2, 3], params)[0].token_ids
    )
    idle(ahead)


@on_devices
def test_a_request_whose_logits_break_ends_and_the_others_go_on(device) -> None:
    plain, ahead = engines(device)
    params, real, calls = (
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        ahead.runner._replay,
        [],
    )

    def broken(*args: Any) -> torch.Tensor:
        out = real(*args)
        calls.append(args)
        if len(calls) == 9:
            out[1] = -1
        return out

    ahead.runner._replay = broken
    outs = ahead.generate([[1, 2, 3], [4, 5], [6]], params)
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    for out, prompt in zip(outs, ([1, 2, 3], [4, 5], [6]), strict=True):
        assert out.token_ids == plain.generate(prompt, params)[0].token_ids[: len(out.token_ids)]
    assert len(outs[1].token_ids) == 9
    idle(ahead)


def test_others_in_the_engine_go_on_meanwhile() -> None:
    plain, ahead = engines("cpu")
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (25, 6))
    id = ahead.add([7, 8, 9], long)
    ahead.generate([1, 2], short)
    told = []
    while ahead.has_work:
        told += [t for delta in ahead.step() if delta.id == id for t in delta.token_ids]
    assert told == plain.generate([7, 8, 9], long)[0].token_ids
    idle(ahead)


@pytest.mark.gpu
def test_many_requests_of_many_lengths_on_the_gpu() -> None:
    plain, ahead = engines("cuda", max_requests=70, kv_tokens=20_000, page_size=16)
    rows = followed(ahead)
    for seed in range(2):
        prompts, params = load(150, seed, longest=200, stops=4)
        want, got = plain.generate(prompts, params), ahead.generate(prompts, params)
        assert [(o.token_ids, o.finish_reason) for o in got] == [
            (o.token_ids, o.finish_reason) for o in want
        ]
        idle(ahead)
    assert max(rows) > 40
