"""Random traffic through a pool that is too small: every text right, every page back, every request
ended."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Engine, solo
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.errors import ArgumentError
from minikv.measure.request_metrics import request_metrics


def play(
    engine: Engine, rng: np.random.Generator, requests: int, longest: int, namespaces=(None,)
) -> None:
    """Add, step, abort and interrupt at random; check each text against a run without an engine."""
    trunks = [rng.integers(0, 50, longest).tolist() for _ in range(3)]
    added, tick = 0, 0
    while added < requests or engine.scheduler.has_work:
        if added < requests and (rng.random() < 0.5 or not engine.scheduler.has_work):
            trunk = trunks[rng.integers(3)][: rng.integers(0, longest)]
            prompt = [*trunk, *rng.integers(0, 50, rng.integers(0, 6)).tolist()]
            options = {
                "namespace": namespaces[rng.integers(len(namespaces))],
                "cache": bool(rng.random() < 0.9),
            }
            try:
                engine.add(prompt, int(rng.integers(0, 12)), [int(rng.integers(50))], **options)
            except ArgumentError:
                assert not prompt or len(prompt) > min(
                    engine.allocator.size, engine.scheduler.max_context
                )
            added += 1
        if rng.random() < 0.04 and engine.requests:
            engine.scheduler.abort(engine.requests[rng.integers(len(engine.requests))].id)
        if rng.random() < 0.03:  # a step fails half way
            for r in engine.scheduler.running:
                r.draft(engine.guess(r))
            if (batch := engine.scheduler.next_batch()) is not None:
                engine.compute(batch)
                engine.scheduler.rollback()
        else:
            engine.step()
        tick += 1
        assert tick < 60 * requests + 500, "no progress"
    for r in engine.requests:
        most = min(r.params.max_tokens, engine.scheduler.max_context + 1 - r.prompt_len)
        want = solo(r.token_ids[: r.prompt_len], most, r.stop_ids)
        got = r.output_ids.tolist()
        if r.finish_reason in ("stop", "length"):
            assert got == want
            assert r.finish_reason == ("stop" if want and want[-1] in r.stop_ids else "length")
        else:
            assert r.finish_reason in ("abort", "error")
            assert got == want[: len(got)]
        if r.finish_reason == "error":
            assert r.prompt_len + most - 1 > engine.allocator.size
    engine.idle()
    metrics = request_metrics([{"t": i, **e} for i, e in enumerate(engine.events)])
    for r in engine.requests:
        m = metrics[r.id]
        assert (m.generated_tokens, m.reason) == (len(r.output_ids), r.finish_reason)
        assert m.cached_tokens == (r.cached_tokens or 0)
        quiet = not m.retractions and not engine.drafts
        if r.finish_reason in ("stop", "length") and r.params.max_tokens and quiet:
            assert m.cached_tokens + m.computed_tokens == r.length - 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 4, 16]),
    pages=st.integers(1, 12),
    max_requests=st.integers(1, 6),
    chunk_tokens=st.sampled_from([1, 3, 8, 64]),
    policy=st.sampled_from(["fcfs", "lpm", "dfs-weight"]),
    mixed=st.booleans(),
    cache=st.booleans(),
    drafts=st.sampled_from([0, 0, 3, 9]),
)
def test_random_traffic(
    seed, page_size, pages, max_requests, chunk_tokens, policy, mixed, cache, drafts
):
    rng = np.random.default_rng(seed)
    engine = Engine(
        size=max(8, pages * page_size) // page_size * page_size or page_size,
        page_size=page_size,
        max_requests=max_requests,
        chunk_tokens=chunk_tokens,
        policy=policy,
        mixed=mixed,
        cache=cache,
        drafts=drafts,
    )
    play(engine, rng, requests=14, longest=engine.allocator.size, namespaces=(None, "a", ("a", 1)))


@pytest.mark.parametrize("drafts", [0, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_traffic_with_long_shared_beginnings(page_size, drafts):
    options = {"max_requests": 12, "chunk_tokens": 40, "max_context": 480, "drafts": drafts}
    engine = Engine(size=480, page_size=page_size, **options)
    play(engine, np.random.default_rng(page_size), requests=120, longest=150)
    assert [e for e in engine.events if e["event"] == "retract"]
