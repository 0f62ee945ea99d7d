from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_tree import dump
from prefix_world import Req, World

from minikv.errors import ArgumentError, StateError
from minikv.memory import PagedAllocator, RequestTable
from minikv.prefix import RadixCache


def test_a_chunk_goes_to_the_tree_and_the_tail_stays() -> None:
    w = World(pages=4, page_size=4)
    r = w.start([1, 2, 3, 4, 5, 6])
    w.chunk(r)
    assert (r.protected_len, r.node.key.tolist(), r.node.lock_count) == (4, [1, 2, 3, 4], 1)
    assert w.cache.protected_size == 4
    w.check()
    w.finish(r)
    assert (r.row, r.node, r.protected_len) == (0, None, 0)
    assert (w.cache.evictable_size, w.allocator.available_size(), w.table.available_size()) == (
        4,
        12,
        8,
    )
    w.check()


def test_twice_changes_nothing() -> None:
    w = World(pages=4, page_size=2)
    r = w.start([1, 2, 3, 4, 5])
    w.chunk(r)
    before = dump(w.cache), w.allocator.free_pages.tolist(), w.table.table.tolist(), vars(r).copy()
    w.cache.cache_unfinished(r)
    assert (
        dump(w.cache),
        w.allocator.free_pages.tolist(),
        w.table.table.tolist(),
        vars(r),
    ) == before
    w.finish(r)
    before = dump(w.cache), w.allocator.free_pages.tolist()
    w.cache.cache_finished(r)
    w.cache.cache_unfinished(r)
    assert (dump(w.cache), w.allocator.free_pages.tolist()) == before
    w.check()


def test_duplicates_are_freed_but_never_what_was_matched() -> None:
    w = World(pages=8, page_size=2)
    w.run([1, 2])
    a, b = w.start([1, 2, 3, 4, 5, 6]), w.start([1, 2, 3, 4, 7])
    w.compute(a), w.compute(b)
    free = w.allocator.available_size()
    w.cache.cache_unfinished(a)
    assert w.allocator.available_size() == free
    w.cache.cache_unfinished(b)  # [3, 4] twice: b's own page comes back
    assert w.allocator.available_size() == free + 2
    assert w.row(b)[:4] == w.row(a)[:4]
    assert b.protected_len == 4
    w.check()
    w.finish(a), w.finish(b)
    w.check()


def test_request_calls_count_only_what_the_request_did_not_bring_or_match() -> None:
    w = World(pages=16, page_size=1)
    w.run([1, 2])
    hits = {tuple(n.key.tolist()): n.hit_count for n in w.cache.nodes()}
    assert hits == {(1, 2): 0}
    r = w.start([1, 2, 3, 4, 5])  # one lookup of [1, 2, 3, 4]
    w.chunk(r, 2)
    w.chunk(r, 1)
    w.finish(r)
    assert [n.hit_count for n in w.cache.nodes()] == [1, 0, 0]
    a, b = w.start([9, 8, 7]), w.start([9, 8, 6])
    w.chunk(a)
    w.chunk(b)  # passes [9, 8], which A brought: that is a use
    assert {tuple(n.key.tolist()): n.hit_count for n in w.cache.nodes()}[9, 8] == 1


def test_what_is_reserved_past_the_tokens_is_freed_too() -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4, 5])
    w.chunk(r, 3)
    w.reserve(r, 6)
    assert w.allocator.available_size() == 6
    w.finish(r)
    assert w.allocator.available_size() == 14
    assert w.cache.total_size == 2
    w.check()
    again = w.start([7, 7])  # the same row: nothing of the old request is taken for a reservation
    w.compute(again, 1)
    w.finish(again)
    w.check()


def test_the_last_sampled_token_is_not_cached() -> None:
    w = World(pages=4, page_size=1)
    r = w.start([1, 2])
    w.compute(r)
    r.token_ids.append(3)  # sampled, no K and V
    w.finish(r)
    assert w.cache.match_prefix([1, 2, 3]).length == 2


def test_a_lost_lock_is_noticed() -> None:
    w = World(pages=4, page_size=1)
    r = w.start([1, 2, 3, 4])
    w.chunk(r, 2)
    w.cache.unlock(r.node)
    w.cache.evict(2)
    w.compute(r, 1)
    with pytest.raises(RuntimeError, match="keep its node locked"):
        w.cache.cache_unfinished(r)


@pytest.mark.parametrize("node", [None, 3, "node"])
def test_p08_what_is_no_node_is_not_locked(node) -> None:
    cache = RadixCache(2)
    for call in (cache.lock, cache.unlock):
        with pytest.raises(ArgumentError, match=f"^node={node!r}: is not a node; pass the `node`"):
            call(node)


def _foreign(w: World, r: Req) -> None:
    other = RadixCache(2)
    other.insert([1, 2])
    r.node = other.match_prefix([1, 2]).node
    other.lock(r.node)


def _evicted(w: World, r: Req) -> None:
    w.cache.insert([9, 9])
    r.node = w.cache.match_prefix([9, 9]).node
    w.cache.evict(2)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_foreign, "another tree"),
        (_evicted, "keep its node locked"),
        (
            lambda w, r: setattr(r, "node", w.cache.root) or w.cache.unlock(w.cache.root),
            "keep its node locked",
        ),
        (lambda w, r: setattr(r, "row", -1), "row=-1"),
        (lambda w, r: setattr(r, "row", 5), "row=5: is not in use"),
        (lambda w, r: setattr(r, "row", 99), "row=99"),
        (lambda w, r: setattr(r, "computed", -1), "computed=-1"),
        (lambda w, r: setattr(r, "computed", 6), "computed=6"),
        (lambda w, r: setattr(r, "computed", 65), "computed=65"),
        (lambda w, r: setattr(r, "protected_len", -2), "protected_len=-2"),
    ],
)
def test_a_request_that_cannot_end_changes_nothing(spoil, error: str) -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4, 5])
    w.compute(r)
    spoil(w, r)

    def state() -> tuple:
        held = w.allocator.page_is_held.tolist(), w.table.table.tolist(), w.table.available_size()
        return dump(w.cache), *held, {**vars(r), "node": id(r.node)}

    before = state()
    calls = [w.cache.cache_finished]
    if r.computed > r.protected_len >= 0:  # else there is nothing to store
        calls.append(w.cache.cache_unfinished)
    for call in calls:
        with pytest.raises((ArgumentError, StateError), match=error):
            call(r)
        assert state() == before


def test_a_request_may_refuse_to_be_cached() -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4, 5], cache=False)
    for _ in range(2):
        w.chunk(r, 2)
    w.finish(r)
    assert w.cache.total_size == 0
    assert w.allocator.available_size() == 16
    w.run([1, 2, 3, 4, 5])
    r = w.start([1, 2, 3, 4, 5, 6, 7])
    r.cache = False  # decided later, such as for broken logits
    w.compute(r)
    w.finish(r)
    assert w.cache.total_size == 4
    w.check()


def test_without_table_and_allocator_requests_only_grow_the_tree() -> None:
    c = RadixCache(page_size=2)
    r = Req([1, 2, 3, 4, 5], computed=5)
    c.cache_unfinished(r)
    assert (r.protected_len, c.protected_size) == (4, 4)
    c.cache_finished(r)
    assert (r.node, c.evictable_size) == (None, 4)


def test_priority_of_a_request_goes_to_its_nodes() -> None:
    w = World(pages=4, page_size=1, eviction="priority")
    r = w.start([1])
    r.priority = 5
    w.compute(r)
    w.finish(r)
    assert [n.priority for n in w.cache.nodes()] == [5]


@pytest.mark.gpu
def test_on_a_gpu_the_tree_holds_device_slots_and_does_the_same() -> None:
    worlds = [World(pages=24, page_size=4, device=device) for device in ("cpu", "cuda")]
    for w in worlds:
        rng = np.random.default_rng(0)
        for _ in range(60):
            a, b = (
                w.start([1, *rng.integers(0, 2, rng.integers(1, 14)).tolist()]) for _ in range(2)
            )
            w.chunk(a, 1), w.chunk(b, 1), w.chunk(a), w.chunk(b)
            w.check()
            w.finish(a), w.finish(b)
        w.check()
    cpu, gpu = worlds
    assert dump(cpu.cache) == dump(gpu.cache)
    assert cpu.cache.stats == gpu.cache.stats
    assert gpu.cache.match_prefix([1, 0, 1, 0, 1]).slots.device.type == "cuda"
    assert all(n.slots.device.type == "cuda" for n in gpu.cache.nodes())


def test_the_new_node_is_locked_before_the_old_one_is_unlocked() -> None:
    w = World(pages=8, page_size=2)
    r = w.start([1, 2, 3, 4, 5, 6, 7])
    w.chunk(r, 4)
    w.compute(r)
    with w.cache.record() as recorder:
        w.cache.cache_unfinished(r)
    assert [event.kind for event in recorder.events] == ["insert", "lock", "unlock"]
    assert all(frame.tree.protected_size >= 4 for frame in recorder.frames)


# ---- faults


@pytest.mark.parametrize("how", ["disable", "request"])
def test_b36_progress_goes_on_when_nothing_is_cached(how: str) -> None:
    w = World(pages=5, page_size=2, disable=how == "disable")
    r = w.start(list(range(1, 11)), cache=how != "request")
    starts = []
    for n in (4, 4, 2):
        starts.append(r.computed)
        w.chunk(r, n)
    assert starts == [0, 4, 8]
    assert len(set(w.row(r))) == 10
    assert w.allocator.available_size() == 0
    assert w.cache.total_size == 0
    w.finish(r)
    assert w.allocator.available_size() == 10
    assert w.table.available_size() == 8
    w.check()


def test_b38_an_abort_in_mid_prefill_leaves_its_chunk_in_the_tree_or_free() -> None:
    w = World(pages=8, page_size=4)
    r = w.start(list(range(1, 13)))
    w.chunk(r, 4)
    page = w.row(r)[0] // 4
    w.finish(r)
    w.check()
    assert not w.allocator.is_free([page])[0]
    b, c = w.start([1, 2, 3, 4, 9]), w.start([7, 7, 7, 7, 7])
    assert (b.computed, c.computed) == (4, 0)
    w.compute(b), w.compute(c)
    assert page not in (torch.tensor(w.row(c)) // 4).tolist()
    w.check()


@pytest.mark.gpu
def test_a_request_ends_without_waiting_for_the_device() -> None:
    allocator, table = PagedAllocator(64, 4, device="cuda"), RequestTable(2, 32, device="cuda")
    cache = RadixCache(4, allocator, table)
    for tail in (7, 8):  # the second one finds pages that the first one left
        tokens = np.array([*range(9), tail])
        match = cache.match_prefix(tokens[:-1])
        r = SimpleNamespace(
            token_ids=tokens, computed=10, row=table.alloc(1)[0], node=match.node, namespace=None
        )
        r.protected_len = match.length
        cache.lock(match.node)
        last = match.slots[-1:] if match.length else torch.tensor([-1], device="cuda")
        new = allocator.alloc_extend(
            torch.tensor([match.length]), torch.tensor([13]), last, 13 - match.length
        )
        table.write(
            [r.row], [0], [13], torch.cat([match.slots, new])
        )  # three more slots are reserved
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cache.cache_finished(r)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    cache.check(owned=())
    assert allocator.available_size() + cache.evictable_size == 64
