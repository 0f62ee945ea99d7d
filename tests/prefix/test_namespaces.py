from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from prefix_world import World

from minikv.errors import ArgumentError
from minikv.prefix import RadixCache

DIFFERENT = [
    *(None, "", 1, 1.0, True, "1", b"1", 0, False, Fraction(1)),
    *((), (1,), (True,), ("1",), ((1,),), ("a", "bc"), ("ab", "c"), ("a", None), ("a", "")),
    *(frozenset({1}), frozenset({True})),
]


def test_equal_tokens_under_different_namespaces_never_share() -> None:
    c = RadixCache(page_size=2)
    for i, space in enumerate(DIFFERENT):
        assert c.insert([1, 2, 3, 4], range(4 * i, 4 * i + 4), namespace=space) == 0
    for i, space in enumerate(DIFFERENT):
        assert c.match_prefix([1, 2, 3, 4], space).slots.tolist() == list(range(4 * i, 4 * i + 4))
    c.check()
    assert c.evict(1000) == 4 * len(DIFFERENT)


def test_a_match_of_one_namespace_says_nothing_about_another() -> None:
    for one, other in combinations(DIFFERENT, 2):
        c = RadixCache(page_size=1)
        c.insert([1, 2], namespace=one)
        assert c.match_prefix([1, 2], other).length == 0, (one, other)
        assert c.match_prefix([1, 2], one).length == 2


def test_a_tuple_of_a_page_is_a_namespace_like_any_other() -> None:
    c = RadixCache(page_size=1)
    page = (1).to_bytes(8, "little")
    c.insert([1, 2], namespace=None)
    assert c.match_prefix([1, 2], (None, page)).length == 0
    assert c.match_prefix([1, 2], page).length == 0


def test_an_unhashable_namespace_is_refused() -> None:
    for space in ([1], ("a", [1])):
        with pytest.raises(ArgumentError, match="namespace"):
            RadixCache(page_size=1).match_prefix([1], space)


def test_splitting_and_evicting_the_first_node_of_a_namespace() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3], namespace="a")
    c.insert([1, 2, 4], namespace="a")
    c.insert([1, 2, 5])
    c.check()
    assert {n.namespace for n in c.nodes()} == {"a", None}
    assert c.match_prefix([1, 2, 3], "a").length == 3
    assert c.evict(100) == 7
    assert not c.root.children


# ---- faults


def test_b32_salt_and_adapter_are_not_joined_as_text() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3, 4], namespace=("ab", "c"))
    for salt, lora in (("a", "bc"), ("abc", None), (None, "abc"), ("abc", ""), ("", "abc")):
        assert c.match_prefix([1, 2, 3, 4], (salt, lora)).length == 0
    for whole in ("abc", ("abc",), None):
        assert c.match_prefix([1, 2, 3, 4], whole).length == 0
    assert c.match_prefix([1, 2, 3, 4], ("ab", "c")).length == 4


def test_b34_a_reloaded_adapter_starts_empty() -> None:
    c = RadixCache(page_size=1)
    c.insert([1, 2, 3, 4], namespace=("a", "load 1"))
    assert c.match_prefix([1, 2, 3, 4], ("a", "load 2")).length == 0
    assert c.evict(4) == 4


def test_b35_every_call_of_a_request_keeps_its_namespace() -> None:
    w = World(pages=12, page_size=2)
    prompt = list(range(1, 9))
    r = w.start(prompt, "A")
    w.chunk(r, 4)
    assert w.cache.match_prefix(prompt, "A").length == 4
    w.chunk(r, 4)
    w.finish(r)
    assert all(n.namespace == "A" for n in w.cache.nodes())
    assert w.run(prompt) == 0
    assert w.run(prompt, "A") == 6  # all but the page of the last token
    w.check()
