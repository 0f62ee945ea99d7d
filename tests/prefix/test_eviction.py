from __future__ import annotations

import functools
import gc
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tree import FIRST_OUT, PlainTree, dump
from prefix_world import World

from minikv.errors import StateError
from minikv.prefix import RadixCache
from minikv.prefix.eviction import RANKS


def evicted(c: RadixCache) -> list[list[int]]:
    """Keys in the order of eviction, one leaf at a time."""
    order = []
    while True:
        before = {n.id: n.key.tolist() for n in c.nodes()}
        if not c.evict(1):
            return order
        (gone,) = before.keys() - {n.id for n in c.nodes()}
        order.append(before[gone])


A, B, C = [1, 2], [3, 4], [5, 6]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [B, C, A]),  # last uses: B 2, C 4, A 5
        ("lfu", [B, C, A]),  # hits: B 0, C 1, A 1; C before A by recency
        ("fifo", [A, B, C]),
        ("mru", [A, C, B]),
        ("filo", [C, B, A]),
        ("priority", [B, A, C]),  # B 0, A 1, C 1; A before C by recency
    ],
)
def test_exact_order(policy: str, order: list[list[int]]) -> None:
    c = RadixCache(page_size=2, eviction=policy)
    c.insert(A, priority=1)
    c.insert(B)
    c.insert(C, priority=1)
    if policy == "priority":
        c.match_prefix(C)  # priorities are equal: A was used longer ago
    else:
        c.match_prefix(C)
        c.match_prefix(A)
    assert evicted(c) == order


@pytest.mark.parametrize("policy", RANKS)
def test_ties_go_by_birth_then_the_deeper_node_first(policy: str) -> None:
    c = RadixCache(page_size=1, eviction=policy)
    for tokens in ([1, 2, 3], [4], [5]):
        c.insert(tokens)
    c.match_prefix([1])  # halves [1] and [2, 3] of one birth
    for node in c.nodes():
        node.hit_count = node.last_use = 7  # what the policy looks at is equal (births are not)
    for heap_entry in list(c.queue.heap):
        c.queue.heap.remove(heap_entry)
        heap_entry[2].queued = False
        c.queue.push(heap_entry[2])
    expected = [[5], [4], [2, 3], [1]] if policy == "filo" else [[2, 3], [1], [4], [5]]
    assert evicted(c) == expected


def test_the_deeper_of_two_equal_entries_is_less() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3])
    c.match_prefix([1, 2])
    upper, lower = c.nodes()
    assert lower < upper
    assert not upper < lower
    assert not lower < lower


def test_reinserting_raises_the_priority_of_what_it_passes() -> None:
    c = RadixCache(page_size=2, eviction="priority")
    c.insert(A)
    c.insert(B, priority=1)
    c.insert(A, priority=2)
    assert evicted(c) == [B, A]


def test_a_parent_that_becomes_a_leaf_is_a_candidate_at_once() -> None:
    c = RadixCache(page_size=1)
    c.insert([1])
    c.insert([1, 2])
    c.insert([9])
    assert c.evict(2) == 2
    assert [n.key.tolist() for n in c.nodes()] == [[1]] or [n.key.tolist() for n in c.nodes()] == [
        [9]
    ]
    assert c.evict(5) == 1


def test_lock_moves_tokens_between_evictable_and_protected() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2])
    c.insert([1, 2, 3])
    leaf = c.match_prefix([1, 2, 3]).node
    c.lock(leaf), c.lock(leaf)
    assert (c.evictable_size, c.protected_size, c.total_size) == (0, 3, 3)
    c.unlock(leaf)
    assert c.protected_size == 3
    c.unlock(leaf)
    assert (c.evictable_size, c.protected_size) == (3, 0)


def test_the_root_is_always_locked() -> None:
    c = RadixCache(page_size=1)
    assert c.root.lock_count == 1
    with pytest.raises(RuntimeError, match="not locked"):
        c.unlock(c.root)
    c.lock(c.root)
    c.unlock(c.root)
    c.check()


def test_a_node_of_another_tree_can_be_neither_locked_nor_unlocked() -> None:
    mine, other = RadixCache(2), RadixCache(2)
    for tree in (mine, other):
        tree.insert([1, 2, 3, 4])
        tree.insert([1, 2, 5, 6])
    node = other.match_prefix([1, 2, 5, 6]).node
    other.lock(node)
    for call in (mine.lock, mine.unlock):
        for stranger in (node, other.root):
            with pytest.raises(StateError, match="tree"):
                call(stranger)
    assert (
        mine.protected_size,
        mine.evictable_size,
        other.protected_size,
        other.evictable_size,
    ) == (0, 6, 4, 2)
    assert (node.lock_count, other.root.lock_count) == (1, 2)
    other.unlock(node)
    mine.check()
    other.check()


def test_an_evicted_node_cannot_be_locked() -> None:
    c = RadixCache(page_size=1)
    c.insert([1])
    node = c.match_prefix([1]).node
    c.evict(1)
    with pytest.raises(RuntimeError, match="no longer in the tree"):
        c.lock(node)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(FIRST_OUT)), st.data())
def test_every_policy_evicts_what_a_scan_would(policy: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2]))
    c, plain, locks = RadixCache(size, eviction=policy), PlainTree(size, policy), []
    for i in range(data.draw(st.integers(1, 20))):
        tokens = data.draw(st.lists(st.integers(0, 2), max_size=8))
        kind = data.draw(st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]))
        if kind == "insert":
            slots, priority = list(range(100 * i, 100 * i + 8)), data.draw(st.integers(-1, 2))
            c.insert(tokens, slots, priority=priority)
            plain.insert(tokens, slots, priority=priority)
        elif kind == "evict":
            n = len(tokens)
            gone = plain.evict(n)
            assert c.evict(n) == sum(len(node.tokens) for node in gone)
        elif kind == "unlock" and locks:
            mine, theirs = locks.pop()
            c.unlock(mine)
            plain.lock(theirs, -1)
        else:
            mine, (theirs, _) = c.match_prefix(tokens).node, plain.find(tokens)
            if kind == "lock" and plain.root is not theirs:
                c.lock(mine)
                plain.lock(theirs)
                locks.append((mine, theirs))
        assert dump(c) == plain.dump()
        c.check()


def events_in(call) -> int:
    """Function calls made by `call`, C functions included."""
    count = 0

    def profile(frame, event, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # its callbacks would count
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("policy", RANKS)
def test_evict_costs_what_it_evicts_and_never_looks_at_the_tree(policy: str) -> None:
    def calls(leaves: int, evict: int) -> int:
        c = RadixCache(page_size=1, eviction=policy)
        for i in range(leaves):
            c.insert([i, 7])
        return events_in(lambda: c.evict(2 * evict))

    few, many = calls(300, 20), calls(6000, 20)
    assert many == few
    assert calls(300, 200) <= 10 * few


@functools.total_ordering
class Counted:
    """A rank that counts how often it is compared."""

    comparisons = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.comparisons += 1
        return self.value < other.value

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return isinstance(other, Counted) and self.value == other.value


def test_comparisons_grow_with_the_logarithm_of_the_leaves(monkeypatch) -> None:
    monkeypatch.setitem(RANKS, "lru", lambda node: Counted(node.last_use))
    per_leaf = {}
    for leaves in (256, 8192):
        c = RadixCache(page_size=1)
        for i in np.random.default_rng(0).permutation(leaves).tolist():
            c.insert([i])
        Counted.comparisons = 0
        c.evict(100)
        per_leaf[leaves] = Counted.comparisons / 100
    assert (
        per_leaf[8192] <= 4 * 13 + 4
    )  # about two comparisons (rank: equal? less?) per level, some more to sift back
    assert per_leaf[8192] < 2 * per_leaf[256]


@pytest.mark.parametrize("policy", RANKS)
def test_the_queue_does_not_grow_with_locks(policy: str) -> None:
    c = RadixCache(page_size=1, eviction=policy)
    for i in range(4):
        c.insert([i])
    nodes = list(c.nodes())
    for _ in range(500):
        for node in nodes:
            c.lock(node)
        for node in nodes:
            c.unlock(node)
    assert len(c.queue.heap) <= (100 if policy == "mru" else 4)
    assert c.evict(4) == 4


def test_each_correction_is_paid_for_by_a_use() -> None:
    c = RadixCache(page_size=1)
    for _ in range(2):
        for i in range(500):
            c.insert([i])  # the second time a use: every entry of the queue is now too early
    late = events_in(lambda: c.evict(1))
    assert events_in(lambda: c.evict(1)) < late / 50  # corrected once, not at each eviction
    assert [n.key.tolist() for n in c.nodes()] == [[i] for i in range(2, 500)]


def test_the_queue_of_mru_stays_small_however_often_leaves_are_used() -> None:
    c = RadixCache(page_size=1, eviction="mru")
    for i in range(10):
        c.insert([i])
    for i in range(5000):
        c.match_prefix([i % 10])
    assert len(c.queue.heap) <= 200
    c.check()
    assert evicted(c) == [[i] for i in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]


# ---- faults


def test_b19_locking_a_node_protects_it_and_its_parents() -> None:
    c = RadixCache(page_size=2)
    c.insert([1, 2])
    c.insert([1, 2, 3, 4])
    node = c.match_prefix([1, 2, 3, 4]).node
    c.lock(node)
    assert c.evict(4) == 0
    assert [n.lock_count for n in c.nodes()] == [1, 1]
    c.unlock(node)
    assert [n.lock_count for n in c.nodes()] == [0, 0]
    assert c.evictable_size == 4


def test_b21_sizes_survive_splitting_a_locked_node() -> None:
    c = RadixCache(page_size=1)

    def holds() -> None:
        c.check()
        assert c.evictable_size >= 0
        assert c.protected_size >= 0
        assert (
            c.evictable_size + c.protected_size
            == c.total_size
            == sum(len(n.key) for n in c.nodes())
        )

    c.insert([1, 2, 3])
    node = c.match_prefix([1, 2, 3]).node
    c.lock(node), holds()
    c.insert([1, 2, 4, 5]), holds()
    assert (c.protected_size, c.evictable_size) == (3, 2)
    c.unlock(node), holds()
    leaf = c.match_prefix([1, 2, 4, 5]).node
    c.lock(leaf), holds()
    assert c.protected_size == 4
    c.unlock(leaf), holds()
    assert c.protected_size == 0


def test_b22_a_stray_unlock_raises_and_changes_nothing() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3])
    node = c.match_prefix([1, 2, 3]).node
    with pytest.raises(RuntimeError, match=r"Node \d+ \[1, 2, 3\].*not locked"):
        c.unlock(node)
    c.lock(node)
    assert (c.protected_size, node.lock_count) == (3, 1)
    assert c.evict(3) == 0
    c.check()


def test_b24_every_use_counts_and_only_the_used_half_of_a_split() -> None:
    c = RadixCache(page_size=1, eviction="lfu")
    a, b = [1, 2, 3, 4], [9, 8, 7, 6]
    for tokens in (a, b, a, a):
        c.insert(tokens)
    c.match_prefix(b)
    assert c.evict(4) == 4
    assert [n.key.tolist() for n in c.nodes()] == [a]
    c.insert([1, 2, 5, 5])
    assert {tuple(n.key.tolist()): n.hit_count for n in c.nodes()} == {
        (1, 2): 3,
        (3, 4): 2,
        (5, 5): 0,
    }


@pytest.mark.parametrize("policy", RANKS)
def test_b25_the_order_never_depends_on_a_clock(policy: str, monkeypatch) -> None:
    for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns"):
        monkeypatch.setattr(f"time.{name}", lambda: 0)
    c = RadixCache(page_size=2, eviction=policy)
    for tokens in (A, B, C):
        c.insert(tokens)
    assert evicted(c) == ([C, B, A] if policy in ("mru", "filo") else [A, B, C])


def test_b27_a_small_eviction_takes_little() -> None:
    w = World(pages=6, page_size=1)
    c = w.cache
    for tokens in (A, B, C):
        c.insert(tokens)
    assert c.evict(0) == 0
    assert c.total_size == 6
    assert c.evict(2) == 2
    assert c.total_size == 4
    c.insert(A)
    assert c.evict(3) == 4
    assert c.total_size == 2
    assert w.allocator.available_size() == 4
    assert c.stats.evicted == 6
    w.check()


def test_b28_halves_of_a_split_keep_only_their_own_storage() -> None:
    c = RadixCache(page_size=1)
    tokens = np.arange(100_000)
    c.insert(tokens, torch.arange(100_000))
    for n in range(99_000, 0, -1000):
        c.match_prefix(tokens[:n])
    assert c.stats.splits == 99
    c.evict(99_000)
    (node,) = c.nodes()
    assert len(node.key) == len(node.slots) == 1000
    assert node.slots.untyped_storage().nbytes() == 8000
    assert c.match_prefix(tokens).slots.untyped_storage().nbytes() == 8000
    assert len(node.stored) == len(node.data) == 8000


def test_b30_what_a_request_matches_does_not_count_as_evictable_for_it() -> None:
    w = World(pages=5, page_size=1)
    w.run([1, 2])
    assert (w.allocator.available_size(), w.cache.evictable_size) == (3, 2)
    before = w.allocator.free_pages.tolist()
    r = w.start([1, 2, 3, 4, 5, 6])
    assert (r.computed, w.cache.evictable_size) == (2, 0)
    assert w.reserve(r, 4) is None  # 4 new pages, 3 to be had
    w.cache.unlock(r.node)
    w.table.free([r.row])
    w.running.remove(r)
    assert w.allocator.free_pages.tolist() == before
    assert all(n.lock_count == 0 for n in w.cache.nodes())
    w.check()
    r = w.start([1, 2, 3, 4, 5])
    assert w.compute(r, 3)
    w.check()
    w.finish(r)
