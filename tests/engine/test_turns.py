"""Ctrl-C, callbacks and tokenizers that fail, at any moment: nothing is lost, the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import give_graphs

from minikv import LLM, SamplingParams
from minikv.engine import Request
from minikv.engine.loop import Turns
from minikv.errors import StateError

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [9] * 13]
PARAMS = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


def engine(ahead: bool = False, **options: Any) -> LLM:
    options = {
        "page_size": 4,
        "max_requests": 4,
        "chunk_tokens": 16,
        "kv_tokens": 256,
        "graphs": False,
        **options,
    }
    llm = LLM("tiny", device="cpu", progress=False, **options)
    if ahead:
        give_graphs(llm, [1, 2, 4])
        llm.loop.overlaps = True
    return llm


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return [o.token_ids for o in engine(prefix_cache=False).generate(PROMPTS, PARAMS)]


def idle(llm: LLM) -> None:
    assert llm.loop.flight is None
    assert not llm.has_work
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    assert llm.table.available_size() == llm.scheduler.max_requests


def once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, act: Callable[[], None]
) -> list[int]:
    """Act after the at-th call of a method; the list holds its number once that has happened."""
    real, calls, done = getattr(owner, name), [0], []

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        calls[0] += 1
        if calls[0] == at:
            done.append(at)
            act()
        return result

    monkeypatch.setattr(owner, name, patched)
    return done


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _the_usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (
        "whoever shields gives the handler back"
    )
    signal.signal(signal.SIGINT, before)


MOMENTS = [
    ("allocator", "alloc_extend", 1),
    ("allocator", "alloc_decode", 3),
    ("allocator", "free", 1),
    ("table", "alloc", 2),
    ("table", "write", 2),
    ("table", "free", 1),
    ("cache", "lock", 1),
    ("cache", "match_prefix", 2),
    ("cache", "cache_unfinished", 1),
    ("cache", "cache_finished", 2),
    ("cache", "insert", 1),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("part", "name", "at"), MOMENTS)
def test_ctrl_c_amid_bookkeeping_waits_for_its_end(
    monkeypatch, want, part, name, at, ahead
) -> None:
    llm = engine(ahead)
    pressed = once(monkeypatch, getattr(llm, part), name, at, press)
    try:
        llm.generate(PROMPTS, PARAMS)
    except KeyboardInterrupt:
        assert pressed
    else:
        assert not pressed, "an interrupt is late, but not lost"
    idle(llm)
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    idle(llm)


def test_ctrl_c_between_steps_keeps_every_token(monkeypatch, want) -> None:
    llm = engine()
    once(monkeypatch, llm.scheduler, "_emit", 4, press)
    ids, told = [llm.add(p, PARAMS) for p in PROMPTS], dict[int, list[int]]()
    interrupts = 0
    while llm.has_work:
        try:
            for delta in llm.step():
                told.setdefault(delta.id, []).extend(delta.token_ids)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert [told[i] for i in ids] == want
    idle(llm)


def test_a_second_ctrl_c_while_the_first_is_cleaned_up(monkeypatch, want) -> None:
    llm = engine(ahead=True)
    once(monkeypatch, llm.scheduler, "process", 4, press)
    abort = llm.scheduler.abort
    monkeypatch.setattr(llm.scheduler, "abort", lambda id: (press(), abort(id))[1])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    idle(llm)
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want


def test_a_turn_in_a_turn_and_an_error_in_it() -> None:
    done, turns = [], Turns()

    def twice() -> None:
        with turns:
            with turns:
                press()
                done.append(turns.depth)
            done.append(turns.depth)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert done == [2, 1]
    assert turns.depth == 0
    with pytest.raises(ZeroDivisionError), turns:
        1 / 0  # noqa: B018
    assert turns.depth == 0


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_tokenizer_that_fails_ends_one_request(monkeypatch, want, ahead, at) -> None:
    llm = engine(ahead)
    real, calls = Request.extend, [0]

    def fail(request: Request, tokens: list[int]) -> str | None:
        reason = real(request, tokens)
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("no such file: vocab.txt")
        return reason

    monkeypatch.setattr(Request, "extend", fail)
    outs = llm.generate(PROMPTS, PARAMS)
    [bad] = [i for i, o in enumerate(outs) if o.finish_reason == "error"]
    assert outs[bad].error == "RuntimeError: no such file: vocab.txt"
    for i, out in enumerate(outs):
        assert out.token_ids == want[i][: len(out.token_ids)], "what it has is right, without holes"
        assert i == bad or out.finish_reason == "length"
    idle(llm)


def test_the_last_text_of_a_request_that_cannot_be_made(monkeypatch, want) -> None:
    llm = engine()

    def fail(*args: Any, **kwargs: Any) -> str:
        raise UnicodeError("odd bytes")

    monkeypatch.setattr("minikv.engine.text.TextStream.push", fail)
    outs = llm.generate(PROMPTS, PARAMS)
    assert {(o.finish_reason, o.error) for o in outs} == {("error", "UnicodeError: odd bytes")}
    assert [o.token_ids for o in outs] == want
    idle(llm)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("event", ["add", "admit", "step", "finish", "retract"])
def test_a_listener_may_abort_at_any_event(want, event, ahead) -> None:
    llm = engine(ahead, kv_tokens=48, prefix_cache=event != "retract")
    aborted = []

    def listen(e: dict) -> None:
        if e["event"] == event and len(aborted) < 2:
            for id in (
                [e["id"]]
                if "id" in e and event != "finish"
                else [r.id for r in llm.scheduler.running]
            ):
                if llm.abort(id):
                    aborted.append(id)

    llm.events.listeners.append(listen)
    most = 9 if event == "retract" else 4  # then one ends before the others
    short = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    outs = llm.generate([*PROMPTS, [1]], [short, PARAMS, PARAMS, SamplingParams(max_tokens=0)])
    for out, tokens in zip(outs, [want[0][:most], *want[1:], []], strict=True):
        assert out.token_ids == tokens[: len(out.token_ids)]
        assert out.finish_reason == "abort" or out.token_ids == tokens
    assert aborted
    assert any(o.finish_reason == "abort" for o in outs)
    idle(llm)


def test_a_listener_or_a_disk_that_fails_costs_no_request(want, tmp_path) -> None:
    llm = engine(event_log=tmp_path / "events.jsonl")
    seen = []

    def fail(e: dict) -> None:
        seen.append(e)
        raise OSError("no space left on device")

    llm.events.listeners.append(fail)
    with pytest.warns(RuntimeWarning, match="listener .*fail failed at an event and gets no more"):
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    assert len(seen) == 1

    class Full:
        def write(self, text: str) -> None:
            raise OSError("no space left on device")

        def close(self) -> None:
            self.write("")

    llm.events._file = Full()  # type: ignore[assignment]
    with pytest.warns(
        RuntimeWarning, match="event_log failed at an event and gets no more .*no space left"
    ):
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    llm.events.close()
    idle(llm)


def test_an_abort_does_not_count_as_a_token() -> None:
    llm = engine()
    id = llm.add([1, 2, 3], PARAMS)
    for _ in range(5):
        llm.step()
    timing = llm.scheduler.running[0].timing
    between = timing.time_per_output_token
    llm.abort(id)
    llm.step()
    assert timing.finished > timing.last_token > timing.first_token  # type: ignore[operator]
    assert timing.time_per_output_token == between == (timing.last_token - timing.first_token) / 4


def test_a_listener_cannot_run_a_step_within_a_step(want) -> None:
    llm, errors = engine(), []

    def listen(e: dict) -> None:
        if e["event"] == "step":
            try:
                llm.step()
            except StateError as error:
                errors.append(str(error))

    llm.events.listeners.append(listen)
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    assert set(errors) == {"event listeners cannot run steps: one is under way"}
    idle(llm)
