"""Admission, chunks, decodes, retraction: with a model whose text shows every wrong slot (see
harness.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import Engine, solo

from minikv.engine import State
from minikv.errors import ArgumentError


def finished(engine, *reasons):
    engine.idle()
    assert [r.finish_reason for r in engine.requests] == list(reasons)
    assert all(r.state is State.FINISHED for r in engine.requests)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_b06_rows_of_one_token_requests_come_back(mixed, one_by_one):
    engine = Engine(max_requests=2, mixed=mixed)
    for i in range(3):
        engine.add([1, 2, 3 + i], max_tokens=1)
        if one_by_one:
            engine.run()
    engine.run()
    finished(engine, "length", "length", "length")
    assert engine.texts() == [solo([1, 2, 3 + i], 1) for i in range(3)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("off", [{"cache": False}, {"per_request": True}])
def test_b36_without_cache_chunks_go_on_where_they_stopped(page_size, off):
    engine = Engine(page_size=page_size, chunk_tokens=4, cache="per_request" in off)
    r = engine.add(range(10), max_tokens=2, cache="per_request" not in off)
    spans = []
    while r.state is not State.RUNNING:
        batch = engine.step()
        spans.append((int(batch.prefix_lens[0]), int(batch.seq_lens[0])))
    assert spans == [(0, 4), (4, 8), (8, 10)]
    assert (
        engine.allocator.size - engine.allocator.available_size() == -(-10 // page_size) * page_size
    )
    engine.run()
    finished(engine, "length")
    assert engine.allocator.available_size() == engine.allocator.size
    assert engine.texts() == [solo(range(10), 2)]


def test_b38_abort_between_chunks_gives_no_page_away_twice():
    engine = Engine(page_size=4, chunk_tokens=4, size=32)
    a = engine.add(range(1, 13))
    engine.step()
    assert engine.scheduler.abort(a.id) is a
    engine.idle()
    engine.scheduler.chunk_tokens = 16
    b, c = engine.add([1, 2, 3, 4, 9]), engine.add([7] * 5)
    engine.run()
    assert (b.cached_tokens, c.cached_tokens) == (4, 0)
    assert engine.texts()[1:] == [solo([1, 2, 3, 4, 9], 4), solo([7] * 5, 4)]
    finished(engine, "abort", "length", "length")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("lengths", "want"),
    [
        ([3, 5, 4], [[3, 5], [4]]),
        ([8, 8], [[8], [8]]),
        ([9, 1], [[8], [1, 1]]),
        ([16], [[8], [8]]),
        ([5, 5, 5], [[5, 3], [2, 5]]),
    ],
)
def test_b39_one_partial_request_and_no_empty_chunk(lengths, want, warm):
    engine = Engine(page_size=1, chunk_tokens=8, policy="fcfs")
    for i in range(len(lengths)):
        if warm:  # one cached token each
            engine.add([20 + i], max_tokens=1)
            engine.run()
        engine.requests.clear()
    engine.batches.clear()
    requests = [
        engine.add([20 + i, *range(n - 1 + warm)], max_tokens=1) for i, n in enumerate(lengths)
    ]
    engine.run()
    got = [(b.seq_lens - b.prefix_lens).tolist() for b in engine.batches]
    assert got == want
    assert [r.cached_tokens for r in requests] == [int(warm)] * len(lengths)
    order = [r.id for b in engine.batches for r in b.sampled]
    assert order == [r.id for r in requests]
    finished(engine, *["length"] * len(lengths))


def test_b41_chunks_are_clamped_to_the_pool_and_zero_is_refused():
    engine = Engine(size=8, chunk_tokens=16)
    assert engine.scheduler.chunk_tokens == 8
    engine.add(range(8), max_tokens=1)
    with pytest.raises(ArgumentError, match="prompt=20"):
        engine.add(range(20))
    engine.run()
    finished(engine, "length")
    for name in ("chunk_tokens", "max_requests"):
        with pytest.raises(ArgumentError, match=name):
            Engine(**{name: 0})
    with pytest.raises(ArgumentError, match="policy"):
        Engine(policy="best")


def test_b42_admission_counts_whole_pages():
    engine = Engine(size=32, page_size=8)
    for i in range(5):
        engine.add([i], max_tokens=4)
    batch = engine.step()
    assert [r.id for r in batch.requests] == [1, 2, 3, 4]
    assert [r.id for r in engine.scheduler.waiting] == [5]
    engine.run()
    finished(engine, *["length"] * 5)
    assert engine.texts() == [solo([i], 4) for i in range(5)]


def test_b44_prompts_beyond_the_usable_pages_are_refused():
    engine = Engine(size=12, page_size=4)
    for n in (13, 16, 17):
        with pytest.raises(ArgumentError, match=r"KV pool of 12; raise kv_tokens"):
            engine.add(range(n))
    engine.add(range(12), max_tokens=1)  # its one token needs no K and V
    engine.run()
    engine.add(range(12), max_tokens=2)
    engine.run()
    finished(engine, "length", "error")
    assert "KV pool of 12" in engine.requests[1].error
    assert engine.texts() == [solo(range(12), 1)] * 2


def test_b45_an_empty_prompt_is_refused_and_the_others_go_on():
    engine = Engine()
    engine.add([1, 2, 3])
    engine.step()
    with pytest.raises(ValueError, match="prompt"):
        engine.add([])
    engine.run()
    finished(engine, "length")


@pytest.mark.parametrize("page_size", [1, 4])
def test_b47_no_tokens_wanted_none_made(page_size):
    engine = Engine(page_size=page_size)
    engine.add([1, 2, 3], max_tokens=0)
    engine.run()
    finished(engine, "length")
    assert engine.texts() == [[]]
    assert engine.batches == []


@pytest.mark.parametrize("cache", [False, True])
def test_b48_a_retracted_request_prefills_all_it_had(cache):
    engine = Engine(cache=cache)
    r = engine.add([5, 6, 7, 8], max_tokens=6)
    for _ in range(3):
        engine.step()
    assert r.length == 7
    engine.scheduler.rollback()
    assert r.state is State.WAITING
    batch = engine.step()
    cached = 4 if cache else 0  # one whole page of its own
    assert not batch.decode
    assert batch.positions.tolist() == list(range(cached, 7))
    assert r.length == 8
    engine.run()
    finished(engine, "length")
    assert engine.texts() == [solo([5, 6, 7, 8], 6)]
    assert r.cached_tokens == 0  # its own tokens do not count as found


@pytest.mark.parametrize(("length", "opens_page"), [(3, False), (4, True), (5, False)])
@pytest.mark.parametrize("spare", [0, 1])
def test_b50_first_decode_opens_a_page_only_at_a_page_border(length, opens_page, spare):
    engine = Engine(size=16, page_size=4)
    engine.add(range(length), max_tokens=2)
    engine.step()
    hold = engine.allocator.alloc(engine.allocator.available_size() - 4 * spare)
    before = engine.allocator.available_size()
    assert before == 4 * spare
    engine.step()
    fits = spare or not opens_page
    assert engine.requests[0].finish_reason == ("length" if fits else "error")
    engine.allocator.free(hold)
    engine.run()
    engine.idle()
    assert engine.texts() == [solo(range(length), 2 if fits else 1)]


def test_b51_a_request_that_can_never_go_on_ends_with_an_error():
    engine = Engine(size=4, page_size=2)
    engine.add([1, 2, 3], max_tokens=8)
    engine.run()
    finished(engine, "error")
    assert "raise kv_tokens or lower max_tokens" in engine.requests[0].error
    assert engine.texts() == [solo([1, 2, 3], 8)[:2]]


# ---- beyond the faults


def test_retraction_takes_the_newest_and_sets_the_ratio_to_what_was_used():
    engine = Engine(size=32, page_size=4, policy="fcfs")
    engine.scheduler.ratio = 0.0  # promise nothing, so that too many are admitted
    for i in range(4):
        engine.add([i, 1, 2, 3, 4], max_tokens=12)
    engine.run()
    retracted = [e["id"] for e in engine.events if e["event"] == "retract"]
    assert retracted
    assert retracted[0] == 4
    finished(engine, *["length"] * 4)
    assert engine.texts() == [solo([i, 1, 2, 3, 4], 12) for i in range(4)]


def test_growth_ratio_holds_requests_back_so_that_nobody_is_retracted():
    engine = Engine(size=32, page_size=4)
    engine.scheduler.ratio = 1.0
    for i in range(4):
        engine.add([i, 1, 2, 3, 4], max_tokens=12)
    engine.step()
    assert len(engine.scheduler.running) == 2
    before = engine.scheduler.ratio
    engine.run()
    assert engine.scheduler.ratio < before
    assert not [e for e in engine.events if e["event"] == "retract"]
    finished(engine, *["length"] * 4)


def test_b30_matched_tokens_count_once():
    engine = Engine(size=5, page_size=1)
    engine.add([1, 2], max_tokens=1)
    engine.run()
    assert engine.cache.total_size == 2
    hold = engine.allocator.alloc(1)
    runner = engine.add([9], max_tokens=3)  # takes two of what is left, so that waiting makes sense
    engine.step()
    r = engine.add([1, 2, 3, 4, 5], max_tokens=1)
    engine.step()
    assert r.state is State.WAITING
    assert [n.lock_count for n in engine.cache.nodes() if n.key.tolist()[:2] == [1, 2]] in ([0], [])
    engine.allocator.free(hold)
    engine.run()
    assert runner.finish_reason == r.finish_reason == "length"
    engine.idle()


def test_order_longest_prefix_first():
    engine = Engine(size=256, page_size=4, policy="lpm")
    engine.add(range(16), max_tokens=1)
    engine.run()
    engine.batches.clear()
    cold, short, long = (
        engine.add([30] * 9),
        engine.add([*range(8), 40]),
        engine.add([*range(16), 40]),
    )
    assert engine.step().requests == [long, short, cold]
    engine.run()
    engine.idle()


def test_order_longest_prefix_falls_back_to_arrival_above_128_waiting():
    engine = Engine(size=4096, page_size=4, policy="lpm", max_requests=200, chunk_tokens=4096)
    engine.add(range(8), max_tokens=1)
    engine.run()
    requests = [engine.add([i % 50, i // 50, 41, 42, 43], max_tokens=1) for i in range(128)] + [
        engine.add([*range(8), 1])
    ]
    assert engine.step().requests == requests
    engine.run()
    engine.idle()


def test_order_heaviest_subtree_first():
    engine = Engine(size=256, page_size=4, policy="dfs-weight", chunk_tokens=256)
    for prompt in ([*range(8), 0], [*range(20, 24), 0]):
        engine.add(prompt, max_tokens=1)
        engine.run()
    light = engine.add([*range(20, 24), 1])
    other = engine.add([9] * 6)
    at_four, at_eight = engine.add([*range(4), 1]), engine.add([*range(8), 1])
    second = engine.add([*range(8), 2])
    assert engine.step().requests == [at_eight, second, at_four, light, other]
    engine.run()
    engine.idle()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
@pytest.mark.parametrize(("shared", "waits"), [(31, False), (32, True), (40, True)])
def test_of_requests_with_a_common_beginning_one_goes_first(policy, shared, waits):
    engine = Engine(size=512, page_size=1, policy=policy, chunk_tokens=256)
    first, second = engine.add([*range(shared), 45]), engine.add([*range(shared), 46])
    other = engine.add([33] * 40)
    batch = engine.step()
    assert (second not in batch.requests) == waits
    assert first in batch.requests
    assert other in batch.requests
    engine.run()
    assert (second.cached_tokens == shared) == waits
    engine.idle()


def test_common_beginning_is_waited_for_through_all_chunks_of_the_first():
    engine = Engine(size=512, page_size=4, chunk_tokens=16)
    prompt = [i % 45 for i in range(80)]
    first, second = engine.add([*prompt, 46], max_tokens=1), engine.add([*prompt, 47], max_tokens=1)
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 80)
    assert sum(b.num_tokens for b in engine.batches) == 82
    engine.idle()


@pytest.mark.parametrize(
    "options", [{"cache": False}, {"namespace": True}, {"page_size": 64}, {"per_request": True}]
)
def test_nobody_waits_for_a_cache_that_will_not_help(options):
    engine = Engine(
        size=512,
        page_size=options.get("page_size", 4),
        chunk_tokens=256,
        cache=options.get("cache", True),
    )
    names = ["a", "b"] if "namespace" in options else [None, None]
    for name in names:
        engine.add([i % 45 for i in range(40)], namespace=name, cache="per_request" not in options)
    assert len(engine.step().requests) == 2
    engine.run()
    engine.idle()


def test_mixed_batches_decode_beside_the_chunks():
    engine = Engine(size=256, chunk_tokens=6, mixed=True)
    a = engine.add([1, 2, 3], max_tokens=10)
    engine.step()
    b = engine.add(range(20), max_tokens=3)
    steps = []
    while engine.scheduler.has_work:
        batch = engine.step()
        steps.append((batch.decode, (batch.seq_lens - batch.prefix_lens).tolist()))
    assert steps[0] == (False, [5, 1])
    assert all(sum(lens) <= 6 for _, lens in steps)
    assert [a.output_ids.tolist(), b.output_ids.tolist()] == [
        solo([1, 2, 3], 10),
        solo(range(20), 3),
    ]
    engine.idle()


def test_stop_ids_end_a_request_with_the_token_kept():
    want = solo([3, 1, 4], 12)
    stop = want[5]
    engine = Engine()
    engine.add([3, 1, 4], max_tokens=12, stop_ids=[stop])
    engine.run()
    finished(engine, "stop")
    assert engine.texts() == [want[: want.index(stop) + 1]]


def test_broken_logits_end_one_request_and_leave_nothing_in_the_cache():
    engine = Engine()
    engine.add(range(8)), engine.add([30] * 8)
    batch = engine.scheduler.next_batch()
    tokens = engine.compute(batch)
    engine.scheduler.process(batch, [[-1], tokens[1]])
    engine.run()
    finished(engine, "error", "length")
    assert engine.cache.peek(list(range(8)))[1] == 0
    assert engine.texts() == [[], solo([30] * 8, 4)]


def test_pages_held_by_others_end_in_an_error_not_in_a_hang():
    engine = Engine(size=16, page_size=4)
    hold = engine.allocator.alloc(12)
    engine.add(range(8))
    engine.run()
    engine.allocator.free(hold)
    finished(engine, "error")
    assert "held outside the engine" in engine.requests[0].error


def test_namespaces_do_not_share():
    engine = Engine(size=256)
    for namespace in ("A", None, "A", 1, "1"):
        engine.add(range(12), max_tokens=1, namespace=namespace)
        engine.run()
    assert [r.cached_tokens for r in engine.requests] == [0, 0, 8, 0, 0]
    engine.idle()


def test_abort_in_every_state():
    engine = Engine(size=64, chunk_tokens=8, max_requests=2)
    running, partial, waiting = engine.add([1, 2, 3]), engine.add(range(20)), engine.add([4, 5])
    engine.step()
    states = [running.state, partial.state, waiting.state]
    assert states == [State.RUNNING, State.PREFILL, State.WAITING]
    for r in (waiting, partial, running):
        assert engine.scheduler.abort(r.id) is r
        assert engine.scheduler.abort(r.id) is None
    finished(engine, "abort", "abort", "abort")
    assert engine.step() is None


def test_the_scheduler_needs_neither_models_nor_kernels():
    code = """if True:
        import sys
        import minikv.engine.scheduler
        absent = ("triton", "minikv.models", "minikv.attention", "minikv.graphs")
        bad = [m for m in absent if m in sys.modules]
        assert not bad, bad
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_decode_step_of_the_same_requests_looks_nothing_up(monkeypatch) -> None:
    engine, looked_up = Engine(size=128), []
    real = engine.table.last_slots
    monkeypatch.setattr(
        engine.table, "last_slots", lambda *args: looked_up.append(args) or real(*args)
    )
    for i in range(3):
        engine.add([i, 1, 2], max_tokens=12 + 3 * i)
    engine.step()
    engine.step()
    looked_up.clear()
    for _ in range(5):
        assert len(engine.step().requests) == 3
    assert not looked_up
    engine.add([9, 9], max_tokens=3)
    while any(r.finish_reason is None for r in engine.requests):
        before = list(engine.scheduler.running)
        looked_up.clear()
        batch = engine.step()
        changed = (
            not batch.decode
            or not engine.batches[-2].decode
            or before != engine.batches[-2].requests
        )
        assert bool(looked_up) == changed
    assert engine.texts() == [solo([i, 1, 2], 12 + 3 * i) for i in range(3)] + [solo([9, 9], 3)]
    engine.idle()


# ---- n new tokens for each request


def guessing(*guesses):
    """Drafts for the running requests: these, one list a step, the same for each request."""
    rest = list(guesses)
    return lambda request: rest.pop(0) if rest else []


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_grow_by_the_drafts_and_shrink_by_those_rejected(page_size):
    engine = Engine(page_size=page_size, size=64)
    want = solo([5, 6, 7], 12)
    r = engine.add([5, 6, 7], max_tokens=12)
    engine.step()
    right, wrong = want[1:4], [*want[5:7], (want[7] + 1) % 50, 3, 4, 5]
    engine.guess = guessing(right, wrong)
    spans = []
    for _ in range(3):
        batch = engine.step()
        spans.append((int(batch.prefix_lens[0]), int(batch.new_lens[0]), r.length, r.computed))
        assert engine.table.end(r.row) == r.computed
        held = engine.allocator.size - engine.allocator.available_size()
        assert held == -(-r.computed // page_size) * page_size, "no page is kept for what is gone"
    assert spans == [(3, 4, 8, 7), (7, 7, 11, 10), (10, 1, 12, 11)]
    assert engine.batches[1].sampled == [r]
    assert engine.batches[1].logits_at.tolist() == [0, 1, 2, 3]
    engine.run()
    finished(engine, "length")
    assert engine.texts() == [want]


def test_the_events_of_a_step_count_its_tokens():
    engine = Engine(size=128, mixed=True)
    a = engine.add([5, 6, 7], max_tokens=12)
    engine.step()
    want = solo([5, 6, 7], 5)
    engine.guess = guessing([*want[1:3], 49 - want[3]])
    b = engine.add([8, 9], max_tokens=3)
    engine.step()
    *_, e = (e for e in engine.events if e["event"] == "step")
    assert (e["kind"], e["extends"], e["decodes"]) == ("extend", [[b.id, 2]], [[a.id, 4]])
    assert sorted(e["sampled"]) == [[a.id, 3], [b.id, 1]]
    assert a.timing.tokens == 4
    engine.run()
    finished(engine, "length", "length")


@pytest.mark.parametrize("at", range(5))
def test_a_stop_within_the_accepted_drafts_cuts_there(at):
    want = solo([3, 1, 4], 12)
    stop = want[1 + at]
    first = want.index(stop)
    engine = Engine()
    engine.guess = guessing(want[1:6])
    engine.add([3, 1, 4], max_tokens=12, stop_ids=[stop])
    engine.run()
    finished(engine, "stop")
    assert engine.texts() == [want[: first + 1]]
    cached = engine.cache.peek([3, 1, 4, *want])[1]
    assert cached <= 3 + first, "the last token's K/V, and what was computed behind it, is not kept"


def test_drafts_never_reach_past_the_last_token_or_the_context():
    engine = Engine(max_context=10, size=64)
    want = solo([1, 2, 3], 8)
    engine.guess = lambda r: solo(r.token_ids, 20)
    r = engine.add([1, 2, 3], max_tokens=50)
    engine.step()
    assert int(engine.step().seq_lens[0]) == 10
    finished(engine, "length")
    assert engine.texts() == [want]
    assert r.length == 11


def test_drafts_are_given_up_before_a_request_is_retracted():
    engine = Engine(size=8, page_size=4)
    engine.scheduler.ratio = 0.0
    a, b = engine.add([1, 2, 3], max_tokens=5), engine.add([4, 5, 6], max_tokens=5)
    engine.step()
    engine.guess = lambda r: [9] * 9
    batch = engine.step()
    assert batch.new_lens.tolist() == [1, 1], "room for one each, and none is left for guesses"
    assert [e for e in engine.events if e["event"] == "retract"] == []
    engine.run()
    finished(engine, "length", "length")
    assert engine.texts() == [solo([1, 2, 3], 5), solo([4, 5, 6], 5)]
    assert (a.drafts, b.drafts) == (0, 0)


@pytest.mark.parametrize("how", ["abort", "retract", "broken"])
def test_what_was_reserved_for_drafts_comes_back(how):
    engine = Engine(size=64)
    r, other = engine.add([5, 6, 7], max_tokens=12), engine.add([8], max_tokens=9)
    engine.step()
    r.draft([1, 2, 3, 4, 5, 6])
    batch = engine.scheduler.next_batch()
    assert batch.new_lens.tolist() == [7, 1]
    tokens = engine.compute(batch)
    if how == "abort":
        engine.scheduler.abort(r.id)
        engine.scheduler.process(batch, tokens)
    elif how == "retract":
        engine.scheduler.rollback()
    else:
        engine.scheduler.process(batch, [[-1], tokens[1]])
    assert r.drafts == 0
    engine.run()
    finished(engine, {"retract": "length", "broken": "error"}.get(how, how), "length")
    assert engine.texts()[1] == solo([8], 9)
    assert other.length == 10
    if how == "broken":
        assert engine.cache.peek([5, 6, 7, *solo([5, 6, 7], 2)])[1] == 0


# ---- the step after a step whose tokens are not read yet


def test_the_step_after_is_the_one_that_comes_when_all_is_read():
    """`follow` knows everything but the tokens: compared, field by field, with the batch that an
    engine without it builds."""
    ahead, plain = (Engine(size=128) for _ in range(2))
    for engine in (ahead, plain):
        for i in range(3):
            engine.add([i, 1, 2, 3][: 2 + i], max_tokens=4 + 5 * i)
        engine.step()
    batch = ahead.scheduler.next_batch()
    while batch is not None:
        before = ahead.compute(batch)
        after = ahead.scheduler.follow(batch)
        plain.step()
        want = plain.batches[-1]
        for name in ("rows", "prefix_lens", "seq_lens", "new_lens", "positions", "logits_at"):
            assert getattr(batch, name).tolist() == getattr(want, name).tolist(), name
        assert [r.id for r in batch.requests] == [r.id for r in want.requests]
        ahead.scheduler.process(batch, before)
        if after is not None:
            assert after.token_ids.tolist() == [-1] * len(after.requests)
            after.token_ids = batch.token_ids.new_tensor([r.last_token for r in after.requests])
        batch = after
    ahead.run()
    plain.run()
    assert (
        ahead.texts() == plain.texts() == [solo([i, 1, 2, 3][: 2 + i], 4 + 5 * i) for i in range(3)]
    )
    ahead.idle()


def test_there_is_no_step_after_where_tokens_or_requests_decide():
    engine = Engine(size=32, max_requests=3)
    engine.scheduler.max_requests = 2
    engine.add([1, 2], max_tokens=9), engine.add([3, 4], max_tokens=9)
    extend = engine.scheduler.next_batch()
    assert engine.scheduler.follow(extend) is None, "a prompt's own step"
    engine.scheduler.process(extend, engine.compute(extend))
    batch = engine.scheduler.next_batch()
    waiting = engine.add([5], max_tokens=2)
    a, b = batch.requests
    for name, value in (("grammar", object()), ("penalised", True)):
        before = getattr(a, name)
        setattr(a, name, value)
        assert engine.scheduler.follow(batch) is None, name
        setattr(a, name, before)
    hold = engine.allocator.alloc(engine.allocator.available_size())
    a.computed, a.length = a.computed + 1, a.length + 1  # as if it were about to open a page
    assert engine.scheduler.follow(batch) is None, "room would need a retraction"
    a.computed, a.length = a.computed - 1, a.length - 1
    engine.allocator.free(hold)
    engine.scheduler.max_requests = 3
    assert engine.scheduler.follow(batch) is None, "a waiting request finds a row"
    engine.scheduler.max_requests = 2
    after = engine.scheduler.follow(batch)
    assert after.requests == [a, b], "it waits for a row: no reason to wait"
    engine.scheduler.process(batch, engine.compute(batch))
    after.token_ids = after.token_ids.new_tensor([a.last_token, b.last_token])
    tokens = engine.compute(after)
    engine.scheduler.abort(a.id)
    engine.scheduler.process(after, tokens)
    assert a.output_ids.tolist() == solo([1, 2], 2)
    assert b.length == 5
    engine.run()
    finished(engine, "abort", "length", "length")
    assert engine.texts()[1:] == [solo([3, 4], 9), solo([5], 2)]
    assert waiting.cached_tokens == 0


def test_p14_a_request_that_waits_does_not_use_its_prefix():
    engine = Engine(size=15, page_size=1, policy="fcfs")
    slots = engine.allocator.alloc(3)
    engine.kv[slots.numpy()] = [1, 1002, 2003]
    engine.cache.insert([1, 2, 3], slots)
    long = engine.add([9], max_tokens=12)
    engine.step()
    assert long.state is State.RUNNING
    engine.scheduler.ratio = 1.0
    waiting = engine.add([1, 2, 3, 4], max_tokens=4)
    hits = [n.hit_count for n in engine.cache.nodes()]
    for _ in range(5):
        engine.step()
        assert waiting.state is State.WAITING
    assert [n.hit_count for n in engine.cache.nodes()] == hits
    assert engine.cache.stats.lookups == 1
    engine.run()
    assert (engine.cache.stats.lookups, engine.cache.stats.hit_tokens) == (2, 3)
    finished(engine, "length", "length")
    assert engine.texts() == [solo([9], 12), solo([1, 2, 3, 4], 4)]
