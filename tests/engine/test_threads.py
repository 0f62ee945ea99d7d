"""Any thread may call any method of an engine: the outputs are those of one caller."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from minikv import LLM, SamplingParams
from minikv.engine.loop import Turns

PROMPTS = [[i, 3, i + 1, *range(i)] for i in range(24)]
PARAMS = [
    SamplingParams(max_tokens=4 + i % 7, temperature=i % 2, seed=i, ignore_eos=True)
    for i in range(24)
]


def engine(**options: Any) -> LLM:
    options = {"kv_tokens": 512, "page_size": 4, "max_requests": 8, "chunk_tokens": 32, **options}
    llm = LLM("tiny", device="cpu", progress=False, **options)
    llm.loop.overlaps = True
    return llm


def idle(llm: LLM) -> None:
    assert not llm.has_work
    assert llm.loop.flight is None
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    assert llm.table.available_size() == llm.table.max_requests


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return [o.token_ids for o in engine().generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_n16_threads_that_generate_get_what_one_caller_gets(want, threads) -> None:
    llm = engine()
    parts = [range(k, 24, threads) for k in range(threads)]

    def part(indices: range) -> list[list[int]]:
        outs = llm.generate([PROMPTS[i] for i in indices], [PARAMS[i] for i in indices])
        assert all(o.error is None for o in outs)
        return [o.token_ids for o in outs]

    with ThreadPoolExecutor(threads) as pool:
        got = list(pool.map(part, parts))
    for indices, tokens in zip(parts, got, strict=True):
        assert tokens == [want[i] for i in indices]
    idle(llm)


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_n16_generate_stream_step_and_abort_at_once(want, threads) -> None:
    llm = engine(kv_tokens=256)
    news: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    own: dict[int, int] = {}  # id -> prompt, of requests that came through add()
    guard, stop = threading.Lock(), threading.Event()

    def hear(deltas: list) -> None:
        with guard:
            for delta in deltas:
                news.setdefault(delta.id, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    assert delta.id not in ends
                    ends[delta.id] = delta.finish_reason

    def work(k: int) -> None:
        draw = random.Random(k)
        for _ in range(10):
            i = draw.randrange(24)
            kind = draw.choice(["generate", "stream", "early", "add", "abort"])
            assert llm.stats().waiting >= 0
            if kind == "generate":
                assert llm.generate([PROMPTS[i]], PARAMS[i])[0].token_ids == want[i]
            elif kind == "stream":
                deltas = list(llm.stream(PROMPTS[i], PARAMS[i]))
                assert [t for d in deltas for t in d.token_ids] == want[i]
            elif kind == "early":
                stream = llm.stream(PROMPTS[i], PARAMS[i])
                assert next(stream).token_ids == want[i][:1]
                stream.close()
            else:
                id = llm.add(PROMPTS[i], PARAMS[i])
                with guard:
                    own[id] = i
                if kind == "abort":
                    hear(llm.step())
                    llm.abort(id)

    def stepper() -> None:
        while not stop.is_set() or llm.has_work:
            hear(llm.step())

    with ThreadPoolExecutor(threads + 1) as pool:
        steps = pool.submit(stepper)
        jobs = [pool.submit(work, k) for k in range(threads)]
        for job in jobs:
            job.result(60)
        stop.set()
        steps.result(60)
    hear(llm.step())
    assert set(ends) == set(own), (
        "each request of add() ended, and none of the others was told here"
    )
    for id, i in own.items():
        assert news[id] == want[i][: len(news[id])]
        assert ends[id] == "abort" or news[id] == want[i]
    idle(llm)


def test_n16_any_thread_may_read_a_stream(want) -> None:
    llm = engine()
    stream, got = llm.stream(PROMPTS[5], PARAMS[5]), []
    while (delta := _in_a_thread(lambda: next(stream, None))) is not None:
        got += delta.token_ids
    assert got == want[5]
    idle(llm)


def _in_a_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), []

    def ask(k: int) -> None:
        with turns, turns:
            order.append(k)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
    with turns:
        for k, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= k:
                time.sleep(0.001)
    with turns:  # asked for last, although nothing ran in between
        order.append("main")
    for thread in threads:
        thread.join(10)
    assert order == [*range(8), "main"]
    assert turns.depth == 0


@pytest.mark.parametrize("threads", [2, 8])
def test_a_caller_waits_for_two_steps_at_most(threads) -> None:
    llm = engine(max_requests=8)
    waits: list[int] = []
    stop = threading.Event()

    def generate(k: int) -> None:
        while not stop.is_set():
            llm.generate([[k, 1]], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))

    real = llm.scheduler.find

    def find(id: int) -> Any:  # called with the turn that abort waited for
        waits.append(llm.loop.steps - asked[0])
        return real(id)

    asked = [0]
    llm.scheduler.find = find
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(generate, k) for k in range(threads)]
        for _ in range(50):
            asked[0] = llm.loop.steps
            llm.abort(10**6)
        stop.set()
        for job in jobs:
            job.result(60)
    assert len(waits) == 50
    assert max(waits) <= 2
    idle(llm)


def test_astream_leaves_the_event_loop_free(want) -> None:
    llm = engine()

    async def listen(i: int) -> list[int]:
        return [t async for d in llm.astream(PROMPTS[i], PARAMS[i]) for t in d.token_ids]

    async def main() -> list[list[int]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        clock = asyncio.create_task(tick())
        got = await asyncio.gather(*(listen(i) for i in range(4)))
        clock.cancel()
        assert ticks > 10
        return got

    assert asyncio.run(main()) == want[:4]
    idle(llm)


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_an_astream_left_early_is_aborted(how) -> None:
    llm = engine()
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

    async def listen(seen: list) -> None:
        stream = llm.astream([1, 2], params)
        async for delta in stream:
            seen.append(delta)
            if how == "break":
                break
        await stream.aclose()

    async def main() -> None:
        seen: list = []
        task = asyncio.create_task(listen(seen))
        if how == "cancel":
            while not seen:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        assert seen

    asyncio.run(main())
    assert llm.stats().requests["abort"] == 1
    idle(llm)
    with pytest.raises(ValueError, match="prompt"):
        llm.astream([])
