from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plain_tree import dump
from prefix_world import World

from minikv.prefix import RadixCache
from minikv.prefix.eviction import RANKS


def facts(c: RadixCache) -> tuple:
    """All there is to know of a tree."""
    nodes = [(n.id, n.parent.id, n.last_use, n.birth, n.hit_count, n.priority) for n in c.nodes()]
    return (
        dump(c),
        nodes,
        c.clock,
        replace(c.stats),
        c.evictable_size,
        c.protected_size,
        c.root.lock_count,
    )


def test_each_kind_of_event() -> None:
    c = RadixCache(page_size=2)
    with c.record() as recorder:
        c.insert([1, 2, 3, 4], [2, 3, 4, 5], namespace="a", priority=2)
        node = c.match_prefix([1, 2, 9], namespace="a").node
        c.lock(node)
        c.unlock(node)
        c.evict(2)
        c.reset()
    c.insert([5, 6])  # no longer recorded
    kinds = [e.kind for e in recorder.events]
    assert kinds == ["insert", "split", "match", "lock", "unlock", "evict", "evict", "reset"]
    insert, split, match, *_, evict, _, _ = recorder.events
    assert (insert.tokens, insert.slots, insert.length, insert.namespace) == (
        (1, 2, 3, 4),
        (2, 3, 4, 5),
        0,
        "a",
    )
    assert (split.node, split.length) == (insert.node, 2)
    assert (match.node, match.length, match.tokens) == (node.id, 2, (1, 2, 9))
    assert (evict.node, evict.tokens, evict.length) == (insert.node, (3, 4), 2)


@pytest.mark.parametrize("policy", RANKS)
def test_replayed_events_give_the_same_tree_at_every_step(policy: str) -> None:
    w = World(pages=20, page_size=2, eviction=policy)
    rng = np.random.default_rng(3)
    w.run([1, 2, 1, 2, 0])  # recording starts on a tree that is not empty, with a lock held
    held = w.start([1, 2, 1])
    seen = []
    with w.cache.record() as recorder:
        for _ in range(40):
            w.run(
                rng.integers(0, 3, rng.integers(1, 9)).tolist(),
                [None, "a", 1, True][rng.integers(4)],
            )
            seen.append((len(recorder.events), facts(w.cache)))
        w.finish(held)
        w.cache.evict(4)
    assert {"insert", "split", "match", "lock", "unlock", "evict"} <= {
        e.kind for e in recorder.events
    }
    frames = recorder.frames
    assert len(frames) == len(recorder.events) + 1
    assert frames[0].event is None
    assert [f.event for f in frames[1:]] == recorder.events
    for count, then in seen:
        assert facts(frames[count].tree) == then
    assert facts(recorder.replay()) == facts(w.cache)
    for frame in frames:
        frame.tree.check()


def test_a_replayed_tree_numbers_pages_that_nothing_holds() -> None:
    cache = RadixCache(2)
    cache.insert([1, 2, 3, 4])
    with cache.record() as recorder:
        cache.insert([5, 6])
    copy = recorder.replay()
    copy.insert([7, 8])
    cache.insert([7, 8])
    copy.check()
    assert (
        copy.match_prefix([7, 8]).slots.tolist()
        == cache.match_prefix([7, 8]).slots.tolist()
        == [8, 9]
    )
    for frame in recorder.frames:
        frame.tree.insert([7, 8])
        frame.tree.check()


def test_a_copy_of_a_tree_with_an_allocator_numbers_pages_after_its_own() -> None:
    w = World(pages=8, page_size=2)
    w.run([1, 2, 3, 4])
    with w.cache.record() as recorder:
        w.run([1, 2, 5, 6])
    copy = recorder.replay()
    copy.insert([7, 8])
    copy.check()


def test_pages_numbered_beside_given_slots_do_not_collide() -> None:
    cache = RadixCache(2)
    cache.insert([1, 2], [4, 5])
    cache.insert([3, 4])
    cache.insert([5, 6])
    cache.check()


def test_copies_keep_priorities() -> None:
    c = RadixCache(page_size=1, eviction="priority")
    c.insert([1, 2], priority=3)
    c.insert([4, 5], priority=-1)
    c.insert([6])
    with c.record() as recorder:
        c.match_prefix([1])  # halves of one priority
    for frame, count in zip(recorder.frames, (3, 4, 4), strict=True):
        kept = {tuple(node.key.tolist()): node.priority for node in frame.tree.nodes()}
        assert len(kept) == count
        assert {kept.pop((4, 5)), kept.pop((6,))} == {-1, 0}
        assert set(kept.values()) == {3}
    copy = recorder.replay()
    assert copy.evict(1) == 2
    assert copy.match_prefix([4, 5]).length == 0


def test_a_replayed_tree_that_keeps_nothing_keeps_nothing() -> None:
    cache = RadixCache(1, disable=True)
    with cache.record() as recorder:
        cache.insert([1])
    copy = recorder.replay()
    copy.insert([1, 2])
    assert copy.disable
    assert copy.match_prefix([1, 2]).length == 0


def test_replaying_records_the_same_events() -> None:
    c = RadixCache(page_size=1)
    with c.record() as first, c.record() as same:
        c.insert([1, 2, 3])
        c.insert([1, 2, 4])
    assert first.events == same.events
    replayed = first.replay()
    assert [n.slots.tolist() for n in replayed.nodes()] == [n.slots.tolist() for n in c.nodes()]
