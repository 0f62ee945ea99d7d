"""What is refused changes nothing; and what may be asked before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tree import dump
from prefix_world import Req, World

from minikv.errors import ArgumentError, Error, StateError
from minikv.prefix import RadixCache


def state(w: World) -> tuple:
    c = w.cache
    counts = vars(c.stats).copy(), c.clock, c.fresh_page, len(c.queue.heap)
    return dump(c), counts, w.allocator.free_pages.tolist(), w.table.table.tolist()


@pytest.fixture
def w() -> World:
    w = World(pages=4, page_size=2)
    w.run([1, 2, 3, 4, 5, 6])
    return w


BRANCH = [1, 2, 3, 4, 7, 8]  # leaves the node of `w` in its middle: an insert splits it

BAD_SLOTS = [
    [1.5] * 6,
    ["a"] * 6,
    [[2, 3]] * 6,
    [None] * 6,
    "abcdef",
    5,
    (i for i in range(6)),
    {i: i for i in range(6)},
    torch.ones(6),
    torch.tensor(3),
    np.ones((6, 1), np.int64),
    [2**63] * 6,
    [2, 3],
]


@pytest.mark.parametrize("slots", BAD_SLOTS)
def test_p15_an_insert_with_bad_slots_splits_nothing(w: World, slots: Any) -> None:
    before = state(w)
    with pytest.raises(ArgumentError, match=r"^slots="):
        w.cache.insert(BRANCH, slots)
    assert state(w) == before
    w.check()


def test_p15_an_insert_that_the_allocator_has_no_pages_for_splits_nothing(w: World) -> None:
    taken = w.allocator.alloc(w.allocator.available_size())
    before = state(w)
    with pytest.raises(StateError, match="has 0 tokens left, an insert without slots needs 2"):
        w.cache.insert(BRANCH)
    assert state(w) == before
    w.allocator.free(taken[:2])
    assert w.cache.insert(BRANCH) == 4
    w.cache.check(owned=taken[2:])


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda c: c.insert([1, 2, 9.5]), "tokens"),
        (lambda c: c.insert(BRANCH, namespace=[1]), "namespace"),
        (lambda c: c.insert(BRANCH, priority="high"), "priority"),
        (lambda c: c.insert(BRANCH, priority=1.5), "priority"),
        (lambda c: c.match_prefix(BRANCH, namespace={}), "namespace"),
        (lambda c: c.match_prefix([[1, 2]]), "tokens"),
        (lambda c: c.peek("ab"), "tokens"),
    ],
)
def test_p15_other_refused_calls_change_nothing(
    w: World, call: Callable[[RadixCache], object], argument: str
) -> None:
    before = state(w)
    with pytest.raises(ArgumentError, match=rf"^{argument}="):
        call(w.cache)
    assert state(w) == before


@pytest.mark.parametrize("at", [0, 2, 3])
def test_p15_tokens_that_were_changed_in_place_are_not_called_evicted(at: int) -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4, 5, 6, 7, 8])
    w.chunk(r, 4)
    w.compute(r)
    r.token_ids[at] = 99
    same = at // 2 * 2
    for call in (w.cache.cache_unfinished, w.cache.cache_finished):
        before = state(w), vars(r).copy()
        with pytest.raises(StateError, match=rf"were changed while .* 4 tokens .* first {same} "):
            call(r)
        assert (state(w), vars(r)) == before
    r.token_ids[at] = at + 1
    w.finish(r)
    w.check()


def test_p15_a_namespace_that_was_changed_is_not_called_evicted() -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4], "a")
    w.chunk(r, 2)
    w.compute(r)
    r.namespace = "b"
    with pytest.raises(StateError, match="its namespace were changed"):
        w.cache.cache_unfinished(r)


@pytest.mark.parametrize("n", ["3", 2.0, None, [1], torch.tensor([1, 2])])
def test_p08_evict_takes_a_whole_number(w: World, n: Any) -> None:
    before = state(w)
    with pytest.raises(ArgumentError, match=r"^num_tokens=.*whole number"):
        w.cache.evict(n)
    assert state(w) == before


def test_p08_evict_takes_whole_numbers_of_any_kind(w: World) -> None:
    assert w.cache.evict(np.int32(0)) == w.cache.evict(-5) == 0
    assert w.cache.evict(np.int64(1)) == 6


@pytest.mark.parametrize("node", [None, "node", 0, RadixCache(2)])
def test_p08_what_is_no_node_changes_nothing(w: World, node: Any) -> None:
    before = state(w)
    for call in (w.cache.lock, w.cache.unlock):
        with pytest.raises(ArgumentError, match=r"^node=.*is not a node; pass the `node`"):
            call(node)
    assert state(w) == before


# ---- the room test looks, admission counts (P14)

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 2, 3]), st.lists(prompts, max_size=8), st.integers(0, 8), prompts)
def test_p14_a_look_tells_what_a_lock_would_take_out_of_what_is_evictable(
    size: int, cached: list[list[int]], held: int, prompt: list[int]
) -> None:
    c = RadixCache(size)
    for tokens in cached:
        c.insert(tokens)
    if held < len(cached):
        c.lock(c.match_prefix(cached[held]).node)
    facts = dump(c), c.clock, vars(c.stats).copy(), len(c.queue.heap)
    node, length = c.peek(prompt)
    part = c.evictable_part(node, length)
    assert (dump(c), c.clock, vars(c.stats), len(c.queue.heap)) == facts
    evictable = c.evictable_size
    match = c.match_prefix(prompt)
    c.lock(match.node)
    assert match.length == length
    assert evictable - c.evictable_size == part


def test_p14_a_request_that_waits_looks_and_counts_nothing() -> None:
    w = World(pages=6, page_size=2)
    w.run([1, 2, 3, 4])
    runs = w.start([1, 2, 9, 9, 9, 9, 9, 9])
    w.compute(runs)
    counted = vars(w.cache.stats).copy()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(25):
        node, length = w.cache.peek(prompt[:-1])
        room = w.allocator.available_size() + w.cache.evictable_size
        room -= w.cache.evictable_part(node, length)
        assert (length, room) == (4, 2)
        assert len(prompt) - length > room
    assert vars(w.cache.stats) == counted
    w.finish(runs)
    node, length = w.cache.peek(prompt[:-1])
    room = w.allocator.available_size() + w.cache.evictable_size
    assert room - w.cache.evictable_part(node, length) == 8
    r = w.start(prompt)
    assert r is not None
    assert w.compute(r)
    w.check()


def test_every_refusal_is_an_error_of_ours(w: World) -> None:
    r = Req([1, 2], row=99)
    for call in (
        lambda: w.cache.insert(BRANCH, 5),
        lambda: w.cache.cache_finished(r),
        lambda: w.cache.evict("3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(Error):
            call()
