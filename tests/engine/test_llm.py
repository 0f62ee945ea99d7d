"""The public engine on the "tiny" model: forms of prompts, endings, bad input, interruptions,
counters."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from harness import Around

from minikv import LLM, Error, SamplingParams
from minikv.errors import ArgumentError
from minikv.graphs import GraphRunner
from minikv.measure.request_metrics import read_events, request_metrics

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
HOT = SamplingParams(max_tokens=12, temperature=1.5, top_p=0.9, seed=7, ignore_eos=True)


def build(**options) -> LLM:
    options = {"kv_tokens": 512, "page_size": 4, "max_requests": 8, "chunk_tokens": 32, **options}
    return LLM("tiny", device="cpu", **options)


def idle(llm: LLM) -> None:
    assert not llm.has_work
    llm.cache.check(owned=())
    assert llm.cache.protected_size == 0
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    assert llm.table.available_size() == llm.table.max_requests


@pytest.fixture
def llm():
    llm = build()
    yield llm
    idle(llm)


@pytest.fixture(scope="module")
def alone():
    """Undisturbed runs: one request at a time, nothing shared, a pool without end."""
    llm = LLM("tiny", device="cpu", kv_tokens=8192, page_size=16, prefix_cache=False)

    def run(prompt, params=GREEDY):
        return llm.generate([prompt], params)[0]

    yield run
    idle(llm)


# ---- results and forms


def test_generate_returns_a_list_in_the_order_of_the_prompts(llm, alone):
    chat = [{"role": "user", "content": "hi"}]
    prompts = ["hello", [1, 2, 3], chat, (4, 5), torch.tensor([6, 7])]
    outs = llm.generate(prompts, GREEDY)
    assert [o.prompt_token_ids for o in outs[1:2] + outs[3:]] == [[1, 2, 3], [4, 5], [6, 7]]
    assert outs[2].prompt_token_ids == llm.tokenizer.chat(chat)
    for prompt, out in zip(prompts, outs, strict=True):
        want = alone(prompt)
        assert (out.token_ids, out.text, out.finish_reason) == (want.token_ids, want.text, "length")
        assert (out.error, out.logprobs, len(out.token_ids)) == (None, None, 8)
    for prompt, out in zip(prompts[:3], outs, strict=False):  # one prompt is a list of one
        assert [o.token_ids for o in llm.generate(prompt, GREEDY)] == [out.token_ids]
    assert llm.generate([]) == []
    assert len(llm.generate([[]])) == 1


def test_one_params_each(llm):
    outs = llm.generate(
        [[1], [2], [3]], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 0, 3)]
    )
    assert [len(o.token_ids) for o in outs] == [1, 0, 3]
    for bad in ([GREEDY], [GREEDY, 3], 7, [None, None]):
        with pytest.raises(ValueError, match="params"):
            llm.generate([[1], [2]], bad)


def test_cached_tokens_and_timing(llm):
    first, again = (
        llm.generate([list(range(20))], GREEDY)[0],
        llm.generate([list(range(20))], GREEDY)[0],
    )
    assert (first.cached_tokens, again.cached_tokens) == (0, 16)
    t = again.timing
    assert 0 <= t.queue_time <= t.ttft
    assert t.time_per_output_token > 0
    assert t.tokens == 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_b13_the_same_prompt_twice_computes_at_least_one_token(page_size):
    llm = build(page_size=page_size)
    first, again = (llm.generate([list(range(1, 9))], GREEDY)[0] for _ in range(2))
    assert again.cached_tokens == {1: 7, 4: 4}[page_size]
    assert first.token_ids == again.token_ids
    idle(llm)


@pytest.mark.parametrize("mixed", [False, True])
def test_b06_one_token_requests_give_their_rows_back(mixed):
    llm = build(max_requests=2, mixed=mixed)
    for _ in range(3):
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))[0].finish_reason in (
            "length",
            "stop",
        )
    idle(llm)


def test_b44_prompts_that_can_never_fit():
    llm = build(kv_tokens=12, page_size=4)
    outs = llm.generate(
        [list(range(n)) for n in (13, 12, 16, 17)], SamplingParams(max_tokens=1, ignore_eos=True)
    )
    assert [o.finish_reason for o in outs] == ["error", "length", "error", "error"]
    with pytest.raises(ValueError, match="kv_tokens"):
        llm.add(list(range(13)))
    [out] = llm.generate([list(range(12))], GREEDY)
    assert (out.finish_reason, len(out.token_ids)) == ("error", 1)
    idle(llm)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        "",
        [512],
        [-1],
        [1.5],
        None,
        [1, "a"],
        list(range(100)),
        [{"role": "judge"}],
        [{}],
        b"abc",
    ],
)
def test_b45_one_bad_prompt_harms_nobody(bad):
    llm = build(max_context=64)
    running = llm.add([1, 2, 3], GREEDY)
    llm.step()
    with pytest.raises(ValueError) as caught:
        llm.add(bad)
    assert isinstance(caught.value, Error)
    with pytest.raises(ValueError):
        llm.stream(bad)
    good, wrong, empty = llm.generate([[4, 5], bad, []], GREEDY)
    assert (good.finish_reason, good.error) == ("length", None)
    assert wrong.finish_reason == empty.finish_reason == "error"
    assert wrong.error
    tokens, last = [], None
    while llm.has_work:
        for delta in llm.step():
            assert delta.id == running
            tokens, last = tokens + delta.token_ids, delta
    assert last.finish_reason == "length"
    assert len(tokens) == 7 or len(tokens) == 8  # the first step's delta was not looked at here
    assert llm.stats().requests["refused"] == 4
    idle(llm)


@pytest.mark.parametrize("page_size", [1, 4])
def test_b47_no_tokens(page_size):
    llm = build(page_size=page_size)
    params = SamplingParams(max_tokens=0)
    [out] = llm.generate([[1, 2, 3]], params)
    assert (out.token_ids, out.text, out.finish_reason) == ([], "", "length")
    assert [d.finish_reason for d in llm.stream([1, 2, 3], params)] == ["length"]
    idle(llm)


def test_out_of_range_ids_in_params_are_refused(llm):
    for params in (SamplingParams(logit_bias={512: 1.0}), SamplingParams(stop_token_ids=[600])):
        with pytest.raises(ValueError, match="vocabulary"):
            llm.add([1], params)
        assert llm.generate([[1]], params)[0].finish_reason == "error"


def test_context_length_ends_the_text():
    llm = build(max_context=12)
    [out] = llm.generate([list(range(10))], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (out.finish_reason, len(out.token_ids)) == (
        "length",
        3,
    )  # the last one needs no place in the context
    idle(llm)


# ---- streaming


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_stream_joined_is_generate(llm, params):
    deltas = list(llm.stream("stream me", params))
    [out] = llm.generate("stream me", params)
    assert "".join(d.text for d in deltas) == out.text == deltas[-1].output.text
    assert [t for d in deltas for t in d.token_ids] == out.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) == params.max_tokens


def test_two_streams_and_added_requests_share_the_steps(llm, alone):
    ids = {llm.add([i, i + 1], GREEDY): [i, i + 1] for i in range(3)}
    one, two = llm.stream([7, 8, 9], HOT), llm.stream("abc", GREEDY)
    texts = {1: "", 2: ""}
    streams = {1: one, 2: two}
    while streams:
        for key in list(streams):
            delta = next(streams[key], None)
            if delta is None:
                del streams[key]
            else:
                texts[key] += delta.text
    assert texts == {1: alone([7, 8, 9], HOT).text, 2: alone("abc").text}
    news = defaultdict(list)
    while llm.has_work:
        for delta in llm.step():
            news[delta.id] += delta.token_ids
    assert news == {id: alone(prompt).token_ids for id, prompt in ids.items()}


def test_a_stream_left_early_is_aborted(llm):
    for _ in llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)):
        break
    assert llm.stats().requests["abort"] == 1
    llm.stream([1, 2, 3])  # never begun: nothing is queued


def test_stop_strings_cut_the_text_and_end_the_run(llm, alone):
    plain = alone("tell me", HOT)
    stop = plain.text[3:5]
    at = plain.text.find(stop)
    params = SamplingParams(
        max_tokens=12, temperature=1.5, top_p=0.9, seed=7, ignore_eos=True, stop=["nope", stop]
    )
    [out] = llm.generate("tell me", params)
    assert (out.text, out.finish_reason) == (plain.text[:at], "stop")
    assert out.token_ids == plain.token_ids[: len(out.token_ids)]
    assert len(out.token_ids) < 12
    assert "".join(d.text for d in llm.stream("tell me", params)) == out.text
    kept = llm.generate("tell me", SamplingParams(**{**params.__dict__, "keep_stop": True}))[0]
    assert kept.text == plain.text[: at + len(stop)]


def test_a_stop_string_completed_by_the_last_token_counts(alone, llm):
    plain = alone("tell me", HOT)
    params = SamplingParams(**{**HOT.__dict__, "stop": [plain.text[-2:]]})
    if plain.text.find(plain.text[-2:]) == len(plain.text) - 2:
        assert llm.generate("tell me", params)[0].finish_reason == "stop"


def test_eos_and_stop_ids_are_tokens_but_not_text(llm, alone):
    plain = alone("tell me")
    at = 4
    stop = plain.token_ids[at]
    first = plain.token_ids.index(stop)
    [out] = llm.generate(
        "tell me",
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=[stop]),
    )
    assert (out.token_ids, out.finish_reason) == (plain.token_ids[: first + 1], "stop")
    assert out.text == llm.tokenizer.decode(plain.token_ids[:first])
    forced = SamplingParams(max_tokens=8, logit_bias={256: 1e4})
    [out] = llm.generate("x", forced)
    assert (out.token_ids, out.text, out.finish_reason) == ([256], "", "stop")
    assert (
        llm.generate("x", SamplingParams(max_tokens=3, logit_bias={256: 1e4}, ignore_eos=True))[
            0
        ].token_ids
        == [256] * 3
    )


# ---- sampling through the engine


def test_seeds_do_not_depend_on_the_batch(llm, alone):
    prompts = [[i, 3, i] for i in range(8)]
    params = [
        SamplingParams(max_tokens=6, temperature=1.2, seed=i, ignore_eos=True) for i in range(8)
    ]
    for prompt, p, out in zip(prompts, params, llm.generate(prompts, params), strict=True):
        assert out.token_ids == alone(prompt, p).token_ids


def test_without_a_seed_the_engine_seed_decides():
    runs = []
    for seed in (0, 0, 1):
        llm = build()
        llm.seed = seed
        a, b = llm.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=12, ignore_eos=True))
        assert a.token_ids != b.token_ids
        runs.append(a.token_ids)
        idle(llm)
    assert runs[0] == runs[1] != runs[2]


def test_logprobs_one_per_token(llm):
    [out] = llm.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    )
    assert [p.token_id for p in out.logprobs] == out.token_ids
    for p in out.logprobs:
        assert len(p.top) == 2
        assert max(p.top, key=p.top.get) == p.token_id
        assert p.logprob == p.top[p.token_id] < 0


def test_nan_logits_end_one_request_only(llm, monkeypatch, alone):
    runner, step = llm.runner, [0]

    def poisoned(batch, variant):
        logits = runner(batch, variant).clone()
        step[0] += 1
        if step[0] == 3:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(llm.loop, "runner", Around(runner, poisoned, variants=("logits",)))
    outs = llm.generate([[1, 2], [3, 4], [5, 6]], GREEDY)
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    assert "NaN" in outs[1].error
    assert outs[1].token_ids == alone([3, 4]).token_ids[:2]
    assert outs[2].token_ids == alone([5, 6]).token_ids


# ---- ends that nobody planned


@pytest.mark.parametrize("after", range(4))
def test_an_interrupt_leaves_a_working_engine(llm, monkeypatch, alone, after):
    runner, calls = llm.runner, [0]

    def interrupted(batch, variant):
        calls[0] += 1
        if calls[0] == after + 1:
            raise KeyboardInterrupt
        return runner(batch, variant)

    waiting = llm.add([9, 9, 9], GREEDY)
    monkeypatch.setattr(llm.loop, "runner", Around(runner, interrupted))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([list(range(40)), [1, 2]], GREEDY)
    tokens = []
    while llm.has_work:
        for delta in llm.step():
            assert delta.id == waiting
            tokens += delta.token_ids
    assert tokens == alone([9, 9, 9]).token_ids
    assert llm.generate([[1, 2]], GREEDY)[0].token_ids == alone([1, 2]).token_ids


def test_abort_at_any_moment(llm):
    long = SamplingParams(max_tokens=50, ignore_eos=True)
    for steps in range(6):
        ids = [llm.add(list(range(60)), long), llm.add([1, 2, 3], long)]
        deltas = [d for _ in range(steps) for d in llm.step()]
        assert [llm.abort(i) for i in ids] == [True, True]
        assert llm.abort(ids[0]) is False
        assert llm.abort(10**6) is False
        while llm.has_work:
            deltas += llm.step()
        last = [d for d in deltas if d.finish_reason]
        assert sorted(d.id for d in last) == ids
        assert {d.finish_reason for d in last} == {"abort"}
        for d in last:
            assert d.output.token_ids == [t for e in deltas if e.id == d.id for t in e.token_ids]
    assert llm.step() == []


@pytest.mark.parametrize("raw", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_refused_by_generate_as_by_add(llm, raw):
    [out] = llm.generate(raw)
    assert (out.finish_reason, out.token_ids) == ("error", [])
    assert "use a text" in out.error
    with pytest.raises(ArgumentError, match="use a text"):
        llm.add(raw)


# ---- options


def test_b41_chunks_larger_than_the_pool_are_clamped():
    llm = build(kv_tokens=8, chunk_tokens=16)
    assert llm.scheduler.chunk_tokens == 8
    assert llm.generate([list(range(20))])[0].finish_reason == "error"
    assert llm.generate([list(range(8))], SamplingParams(max_tokens=1))[0].error is None
    idle(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("page_size", 257),
        ("page_size", 1.5),
        ("kv_tokens", 0),
        ("kv_tokens", 3),
        ("kv_memory", -1),
        ("kv_memory", 10),
        ("max_requests", 0),
        ("max_context", 0),
        ("max_context", 10**9),
        ("chunk_tokens", 0),
        ("policy", "best"),
        ("eviction", "never"),
        ("dtype", "int8"),
        ("kv_dtype", "int4"),
        ("device", "tpu"),
        ("graphs", "maybe"),
        ("attention", "flash"),
        ("speculative", "eagle"),
        ("model", "no-such-model"),
        ("model", None),
        ("model", 5),
        ("model", b"tiny"),
        ("eviction", []),
        ("policy", []),
        ("eviction", {}),
    ],
)
def test_bad_options_are_named(name, value):
    options = {"model": "tiny", "page_size": 4, "device": "cpu", name: value}
    with pytest.raises(Error) as caught:
        LLM(**options)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    assert str(value) in str(caught.value) or name in str(caught.value)


SIZES = ("page_size", "kv_tokens", "kv_memory", "max_requests", "max_context", "chunk_tokens")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"kv_tokens": 2**40},
            r"kv_tokens=1099511627776: needs 786,432.0 GiB, and .* are free on cpu; lower it",
        ),
        ({"kv_tokens": None, "kv_memory": 1e18}, "kv_memory=1e[+]18: needs"),
        (
            {"kv_tokens": None, "kv_memory": float("nan")},
            "kv_memory=nan: must be None or a number of bytes",
        ),
        (
            {"kv_tokens": None, "kv_memory": float("inf")},
            "kv_memory=inf: must be None or a number of bytes",
        ),
        (
            {"kv_tokens": None, "kv_memory": 10},
            "kv_memory=10: bytes hold no page besides page 0; give at least 6144",
        ),
        ({"kv_tokens": 10**400}, "kv_tokens=10+[.][.][.]: needs"),
        ({"max_requests": 2**40}, "max_requests=1099511627776: needs"),
        *(
            ({"attention": a}, "attention=.*: use 'auto', 'triton' or 'torch'")
            for a in ("foo", None, np.ones(2))
        ),
        *(
            ({"graphs": g}, "graphs=.*: use 'auto', True or False")
            for g in (0, 1, 1.0, None, "yes", np.ones(2))
        ),
        *(
            ({name: bad}, f"{name}=.*: must be")
            for name in SIZES
            for bad in (True, "8", np.ones(2), torch.ones(2))
        ),
        *(({name: 8.0}, f"{name}=8.0: must be") for name in SIZES if name != "kv_memory"),
        *(
            ({"seed": seed}, "seed=.*: must be an integer of at most 64 bits")
            for seed in ("7", 1.5, None, True, 2**64)
        ),
        ({"event_log": True}, "event_log=True: cannot be appended to"),
        (
            {"event_log": "no/such/folder/log"},
            "event_log='no/such.*No such file or directory.*folder that exists",
        ),
        ({"event_log": "."}, "event_log='.': cannot be appended to"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_no_machine_can_meet_are_named(options, named):
    with pytest.raises(ArgumentError, match=named):
        build(**options)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_options_may_be_numpys_and_pytorchs_numbers(kind):
    sizes = {
        "page_size": 4,
        "kv_tokens": 64,
        "max_requests": 2,
        "max_context": 32,
        "chunk_tokens": 8,
        "seed": 3,
    }
    llm = build(**{name: kind(size) for name, size in sizes.items()}, graphs=np.False_)
    kept = (
        llm.cache.page_size,
        llm.allocator.size,
        llm.table.max_requests,
        llm.table.max_context,
        llm.seed,
    )
    assert kept == (4, 64, 2, 32, 3)
    assert {type(size) for size in kept} == {int}
    assert type(llm.runner) is GraphRunner
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8
    by_bytes = [
        build(kv_tokens=None, kv_memory=memory).allocator.size
        for memory in (kind(1 << 20), 1 << 20)
    ]
    assert by_bytes[0] == by_bytes[1]
    idle(llm)


def test_sizes_of_the_pool():
    assert build(kv_tokens=64).allocator.size == 64
    by_bytes = build(kv_tokens=None, kv_memory=1 << 20)
    assert (by_bytes.allocator.size + 4) * by_bytes.pool.bytes_per_token <= 1 << 20
    assert build(kv_tokens=None, max_requests=2, max_context=64).allocator.size == 128
    with pytest.raises(ValueError, match="not both"):
        build(kv_tokens=64, kv_memory=1 << 20)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_policies_and_mixed_batches_give_the_same_tokens(policy, mixed, alone):
    llm = build(policy=policy, mixed=mixed, chunk_tokens=8, kv_tokens=96)
    prompts = [[*range(i % 3 * 10), i] for i in range(12)]
    for prompt, out in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert out.token_ids == alone(prompt).token_ids
    idle(llm)


# ---- counters


def test_stats_and_event_log_tell_the_same_story(tmp_path):
    llm = build(event_log=tmp_path / "events.jsonl", kv_tokens=48)
    llm.generate([list(range(20))] * 3 + [[], [7]], GREEDY)
    aborted = llm.add([1, 2], GREEDY)
    llm.step()
    llm.abort(aborted)
    llm.step()
    stats = llm.stats()
    llm.events.close()
    events = read_events(tmp_path / "events.jsonl")
    assert [
        json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ] == events
    metrics = request_metrics(events).values()
    assert stats.added == len(metrics) == 5
    assert stats.requests == {"stop": 0, "length": 4, "abort": 1, "error": 0, "refused": 1}
    assert stats.prompt_tokens == sum(m.prompt_tokens for m in metrics) == 63
    assert stats.cached_tokens == sum(m.cached_tokens for m in metrics) >= 16
    assert stats.computed_tokens == sum(m.computed_tokens for m in metrics)
    assert stats.generated_tokens == sum(m.generated_tokens for m in metrics) == 33
    assert stats.retractions == sum(m.retractions for m in metrics)
    assert stats.ttft.count == stats.queue_time.count == 5
    assert stats.inter_token.count == 28
    assert stats.ttft.total == pytest.approx(sum(m.ttft for m in metrics))
    assert (stats.waiting, stats.running, stats.pool_size) == (0, 0, 48)
    assert stats.pool_available + stats.pool_evictable == 48
    assert all(0 <= e["available"] + e["evictable"] <= 48 for e in events if e["event"] == "step")
    assert sum(stats.graphs.values()) > 0
    idle(llm)
    frozen = stats.generated_tokens
    llm.generate([[1]], GREEDY)
    assert stats.generated_tokens == frozen


def test_prometheus_text(llm):
    parser = pytest.importorskip("prometheus_client.parser")
    llm.generate([[1, 2, 3], []], GREEDY)
    families = {f.name: f for f in parser.text_string_to_metric_families(llm.stats().prometheus())}
    value = {name: f.samples[0].value for name, f in families.items()}
    assert value["minikv_generated_tokens"] == 8
    assert value["minikv_pool_size"] == 512
    ends = {
        s.labels["reason"]: s.value
        for s in families["minikv_requests"].samples
        if "reason" in s.labels
    }
    assert (ends["length"], ends["refused"]) == (1, 1)
    ttft = {s.name: s.value for s in families["minikv_ttft_seconds"].samples if not s.labels}
    assert ttft["minikv_ttft_seconds_count"] == 1


def test_a_pool_on_a_cpu_is_modest_unless_asked_for(monkeypatch) -> None:
    monkeypatch.setattr("minikv.engine.options.CPU_POOL", 1 << 20)
    llm = LLM("tiny", device="cpu", progress=False)
    assert (
        0
        < llm.allocator.size * llm.pool.bytes_per_token
        <= (1 << 20) + 16 * llm.pool.bytes_per_token
    )
    assert LLM("tiny", device="cpu", kv_tokens=4096, progress=False).allocator.size == 4096


def test_an_engine_says_what_it_does() -> None:
    llm = LLM("tiny", device="cpu", kv_tokens=64, page_size=4, progress=False)
    llm.add([1, 2, 3], SamplingParams(max_tokens=4))
    assert repr(llm).startswith(
        "LLM(llama, 0 requests running, 1 waiting, PagedAllocator(16 pages of 4 on cpu"
    )
    llm.step()
    assert "1 requests running, 0 waiting" in repr(llm)
