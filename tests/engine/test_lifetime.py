"""An engine gives everything back: with its last reference, and when it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worlds import give_graphs

from minikv import LLM, SamplingParams
from minikv.errors import StateError

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def engine(device: str = "cpu", **options: Any) -> LLM:
    options = {"kv_tokens": 256, "page_size": 4, "max_requests": 4, "chunk_tokens": 16, **options}
    return LLM("tiny", device=device, progress=False, **options)


def parts(llm: LLM) -> list[weakref.ref]:
    """All that holds memory, and what leads to it."""
    weight, pool = next(llm.decoder.parameters()), llm.pool.k(0)
    things = (llm, llm.scheduler, llm.cache, llm.allocator, llm.table, llm.pool, llm.attention)
    return [weakref.ref(t) for t in (*things, llm.decoder, llm.runner, weight, pool)]


def use(llm: LLM) -> None:
    """Run, listen to half an answer, and leave something unfinished."""
    seen: list[dict] = []
    llm.events.listeners.append(seen.append)
    llm.generate([[1, 2, 3], [4, 5]], PARAMS)
    stream = llm.stream([7, 8, 9], PARAMS)
    next(stream)
    next(stream)
    llm.add([1, 2], PARAMS)
    llm.step()


@on_devices
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.usefixtures("_no_collector")
def test_n17_ten_engines_in_one_variable_are_gone(device, graphs) -> None:
    left: list[weakref.ref] = []
    for _ in range(10):
        llm = engine(device, graphs=graphs and device == "cuda")
        llm.loop.overlaps = True
        if graphs and device == "cpu":
            give_graphs(llm, [1, 2, 4])
        use(llm)
        left += parts(llm)
        alive = [ref() for ref in left[:-11]]
        assert alive == [None] * len(alive), "the engine before is gone"
        del alive
    del llm
    assert [ref() for ref in left] == [None] * 110


@pytest.mark.usefixtures("_no_collector")
def test_n17_a_compiled_engine_is_gone() -> None:
    llm = engine(graphs=True, max_requests=1)
    llm.generate([[1, 2, 3]], PARAMS)
    left = parts(llm)
    del llm
    assert [ref() for ref in left] == [None] * 11


CALLS = {
    "generate": lambda llm: llm.generate([1, 2]),
    "generate nothing": lambda llm: llm.generate([]),
    "stream": lambda llm: llm.stream([1, 2]),
    "astream": lambda llm: llm.astream([1, 2]),
    "add": lambda llm: llm.add([1, 2]),
    "step": lambda llm: llm.step(),
    "abort": lambda llm: llm.abort(1),
    "has_work": lambda llm: llm.has_work,
    "stats": lambda llm: llm.stats(),
    "cache": lambda llm: llm.cache,
    "runner": lambda llm: llm.runner,
}


@on_devices
@pytest.mark.usefixtures("_no_collector")
def test_a_closed_engine_gives_all_back_and_says_so(device) -> None:
    with engine(device) as llm:
        use(llm)
        running = llm.stream([1, 2, 3], PARAMS)
        next(running)
        left = parts(llm)[1:]
    assert [ref() for ref in left] == [None] * 10
    last = list(running)[-1]
    assert last.finish_reason == "abort", "who listened is told"
    for call in CALLS.values():
        with pytest.raises(StateError, match="closed; build a new LLM"):
            call(llm)
    llm.close()
    assert repr(llm) == "LLM(closed)"
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        engine(device).speed  # noqa: B018


def test_closing_ends_the_event_log(tmp_path) -> None:
    with engine(event_log=tmp_path / "log") as llm:
        llm.generate([[1, 2, 3]], PARAMS)
        log = llm.events
    assert log._file is None
    assert (tmp_path / "log").read_text().count('"finish"') == 1


def test_an_engine_may_be_closed_within_an_error() -> None:
    llm = engine()
    llm.add([1, 2], PARAMS)
    with pytest.raises(ZeroDivisionError), llm:
        1 / 0  # noqa: B018
    assert repr(llm) == "LLM(closed)"
    assert torch.is_inference_mode_enabled() is False
