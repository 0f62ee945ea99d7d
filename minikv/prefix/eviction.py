"""Which unlocked leaf goes first: six policies, and a queue that never looks at the whole tree."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from minikv.errors import ArgumentError
from minikv.prefix.node import Node

RANKS: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.last_use,
    "lfu": lambda node: (node.hit_count, node.last_use),
    "fifo": lambda node: node.birth,
    "mru": lambda node: -node.last_use,
    "filo": lambda node: -node.birth,
    "priority": lambda node: (node.priority, node.last_use),
}
"""Policy: rank of a node. The lowest rank is evicted first; equal ranks by birth, then the deeper
node first."""


class EvictionQueue:
    """The unlocked leaves of a tree by rank: a heap whose entries are corrected when they come to
    the top.

    A node is pushed when it becomes an unlocked leaf. Being used only raises a rank (except for
    ``mru``), so an entry may be too early, never too late: `pop` pushes such a node again with its
    present rank, and drops entries of nodes that are locked, inner or gone. Each correction was
    paid for by one use, so `k` evictions cost O(k log leaves). Under ``mru`` a use lowers the rank;
    there the tree pushes at each use, and the old entry gets dropped.

    Parameters
    ----------
    policy
        ``"lru"``, ``"lfu"`` (hits, then recency), ``"fifo"`` (birth), ``"mru"``, ``"filo"``,
        ``"priority"`` (lowest first, then recency).
    """

    def __init__(self, policy: str) -> None:
        if not isinstance(policy, str) or policy not in RANKS:
            raise ArgumentError("eviction", policy, f"use one of {', '.join(RANKS)}")
        self.rank = RANKS[policy]
        self.falling = policy == "mru"
        self.heap: list[tuple[Any, int, Node]] = []
        self._limit = 64

    def push(self, node: Node) -> None:
        """Enter a node, if it is an unlocked leaf whose entry, if there is one, may be too late."""
        if (node.queued and not self.falling) or not is_candidate(node):
            return
        node.queued = True
        heappush(self.heap, (self.rank(node), node.birth, node))
        if self.falling and len(self.heap) > self._limit:
            self._compact()

    def pop(self) -> Node | None:
        """The next leaf to evict, taken off the queue; None when every node is locked."""
        while self.heap:
            rank, _, node = heappop(self.heap)
            node.queued = False
            if not is_candidate(node):
                continue
            present = self.rank(node)
            if present == rank:
                return node
            if present > rank:
                self.push(node)
        return None

    def _compact(self) -> None:
        """Drop outdated entries; the next time after the queue has doubled, so a push stays O(log
        leaves)."""
        live = {id(node): node for _, _, node in self.heap if is_candidate(node)}.values()
        self.heap = [(self.rank(node), node.birth, node) for node in live]
        heapify(self.heap)
        self._limit = 64 + 2 * len(self.heap)


def is_candidate(node: Node) -> bool:
    """Whether the node is an unlocked leaf of the tree (the root is always locked)."""
    return not node.children and not node.lock_count and node.parent is not None
