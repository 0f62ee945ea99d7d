"""Allocator, table and tree under many requests, step by step against the plain tree and the plain
lists of requests.

The CI run executes 2,000 rules; ``MINIKV_LONG_MACHINE=1 pytest tests/prefix/test_machine.py``
executes 200,000. Hypothesis ends many examples early, so the machine counts its rules itself and
stops at the last one.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plain_tree import FIRST_OUT, PlainNode, PlainTree, dump
from prefix_world import Req, World

LONG = os.environ.get("MINIKV_LONG_MACHINE") == "1"
RULES, STEPS = (10_000, 100) if LONG else (2_000, 50)
ROUNDS = 20 if LONG else 1  # of RULES rules each: Hypothesis keeps all that one of them drew
NAMESPACES = [None, None, None, "a", 1, True, ("a", 1)]
CHATS = [
    [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0],
    [0, 1, 2, 0, 1, 2, 2, 2, 1, 1, 0, 0, 2, 2, 1, 1],
    [1] * 16,
]
executed = 0
failed = False
happened: set[str] = set()

prompt = st.builds(
    lambda chat, n, end: chat[:n] + end,
    st.sampled_from(CHATS),
    st.integers(0, 16),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
namespaces = st.sampled_from(NAMESPACES)
which = st.integers(0, 100)


class Enough(BaseException):
    """All rules of a round were executed; no example after it is needed."""


class Server(RuleBasedStateMachine):
    """Every rule does the same to the world and, in plain lists, to the model of it."""

    @initialize(
        size=st.sampled_from([1, 2, 3, 4]),
        pages=st.sampled_from([2, 3, 5, 8, 11, 14, 20, 30]),
        rows=st.integers(1, 5),
        policy=st.sampled_from(sorted(FIRST_OUT)),
    )
    def build(self, size: int, pages: int, rows: int, policy: str) -> None:
        self.size, self.pages = size, pages
        self.world = World(pages, size, rows=rows, context=40, eviction=policy)
        self.plain = PlainTree(size, policy)
        self.ends: dict[Req, PlainNode] = {}  # where each request's lock is in the plain tree
        self.held = 0  # pages that requests hold themselves
        self.ready = False  # the first check follows this method, which is no rule

    # ---- the model's side of what several rules do

    def plain_store(self, r: Req) -> None:
        """What caching a request does to the model."""
        whole = r.computed - r.computed % self.size
        if not r.cache or whole <= r.protected_len:
            return
        tokens, slots = r.token_ids[:whole], self.world.row(r)[:whole]
        n, node = self.plain.insert(tokens, slots, r.namespace, known=r.protected_len)
        if n > r.protected_len:
            happened.add("duplicate")
        self.plain.lock(node)
        self.plain.lock(self.ends[r], -1)
        self.ends[r] = node

    def plain_make_room(self, r: Req, n: int) -> bool:
        """What getting `n` slots evicts; whether there are enough pages then."""
        new = -(-(r.computed + n) // self.size) - -(-r.computed // self.size)
        free = (
            self.pages
            - self.held
            - sum(len(node.tokens) for node in self.plain.nodes()) // self.size
        )
        if new > free:
            happened.add("evict")
            free += (
                sum(len(node.tokens) for node in self.plain.evict((new - free) * self.size))
                // self.size
            )
        return new <= free

    def count_pages(self) -> None:
        """Pages that requests hold themselves: of computed tokens that are not the tree's."""
        self.held = sum(
            -(-r.computed // self.size) - r.protected_len // self.size for r in self.world.running
        )

    def pick(self, i: int) -> Req:
        return self.world.running[i % len(self.world.running)]

    busy = precondition(lambda self: self.world.running)

    # ---- rules

    @rule(tokens=prompt, space=namespaces, cache=st.sampled_from([True, True, True, False]))
    def start(self, tokens: list[int], space, cache: bool) -> None:
        rows = self.world.table.available_size()
        r = self.world.start(tokens, space, cache)
        assert (r is None) == (rows == 0)
        if r is not None:
            node, length = self.plain.find(tokens[:-1] if cache else [], space)
            assert r.computed == length
            happened.add("hit" if length else "miss")
            self.plain.lock(node)
            self.ends[r] = node

    @busy
    @rule(i=which, n=st.integers(1, 40))
    def extend(self, i: int, n: int) -> None:
        r = self.pick(i)
        n = min(n, len(r.token_ids) - r.computed)
        self.count_pages()
        fits = self.plain_make_room(r, n)
        assert self.world.compute(r, n) == fits
        happened.add("extend" if fits else "out of memory")

    @busy
    @rule(i=which, token=st.integers(0, 2))
    def decode(self, i: int, token: int) -> None:
        """Compute all that is left and sample a token, which has no K and V yet."""
        r = self.pick(i)
        if len(r.token_ids) < 40:
            n = len(r.token_ids) - r.computed
            if self.plain_make_room(r, n):
                assert self.world.compute(r, n)
                r.token_ids.append(token)
                happened.add("decode")
            else:
                assert not self.world.compute(r, n)

    @busy
    @rule(
        i=which,
        draft=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        accepted=st.sampled_from([0, 1, 3, 8]),
    )
    def verify(self, i: int, draft: list[int], accepted: int) -> None:
        """A row grows by drafted tokens and shrinks by those that are rejected."""
        r = self.pick(i)
        if len(r.token_ids) + len(draft) <= 40:
            accepted = min(accepted, len(draft))
            fits = self.plain_make_room(r, len(r.token_ids) - r.computed + len(draft))
            known = list(r.token_ids)
            assert self.world.verify(r, draft, accepted) == fits
            assert r.token_ids == known + draft[: accepted if fits else 0]
            assert not fits or r.computed == len(r.token_ids)
            if fits:
                happened.add("rejected" if accepted < len(draft) else "accepted")

    @busy
    @rule(i=which, m=st.integers(0, 12), reserved=st.integers(0, 6), forget=st.booleans())
    def shrink(self, i: int, m: int, reserved: int, forget: bool) -> None:
        """A row loses its last `m` tokens and all that was reserved after them; the request keeps
        the tokens and computes them again, or forgets them."""
        r = self.pick(i)
        if reserved and r.computed + reserved <= 40:
            fits = self.plain_make_room(r, reserved)
            assert (self.world.reserve(r, reserved) is not None) == fits
        length = max(r.protected_len, r.computed - m)
        self.world.shrink(r, length)
        assert self.world.table.end(r.row) == length
        if forget:
            del r.token_ids[max(1, length) :]
        happened.add("shrunk" if m else "not shrunk")

    @busy
    @rule(i=which, twice=st.booleans())
    def cache_unfinished(self, i: int, twice: bool) -> None:
        r = self.pick(i)
        self.plain_store(r)
        self.world.cache.cache_unfinished(r)
        if twice:
            before = (
                dump(self.world.cache),
                self.world.allocator.free_pages.tolist(),
                self.world.row(r),
            )
            self.world.cache.cache_unfinished(r)
            assert (
                dump(self.world.cache),
                self.world.allocator.free_pages.tolist(),
                self.world.row(r),
            ) == before

    @busy
    @rule(i=which, how=st.sampled_from(["finish", "retract", "abort"]), reserved=st.integers(0, 6))
    def end(self, i: int, how: str, reserved: int) -> None:
        """A request ends, perhaps with slots reserved for tokens it did not compute; a retracted
        one comes again."""
        r = self.pick(i)
        if how == "abort" and reserved and r.computed + reserved <= 40:
            fits = self.plain_make_room(r, reserved)
            assert (self.world.reserve(r, reserved) is not None) == fits
            happened.add("reserved")
        self.plain_store(r)
        self.world.finish(r)
        self.plain.lock(self.ends.pop(r), -1)
        happened.add(how)
        if how == "retract":
            self.start(r.token_ids, r.namespace, r.cache)

    @rule(tokens=prompt, space=namespaces)
    def serve(self, tokens: list[int], space) -> None:
        """A request from start to end."""
        before = len(self.world.running)
        self.start(tokens, space, cache=True)
        if len(self.world.running) > before:
            self.extend(before, len(tokens))
            self.end(before, "finish", reserved=0)

    @rule(tokens=prompt, space=namespaces)
    def twins(self, tokens: list[int], space) -> None:
        """Two equal prompts are admitted together: both miss and both compute what they share."""
        before = len(self.world.running)
        for _ in range(2):
            self.start(tokens, space, cache=True)
        new = range(before, len(self.world.running))
        for i in new:
            self.extend(i, len(tokens))
        for i in new:
            self.cache_unfinished(i, twice=False)

    @rule(n=st.integers(0, 12))
    def evict(self, n: int) -> None:
        gone = self.plain.evict(n)
        assert self.world.cache.evict(n) == sum(len(node.tokens) for node in gone)

    @rule(tokens=prompt, space=namespaces)
    def look(self, tokens: list[int], space) -> None:
        m = self.world.cache.match_prefix(tokens, space)
        assert m.length == self.plain.find(tokens, space)[1] == len(m.slots)
        for i, slot in enumerate(m.slots.tolist()):
            assert self.world.content[slot] == (repr(space), tuple(tokens[: i + 1]))

    @rule(tokens=prompt, space=namespaces, priority=st.integers(-1, 2))
    def insert(self, tokens: list[int], space, priority: int) -> None:
        """A caller inserts slots, and frees those that the tree did not take."""
        w = self.world
        slots = w.allocator.alloc(-(-len(tokens) // self.size) * self.size)
        if slots is None:
            return
        whole = len(tokens) - len(tokens) % self.size
        n = w.cache.insert(tokens, slots, space, priority)
        assert n == self.plain.insert(tokens, slots.tolist(), space, priority)[0]
        for i in range(n, whole):
            w.content[int(slots[i])] = (repr(space), tuple(tokens[: i + 1]))
        w.allocator.free(torch.cat([slots[:n], slots[whole:]]))

    # ---- what holds after each

    @invariant()
    def everything_adds_up(self) -> None:
        global executed
        if not hasattr(self, "world"):
            return
        w = self.world
        w.check()
        assert dump(w.cache) == self.plain.dump()
        self.count_pages()
        free, tree = w.allocator.available_size() // self.size, w.cache.total_size // self.size
        assert free + tree + self.held == self.pages
        sizes = w.allocator.available_size(), w.cache.evictable_size, w.cache.protected_size
        assert sum(sizes) + self.held * self.size == w.allocator.size
        protected = sum(len(n.tokens) for n in self.plain.nodes() if n.locks)
        assert (w.cache.protected_size, w.cache.evictable_size) == (
            protected,
            tree * self.size - protected,
        )
        assert w.cache.root.lock_count == 1 + len(w.running)
        executed += self.ready
        if executed % RULES == 0 and self.ready and not failed:
            raise Enough
        self.ready = True

    def teardown(self) -> None:
        global failed
        failed = failed or isinstance(sys.exc_info()[1], Exception)
        if hasattr(self, "world"):
            for r in list(self.world.running):
                self.world.finish(r)
            self.world.cache.evict(10_000)
            assert self.world.allocator.available_size() == self.pages * self.size
            self.world.check()


@pytest.mark.timeout(7200 if LONG else 300)
def test_requests_in_any_order_against_plain_lists() -> None:
    many = settings(
        max_examples=RULES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=not LONG,
    )
    for i in range(ROUNDS):
        # Hypothesis calls it flaky when the example that `Enough` ends began like one before it.
        with pytest.raises((Enough, Flaky)):
            run_state_machine_as_test(Server, settings=many)
        print(f"{executed} rules executed")
        assert executed == (i + 1) * RULES
        assert not failed
    wanted = "hit miss duplicate extend decode evict reserved finish retract abort"
    wanted += " accepted rejected shrunk"
    assert happened >= {*wanted.split(), "out of memory"}
