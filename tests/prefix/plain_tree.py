"""The radix tree as one would write it with lists only: tokens one by one, every search a scan. The
tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class PlainNode:
    tokens: list[int]
    slots: list[int]
    space: str  # repr of the namespace
    parent: PlainNode | None
    birth: int
    use: int
    priority: int = 0
    hits: int = 0
    locks: int = 0
    children: list[PlainNode] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def path(self) -> tuple[int, ...]:
        return () if self.parent is None else (*self.parent.path, *self.tokens)


FIRST_OUT = {
    "lru": lambda n: n.use,
    "lfu": lambda n: (n.hits, n.use),
    "fifo": lambda n: n.birth,
    "mru": lambda n: -n.use,
    "filo": lambda n: -n.birth,
    "priority": lambda n: (n.priority, n.use),
}


class PlainTree:
    def __init__(self, page_size: int, policy: str = "lru") -> None:
        self.page_size, self.policy, self.now = page_size, policy, 0
        self.root = PlainNode([], [], "", None, 0, 0, locks=1)

    def nodes(self) -> list[PlainNode]:
        found, i = [self.root], 0
        while i < len(found):
            found += found[i].children
            i += 1
        return found[1:]

    def find(
        self, tokens: list[int], namespace: Any = None, known: int = 0
    ) -> tuple[PlainNode, int]:
        """Match, split and count; the node where it ends and the length."""
        whole = len(tokens) // self.page_size * self.page_size
        self.now += 1
        at, done = self.root, 0
        while True:
            best, common = None, 0
            for child in at.children:
                same = 0
                while (
                    same < len(child.tokens)
                    and done + same < whole
                    and child.tokens[same] == tokens[done + same]
                ):
                    same += 1
                same -= same % self.page_size
                if same and child.space == repr(namespace):
                    best, common = child, same
            if best is None:
                return at, done
            if common < len(best.tokens):
                best = self._split(best, common)
            at, done = best, done + common
            if done > known:
                at.hits, at.use = at.hits + 1, self.now

    def _split(self, node: PlainNode, n: int) -> PlainNode:
        counts = node.birth, node.use, node.priority, node.hits, node.locks
        upper = PlainNode(node.tokens[:n], node.slots[:n], node.space, node.parent, *counts, [node])
        siblings = node.parent.children
        siblings[siblings.index(node)] = upper
        node.tokens, node.slots, node.parent = node.tokens[n:], node.slots[n:], upper
        return upper

    def insert(
        self,
        tokens: list[int],
        slots: list[int],
        namespace: Any = None,
        priority: int = 0,
        known: int = 0,
    ) -> tuple[int, PlainNode]:
        whole = len(tokens) // self.page_size * self.page_size
        node, n = self.find(tokens, namespace, known)
        at = node
        while at is not None:
            at.priority = max(at.priority, priority)
            at = at.parent
        if n < whole:
            leaf = PlainNode(
                tokens[n:whole], slots[n:whole], repr(namespace), node, self.now, self.now, priority
            )
            node.children.append(leaf)
            node = leaf
        return n, node

    def lock(self, node: PlainNode | None, by: int = 1) -> None:
        while node is not None:
            node.locks += by
            node = node.parent

    def evict(self, num_tokens: int) -> list[PlainNode]:
        gone, freed = [], 0
        while freed < num_tokens:
            leaves = [n for n in self.nodes() if not n.children and not n.locks]
            if not leaves:
                break
            first = min(leaves, key=lambda n: (FIRST_OUT[self.policy](n), n.birth, -n.depth))
            first.parent.children.remove(first)
            gone.append(first)
            freed += len(first.tokens)
        return gone

    def dump(self) -> dict:
        facts = {
            (n.space, n.path): [n.slots, n.locks, n.hits, n.priority, n.birth, n.use]
            for n in self.nodes()
        }
        return in_order(facts)


def in_order(facts: dict) -> dict:
    """Births and last uses as ranks: the two trees count them with other numbers."""
    for i in (4, 5):
        ranks = {
            value: rank for rank, value in enumerate(sorted({fact[i] for fact in facts.values()}))
        }
        for fact in facts.values():
            fact[i] = ranks[fact[i]]
    return facts


def dump(cache: Any) -> dict:
    """The same facts of a RadixCache."""
    paths = {id(cache.root): ()}
    facts = {}
    for node in cache.nodes():
        path = paths[id(node)] = (*paths[id(node.parent)], *node.key.tolist())
        space = repr(node.namespace)
        counts = [node.lock_count, node.hit_count, node.priority, node.birth, node.last_use]
        facts[space, path] = [node.slots.tolist(), *counts]
    return in_order(facts)
