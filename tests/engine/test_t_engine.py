"""Behaviour of the engine that could be broken without a test that noticed: one test for each."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import Engine

from minikv import LLM, SamplingParams
from minikv.engine import Request, Sampler
from minikv.engine.events import Histogram, Stats
from minikv.engine.policy import LPM_LIMIT
from minikv.engine.scheduler import DECAY, LEAST_RATIO
from minikv.engine.text import TextStream

LETTERS = dict(enumerate("abcdefghij"))


class Letters:
    """A tokenizer whose token i is the letter number i."""

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)


class Utf8:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


def tiny(**options) -> LLM:
    options = {"kv_tokens": 256, "page_size": 4, "max_requests": 4, **options}
    return LLM("tiny", device="cpu", graphs=False, progress=False, **options)


# ---- scheduler


@pytest.mark.parametrize("start", [0.0, 0.9])
def test_after_a_retraction_the_ratio_is_the_share_that_the_running_requests_used(start):
    engine = Engine(size=32, page_size=4, policy="fcfs", chunk_tokens=32)
    engine.scheduler.ratio = 0.0  # promise nothing, so that too many are admitted
    requests = [engine.add([i, 1, 2, 3, 4], max_tokens=12) for i in range(4)]
    engine.step()
    assert len(engine.scheduler.running) == 4
    while True:
        used = {r.id: len(r.output_ids) for r in requests}
        engine.scheduler.ratio = start
        engine.step()
        gone = {e["id"] for e in engine.events if e["event"] == "retract"}
        if gone:
            break
        assert engine.scheduler.ratio == pytest.approx(max(LEAST_RATIO, start - DECAY))
    going = [n for id, n in used.items() if id not in gone]
    assert len(going) == 2
    share = sum(going) / (12 * len(going))
    assert LEAST_RATIO < share < 0.5, "neither border hides a wrong ratio"
    assert engine.scheduler.ratio == pytest.approx(share - DECAY)
    engine.run()
    engine.idle()


def test_a_retracted_request_keeps_its_place_before_those_that_came_later():
    engine = Engine(size=32, page_size=4, policy="fcfs")
    engine.scheduler.ratio = 0.0
    for i in range(4):
        engine.add([i, 1, 2, 3, 4], max_tokens=12)
    engine.step()
    later = engine.add([9, 1, 2, 3, 4], max_tokens=2)
    engine.run()
    retracted = {e["id"] for e in engine.events if e["event"] == "retract"}
    admitted = [e["id"] for e in engine.events if e["event"] == "admit"]
    assert 4 in retracted
    assert later.id not in retracted
    assert admitted.index(4, 4) < admitted.index(later.id)
    engine.idle()


@pytest.mark.parametrize(("waiting", "longest_first"), [(127, True), (128, True), (129, False)])
def test_longest_prefix_first_holds_up_to_128_waiting(waiting, longest_first):
    assert LPM_LIMIT == 128
    engine = Engine(size=4096, page_size=4, policy="lpm", max_requests=200, chunk_tokens=4096)
    engine.add(range(8), max_tokens=1)
    engine.run()
    cold = [engine.add([i % 50, i // 50, 41, 42, 43], max_tokens=1) for i in range(waiting - 1)]
    warm = engine.add([*range(8), 1])
    first = engine.step().requests[0]
    assert first is (warm if longest_first else cold[0])


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_the_heaviest_subtree_goes_first_whenever_its_requests_came(order):
    """Subtrees with 1, 2 and 3 waiting requests, in every order of arrival."""
    engine = Engine(size=512, page_size=4, policy="dfs-weight", chunk_tokens=256)
    for weight in (1, 2, 3):
        engine.add([10 * weight + i for i in range(9)], max_tokens=1)
        engine.run()
    came = {
        weight: [engine.add([*(10 * weight + i for i in range(8)), n]) for n in range(weight)]
        for weight in order
    }
    assert engine.step().requests == [*came[3], *came[2], *came[1]]


# ---- text


def test_a_fourth_unfinished_byte_gives_the_first_out():
    """No character has four bytes that are unfinished, so at most three are held back."""
    stream = TextStream(Utf8())
    assert [stream.push([0xFF]) for _ in range(5)] == ["", "", "", "\ufffd", "\ufffd"]
    stream.push([], final=True)
    assert stream.text == "\ufffd" * 5


@pytest.mark.parametrize(
    ("decoded", "deltas"),
    [
        (["ab", "a", "abc"], ["ab", "", "c"]),
        (["abc", "", "a", "abcd"], ["abc", "", "", "d"]),
        (["A 世", "A \ufffd", "A 世b"], ["A 世", "", "b"]),
    ],
)
def test_b116_the_sent_position_never_moves_back(decoded, deltas):
    """Decoded text may shrink below what was sent and grow again."""

    class Shrinking:
        def decode(self, ids):
            return decoded[len(ids) - 1]

    stream = TextStream(Shrinking())
    assert [stream.push([i]) for i in range(len(decoded))] == deltas
    assert stream.text == "".join(deltas)


@pytest.mark.parametrize(("keep", "text"), [(True, "bcd"), (False, "bc")])
def test_keep_stop_holds_for_stop_token_ids(keep, text):
    params = SamplingParams(max_tokens=9, stop_token_ids=[3], keep_stop=keep)
    r = Request(1, [0], params, frozenset([3]), text=TextStream(Letters(), (), keep))
    assert [r.extend([token]) for token in (1, 2, 3)] == [None, None, "stop"]
    r.finish_reason = "stop"
    assert (r.output().text, r.output().token_ids) == (text, [1, 2, 3])


def test_keep_stop_holds_for_stop_token_ids_in_an_engine():
    llm = tiny()
    free = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    tokens = llm.generate([5, 6, 7], free)[0].token_ids
    stop = tokens[4]
    n = tokens.index(stop) + 1
    for keep in (True, False):
        params = SamplingParams(
            max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=[stop], keep_stop=keep
        )
        [out] = llm.generate([5, 6, 7], params)
        assert (out.token_ids, out.finish_reason) == (tokens[:n], "stop")
        assert out.text == llm.tokenizer.decode(tokens[: n if keep else n - 1])
        streamed = "".join(d.text for d in llm.stream([5, 6, 7], params))
        assert streamed == out.text


def test_a_stop_string_completed_by_the_last_token_ends_the_output():
    """As ``max_tokens`` would have done at the same token; the stop text wins."""
    params = SamplingParams(max_tokens=3, stop=["cd"])
    r = Request(1, [0], params, text=TextStream(Letters(), ["cd"]))
    assert [r.extend([token]) for token in (1, 2, 3)] == [None, None, "stop"]
    r.finish_reason = "stop"
    assert (r.output().text, r.output().token_ids) == ("b", [1, 2, 3])


# ---- seeds


def test_a_seeded_draw_depends_on_its_index_and_not_on_the_prompts_length():
    logits = torch.zeros(1, 1000)
    params = SamplingParams(seed=11)

    def drawn(prompt_len, outputs):
        r = Request(1, [1] * prompt_len, params, max_length=1000)
        r.extend([5] * outputs)
        return Sampler()(logits, [r]).tokens[0]

    for outputs in range(3):
        assert len({drawn(n, outputs) for n in (1, 2, 3, 7, 40)}) == 1
    assert len({drawn(3, outputs) for outputs in range(6)}) == 6


def test_a_seeded_draw_of_an_engine_does_not_depend_on_the_prompts_length():
    """Logits that say nothing of the prompt: all else would have to come from the draw."""
    llm = tiny()
    head = llm.decoder.lm_head
    with torch.no_grad():
        (head if isinstance(head, torch.Tensor) else head.weight).zero_()
    params = SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    outs = [llm.generate([1] * n, params)[0].token_ids for n in (1, 2, 5, 9)]
    assert all(tokens == outs[0] for tokens in outs)
    assert len(set(outs[0])) > 1


def test_engines_of_neighbouring_seeds_draw_from_seeds_of_their_own():
    seen = []
    for seed in (0, 1, 2, 3):
        llm = tiny(seed=seed)
        for _ in range(6):
            llm.add([1, 2], SamplingParams(max_tokens=1))
        seen += [r.seed for r in llm.scheduler.waiting]
    assert len(seen) == len(set(seen)) == 24


# ---- sizes and counters


@pytest.mark.parametrize(("page_size", "context", "size"), [(16, 33, 112), (7, 20, 63), (1, 5, 15)])
def test_the_default_pool_is_whole_pages(page_size, context, size):
    """Three requests of the longest context, rounded up to a page."""
    llm = tiny(kv_tokens=None, page_size=page_size, max_requests=3, max_context=context)
    assert llm.allocator.size == size
    assert llm.allocator.size % page_size == 0
    assert llm.allocator.size >= 3 * context


def step_event(t, *ids, kind="decode"):
    one = [[id, 1] for id in ids]
    decodes = one if kind == "decode" else []
    extends = [] if kind == "decode" else one
    return {"event": "step", "t": t, "extends": extends, "decodes": decodes, "sampled": one}


def lifetime(stats, id, start):
    """One request: added, admitted after 0.25 s, first token after 1 s, second after 1.5 s."""
    stats.update({"event": "add", "t": start, "id": id, "prompt_tokens": 3})
    admitted = {"event": "admit", "id": id, "cached_tokens": 0, "again": False}
    stats.update({**admitted, "t": start + 0.25})
    stats.update(step_event(start + 1, id, kind="extend"))
    stats.update(step_event(start + 1.5, id))


def test_times_are_counted_from_the_requests_beginning_not_from_the_clocks():
    stats = Stats()
    lifetime(stats, 1, start=5000.0)
    lifetime(stats, 2, start=7000.0)
    assert (stats.queue_time.count, stats.queue_time.total) == (2, 0.5)
    assert (stats.ttft.count, stats.ttft.total) == (2, 2.0)
    assert (stats.inter_token.count, stats.inter_token.total) == (2, 1.0)
    again = {"event": "admit", "t": 7002.0, "id": 2, "cached_tokens": 4, "again": True}
    stats.update(again)
    assert stats.queue_time.count == 2, "a retracted request does not queue a second time"


def test_the_times_of_an_engine_are_those_of_its_outputs():
    llm = tiny(max_requests=1)  # the second waits for the first
    outs = llm.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=4, ignore_eos=True))
    waited = [o.timing.queue_time for o in outs]
    assert waited[1] >= outs[0].timing.last_token - outs[1].timing.queued
    stats = llm.stats()
    assert stats.queue_time.count == 2
    longest = max(o.timing.finished - o.timing.queued for o in outs)
    assert 0 < stats.queue_time.total <= 2 * longest + 1
    assert 0 < stats.ttft.total <= 2 * longest + 1


def test_stats_forget_requests_that_ended():
    stats = Stats()
    for id in range(50):
        lifetime(stats, id, start=100.0 * id)
        stats.update({"event": "finish", "t": 100.0 * id + 2, "id": id, "reason": "length"})
    for id in range(50, 60):  # ended before their first token
        stats.update({"event": "add", "t": 1e4, "id": id, "prompt_tokens": 3})
        stats.update({"event": "finish", "t": 1e4, "id": id, "reason": "abort"})
    held = {name: value for name, value in vars(stats).items() if isinstance(value, dict)}
    assert sum(len(value) for name, value in held.items() if name.startswith("_")) == 0
    assert (stats.requests["length"], stats.requests["abort"]) == (50, 10)


def test_an_engines_stats_forget_requests_that_ended():
    llm = tiny()
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
    llm.abort(llm.add([7, 8, 9]))
    for _ in llm.stream([3, 2, 1], SamplingParams(max_tokens=5)):
        break
    assert not llm._stats._queued
    assert not llm._stats._last


def test_an_observation_counts_in_the_least_bound_that_is_not_below_it():
    h = Histogram((0.1, 0.2, 0.5))
    for seconds in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7):
        h.add(seconds)
    assert h.counts == [2, 2, 2, 1]


def test_prometheus_buckets_hold_what_is_at_most_their_bound():
    pytest.importorskip("prometheus_client")
    stats = Stats(queue_time=Histogram((0.1, 0.2, 0.5)))
    for seconds in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7):
        stats.queue_time.add(seconds)
    lines = dict(
        line.rsplit(" ", 1) for line in stats.prometheus().splitlines() if "queue_time" in line
    )
    buckets = {key.split('"')[1]: float(value) for key, value in lines.items() if "_bucket" in key}
    assert buckets == {"0.1": 2, "0.2": 4, "0.5": 6, "+Inf": 7}
    assert float(lines["minikv_queue_time_seconds_count"]) == 7
    assert float(lines["minikv_queue_time_seconds_sum"]) == pytest.approx(2.0)
