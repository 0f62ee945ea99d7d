from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tree import PlainTree, dump
from prefix_world import World

from minikv.errors import ArgumentError
from minikv.prefix import RadixCache


def test_the_longest_prefix_in_whole_pages() -> None:
    c = RadixCache(page_size=4)
    assert c.insert(range(1, 11), torch.arange(8, 18)) == 0
    m = c.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert (m.length, m.slots.tolist(), m.slots.dtype) == (8, list(range(8, 16)), torch.int64)
    assert c.match_prefix([1, 2, 3, 4, 5, 6, 7]).length == 4
    assert c.match_prefix([1, 2, 3]).length == 0
    assert c.total_size == c.evictable_size == 8


def test_insert_says_what_was_there_and_owns_the_rest() -> None:
    c = RadixCache(page_size=2)
    c.insert([1, 2, 3, 4], [20, 21, 22, 23])
    slots = torch.tensor([30, 31, 32, 33, 34, 35, 36])
    assert c.insert([1, 2, 3, 4, 5, 6, 7], slots) == 4
    slots.zero_()  # the caller's memory: the tree has its own copy
    assert c.match_prefix([1, 2, 3, 4, 5, 6, 7]).slots.tolist() == [20, 21, 22, 23, 34, 35]


def test_split_keeps_the_lower_half_and_copies_the_counts_up() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3, 4], priority=3)
    (node,) = c.nodes()
    c.lock(node)
    c.match_prefix([1, 2, 3, 4])
    birth, use = node.birth, node.last_use
    upper = c.match_prefix([1, 2]).node
    assert node.parent is upper
    assert node.key.tolist() == [3, 4]
    assert upper.key.tolist() == [1, 2]
    assert (upper.lock_count, upper.birth, upper.priority) == (1, birth, 3)
    assert (node.hit_count, upper.hit_count) == (1, 2)
    assert node.last_use == use < upper.last_use
    assert c.stats.splits == 1
    c.unlock(node)
    c.check()
    assert c.protected_size == 0


def test_slots_inside_one_node_are_not_copied() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3, 4])
    (node,) = c.nodes()
    assert c.match_prefix([1, 2, 3, 4]).slots.data_ptr() == node.slots.data_ptr()


def test_a_match_outlives_splits_and_evictions_of_its_node() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3, 4], [5, 6, 7, 8])
    m = c.match_prefix([1, 2, 3, 4])
    c.match_prefix([1, 2])
    c.evict(4)
    assert m.slots.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32), lambda x: x[::1]]
)
def test_tokens_of_any_kind(kind) -> None:
    c = RadixCache(page_size=2)
    c.insert(kind([1, 2, 3, 4]), kind([4, 5, 6, 7]))
    strided = np.array([1, 0, 2, 0, 3, 0, 4, 0])[::2]
    assert c.match_prefix(kind([1, 2, 3, 4])).length == c.match_prefix(strided).length == 4


def test_ids_beyond_32_bits_are_told_apart() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2**40, -7])
    assert c.match_prefix([1, 2**40, -7]).length == 3
    assert c.match_prefix([1, 0, -7]).length == 1


@pytest.mark.parametrize(
    "tokens",
    [
        *([1.5], [[1, 2]], ["a"], np.array([True]), [[1], [1, 2]], 5, None, [None], "abc", 1.5),
        *(
            [2**63],
            [1, 2**64],
            np.array([2**64 - 1], np.uint64),
            torch.tensor([2**63], dtype=torch.uint64),
        ),
        *(torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.tensor(3)),
    ],
)
def test_other_tokens_are_refused(tokens) -> None:
    c = RadixCache(page_size=1)
    for call in (c.match_prefix, c.insert, c.peek):
        with pytest.raises(ArgumentError, match=r"^tokens="):
            call(tokens)
    assert c.total_size == c.stats.lookups == 0
    assert c.insert(np.array([2**63 - 1], np.uint64)) == 0


def test_bad_arguments_name_the_remedy() -> None:
    for page_size in (0, 2.0, "2", None):
        with pytest.raises(ArgumentError, match="page_size"):
            RadixCache(page_size)
    with pytest.raises(ArgumentError, match="lru, lfu"):
        RadixCache(page_size=1, eviction="random")
    with pytest.raises(ArgumentError, match="slots"):
        RadixCache(page_size=1).insert([1, 2, 3], [1, 2])
    with pytest.raises(ArgumentError, match="page_size"):
        RadixCache(2, World(pages=2, page_size=4).allocator)


def test_without_slots_fresh_pages_are_numbered_or_taken_from_the_allocator() -> None:
    c = RadixCache(page_size=2)
    c.insert([1, 2, 3, 4])
    c.insert([1, 2, 5, 6])
    assert c.match_prefix([1, 2, 5, 6]).slots.tolist() == [2, 3, 6, 7]
    w = World(pages=4, page_size=2)
    w.cache.insert([1, 2, 3, 4])
    w.cache.insert([1, 2, 5, 6])
    assert w.allocator.available_size() == 2
    w.cache.check()


def test_counters() -> None:
    c = RadixCache(page_size=2)
    c.insert([1, 2, 3, 4])
    c.match_prefix([1, 2, 9, 9, 9])
    c.match_prefix([])
    c.evict(2)
    s = c.stats
    assert (s.lookups, s.hit_tokens, s.miss_tokens, s.inserted, s.evicted, s.splits) == (
        2,
        2,
        3,
        4,
        2,
        1,
    )
    assert s.hit_rate == 0.4


def test_peek_counts_nothing() -> None:
    c = RadixCache(page_size=2)
    c.insert([1, 2, 3, 4])
    before = dump(c), c.clock
    node, length = c.peek([1, 2, 3, 9])
    assert (length, node.key.tolist()) == (2, [1, 2, 3, 4])
    assert c.peek([7, 7]) == (c.root, 0)
    assert (dump(c), c.clock) == before
    assert c.stats.lookups == 0


def test_disabled_keeps_and_finds_nothing() -> None:
    w = World(pages=4, page_size=2, disable=True)
    slots = w.allocator.alloc(4)
    assert w.cache.insert([1, 2, 3, 4], slots) == 0
    m = w.cache.match_prefix([1, 2, 3, 4])
    assert (m.length, m.node, m.slots.tolist(), m.slots.dtype) == (0, w.cache.root, [], torch.int64)
    assert w.allocator.available_size() == 8
    assert w.cache.stats.miss_tokens == 4


def test_a_disabled_insert_leaves_the_tail_with_the_caller() -> None:
    w = World(pages=4, page_size=2, disable=True)
    slots = w.allocator.alloc(6)
    assert w.cache.insert([1, 2, 3, 4, 5], slots) == 0
    assert w.allocator.is_free(slots[::2] // 2).tolist() == [True, True, False]
    w.cache.check(owned=slots[4:])
    w.allocator.free(slots[4:])
    w.cache.check()


def test_reset_gives_everything_back() -> None:
    w = World(pages=4, page_size=2)
    w.run([1, 2, 3, 4])
    node = w.cache.match_prefix([1, 2]).node
    w.cache.lock(node)
    with pytest.raises(RuntimeError, match="locks are held"):
        w.cache.reset()
    w.cache.unlock(node)
    w.cache.reset()
    assert w.allocator.available_size() == 8
    assert w.cache.total_size == 0
    assert w.cache.stats.lookups == 0
    w.check()


def test_a_deep_chain_needs_no_recursion() -> None:
    c = RadixCache(page_size=1)
    tokens = np.arange(1500)
    for n in range(1, 1501):
        c.insert(tokens[:n])
    node = c.match_prefix(tokens).node
    c.lock(node)
    c.unlock(node)
    c.check()
    assert c.evict(1500) == 1500


# ---- faults


def test_b11_prompts_shorter_than_a_page() -> None:
    w = World(pages=4, page_size=4)
    c = w.cache
    c.insert([7, 8, 9, 10])
    for tokens in ([7, 8], []):
        m = c.match_prefix(tokens)
        assert (m.length, m.node, len(m.slots)) == (0, c.root, 0)
    assert c.insert([7, 8]) == 0
    w.run([1, 2, 3])
    assert [n.key.tolist() for n in c.nodes()] == [[7, 8, 9, 10]]
    assert w.allocator.available_size() == 12
    w.check()


@pytest.mark.parametrize(("page_size", "cached"), [(4, 4), (1, 7)])
def test_b13_a_prompt_cached_entirely_still_computes_a_token(page_size: int, cached: int) -> None:
    w = World(pages=16 // page_size, page_size=page_size)
    prompt = list(range(1, 9))
    assert w.run(prompt) == 0
    assert w.cache.match_prefix(prompt).length == 8  # the tree returns whatever it has
    assert w.run(prompt) == cached  # a caller that needs logits matches all but one
    w.check()


def test_b14_the_second_of_two_equal_prompts_reads_the_first_ones_pages() -> None:
    w = World(pages=6, page_size=2)
    a, b = w.start([1, 2, 3, 4]), w.start([1, 2, 3, 4])
    w.compute(a), w.compute(b)
    w.cache.cache_unfinished(a), w.cache.cache_unfinished(b)
    assert w.row(b) == w.row(a)
    assert not w.allocator.is_free(torch.tensor(w.row(b)) // 2).any()
    w.check()
    c = w.start([5, 6, 7, 8])
    w.compute(c)
    b.token_ids.append(5)
    w.compute(b)
    w.check()  # B still reads tokens 1 to 4


def test_b16_what_was_evicted_is_not_found() -> None:
    w = World(pages=2, page_size=2)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        w.run(prompt)
    assert w.cache.match_prefix([1, 2, 7]).length == 0
    assert sorted(n.key.tolist() for n in w.cache.nodes()) == [[3, 4], [5, 6]]
    w.check()
    c = RadixCache(page_size=2)
    c.insert([1, 2])
    c.insert([1, 2, 3, 4])
    c.evict(1)
    assert [(n.key.tolist(), n.children) for n in c.nodes()] == [([1, 2], {})]
    assert c.evict(1) == 2  # the parent is a leaf now


def test_b17_children_are_filed_under_their_own_first_page() -> None:
    c = RadixCache(page_size=2)
    for call in (
        lambda: c.insert([1, 2, 3, 4]),
        lambda: c.insert([1, 2, 5, 6]),
        lambda: c.match_prefix([1, 2, 3, 9]),
    ):
        call()
        c.check()
        for parent in (c.root, *c.nodes()):
            for key, child in parent.children.items():
                assert key == child.key[:2].tobytes()
    assert c.evict(100) == 6
    assert c.total_size == 0


# ---- against the plain tree

prompts = st.lists(st.integers(0, 2), max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3]),
    st.lists(st.tuples(st.booleans(), prompts, st.sampled_from([None, "a"])), max_size=12),
)
def test_any_calls_build_the_tree_that_the_plain_one_builds(page_size: int, calls) -> None:
    c, plain = RadixCache(page_size), PlainTree(page_size)
    for i, (insert, tokens, space) in enumerate(calls):
        slots = list(range(100 * i, 100 * i + len(tokens)))
        if insert:
            assert c.insert(tokens, slots, space) == plain.insert(tokens, slots, space)[0]
        else:
            peeked = c.peek(tokens, space)[1]
            m = c.match_prefix(np.array(tokens, np.int64), space)
            node, length = plain.find(tokens, space)
            assert m.length == peeked == length
            assert len(m.slots) == length
            assert m.slots.tolist()[length - len(node.slots) :] == node.slots
        assert dump(c) == plain.dump()
        assert c.evictable_size == sum(len(n.tokens) for n in plain.nodes())
