"""check() finds each corruption that was planted, and says where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefix_world import World

from minikv.errors import StateError
from minikv.prefix import RadixCache


@pytest.fixture
def w() -> World:
    w = World(pages=8, page_size=2)
    w.run([1, 2, 3, 4])
    w.run([1, 2, 5, 6])
    w.check()
    return w


def node(w: World, *key: int):
    (found,) = (n for n in w.cache.nodes() if n.key.tolist() == list(key))
    return found


def set_key(node, *tokens: int) -> None:
    node.data = np.array(tokens, np.int64).tobytes()
    node.length = len(tokens)


def set_slots(node, slots: torch.Tensor) -> None:
    node.stored = bytearray(slots.contiguous().numpy().data)


def test_b31a_the_same_slot_in_two_nodes(w: World) -> None:
    one, other = node(w, 3, 4), node(w, 5, 6)
    other.slots[:] = one.slots
    with pytest.raises(
        StateError, match=rf"slot {int(one.slots[0])} is in Node .*\[3, 4\].*\[5, 6\]"
    ):
        w.cache.check()


def test_b31b_a_size_that_is_off(w: World) -> None:
    w.cache.evictable_size += 1
    with pytest.raises(
        StateError,
        match=rf"evictable_size is 7, but its nodes \(ids .*{node(w, 3, 4).id}.*\) hold 6",
    ):
        w.cache.check()


def test_b31c_a_lock_under_an_unlocked_parent(w: World) -> None:
    leaf = node(w, 3, 4)
    leaf.lock_count = 1
    with pytest.raises(StateError, match=rf"Node {leaf.id} \[3, 4\].*1 locks under Node .* with 0"):
        w.cache.check()


def test_b31d_a_slot_both_cached_and_free(w: World) -> None:
    leaf = node(w, 3, 4)
    w.allocator.free(leaf.slots)
    slot = int(leaf.slots[0])
    with pytest.raises(
        StateError,
        match=rf"slot {slot} \(page {slot // 2}\) is both cached and free, in Node {leaf.id}",
    ):
        w.cache.check()


def test_a_page_that_nothing_holds(w: World) -> None:
    page = int(w.allocator.alloc(2)[0]) // 2
    with pytest.raises(StateError, match=rf"page {page}\) is neither free nor cached nor owned"):
        w.cache.check()
    w.cache.check(owned=[page * 2])
    w.cache.check(owned=torch.tensor([page * 2, page * 2 + 1]))
    r = w.start([9, 9])  # a request runs, so pages may be out
    w.cache.check()
    w.finish(r)


def test_pages_may_be_out_while_a_row_is_taken_or_a_node_is_locked(w: World) -> None:
    w.allocator.alloc(2)  # a page that nothing holds
    leaf = node(w, 3, 4)
    for hold, let_go in (
        (lambda: w.table.alloc(1), lambda: w.table.free([1])),
        (lambda: w.cache.lock(leaf), lambda: w.cache.unlock(leaf)),
    ):
        hold()
        w.cache.check()
        for owned in ([], torch.empty(0, dtype=torch.int64)):  # all that requests hold: nothing
            with pytest.raises(StateError, match="neither free nor cached nor owned"):
                w.cache.check(owned=owned)
        let_go()
        with pytest.raises(StateError, match="neither free nor cached nor owned"):
            w.cache.check()


def test_a_page_that_begins_inside_another() -> None:
    w = World(pages=8, page_size=4)
    w.run([1, 2, 3, 4])
    leaf = node(w, 1, 2, 3, 4)
    for first in (5, 6, 7):  # neighbouring slots, but of two pages
        set_slots(leaf, torch.arange(first, first + 4))
        with pytest.raises(StateError, match=rf"slots \[{first}, .* are not one page"):
            w.cache.check()
    set_slots(leaf, torch.arange(4, 8))
    w.cache.check()


def test_a_slot_both_owned_and_cached_or_free(w: World) -> None:
    leaf = node(w, 5, 6)
    with pytest.raises(
        StateError, match=rf"slot {int(leaf.slots[0])} .*both cached and owned by a request"
    ):
        w.cache.check(owned=[leaf.slots])
    free = int(w.allocator.free_pages[0])
    with pytest.raises(StateError, match=rf"page {free}\) is both owned by a request and free"):
        w.cache.check(owned=[2 * free])


@pytest.mark.parametrize("slot", [99, -3, 0, 18])
def test_owned_slots_outside_the_pool_are_named(w: World, slot: int) -> None:
    for owned in ([slot], torch.tensor([slot])):
        with pytest.raises(StateError, match=rf"owned slot {slot} is outside"):
            w.cache.check(owned=owned)
    w.cache.check(owned=[])


def test_nodes_in_the_wrong_place(w: World) -> None:
    top, leaf = node(w, 1, 2), node(w, 3, 4)
    set_key(leaf, 8, 4)
    with pytest.raises(StateError, match=r"\[8, 4\].*not its first page"):
        w.cache.check()
    set_key(leaf, 3, 4)
    leaf.namespace = "a"
    with pytest.raises(StateError, match=r"\[3, 4\] in 'a'.*another namespace"):
        w.cache.check()
    leaf.namespace = None
    leaf.parent = w.cache.root
    with pytest.raises(StateError, match=r"\[3, 4\].*but its parent is Node 0"):
        w.cache.check()
    leaf.parent = top
    w.cache.check()


def test_keys_and_slots_that_are_not_pages(w: World) -> None:
    leaf = node(w, 3, 4)
    good = leaf.slots.clone()
    set_slots(leaf, good[:1])
    with pytest.raises(StateError, match=r"\[3, 4\].*1 slots for 2 tokens"):
        w.cache.check()
    set_slots(leaf, good.flip(0))
    with pytest.raises(StateError, match=rf"Node {leaf.id}.*are not one page"):
        w.cache.check()
    set_slots(leaf, good + 100)
    with pytest.raises(StateError, match="outside the allocator's pages"):
        w.cache.check()
    set_slots(leaf, good)
    set_key(leaf, 3, 4, 5)
    with pytest.raises(StateError, match="not whole pages of 2"):
        w.cache.check()


def test_a_leaf_that_could_never_be_evicted(w: World) -> None:
    w.cache.queue.heap.clear()
    with pytest.raises(StateError, match="the eviction queue does not know"):
        w.cache.check()


@pytest.mark.parametrize("policy", ["priority", "lru", "mru"])
def test_a_leaf_whose_rank_was_lowered_by_hand(policy: str) -> None:
    c = RadixCache(page_size=1, eviction=policy)
    c.insert([1], priority=2)
    c.insert([2], priority=2)
    c.check()
    leaf = next(c.nodes())
    name, by = {"priority": ("priority", -1), "lru": ("last_use", -1), "mru": ("last_use", 9)}[
        policy
    ]
    setattr(leaf, name, getattr(leaf, name) + by)
    with pytest.raises(StateError, match=rf"Node {leaf.id} .*puts too late"):
        c.check()


def test_a_negative_lock_and_an_unlocked_root() -> None:
    c = RadixCache(page_size=1)
    c.insert([1])
    next(c.nodes()).lock_count = -1
    with pytest.raises(StateError, match="-1 locks"):
        c.check()
    next(c.nodes()).lock_count = 0
    c.root.lock_count = 0
    with pytest.raises(StateError, match="root is always locked"):
        c.check()
