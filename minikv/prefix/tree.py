"""The paged radix tree that finds which tokens of a prompt already have K and V in the pool.

The idea is RadixAttention (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
Model Programs"); whole pages as the unit of sharing come from PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minikv.errors import ArgumentError, StateError
from minikv.numbers import whole
from minikv.prefix import invariants, lifecycle
from minikv.prefix.eviction import EvictionQueue
from minikv.prefix.node import CacheStats, Match, Node, as_tokens, beyond, join, within
from minikv.prefix.recorder import Recorder

if TYPE_CHECKING:
    from minikv.memory import PagedAllocator, RequestTable


class RadixCache:
    """A radix tree over token ids whose nodes own pages of the KV pool.

    Parameters
    ----------
    page_size
        Tokens per page; matches, nodes and evictions are whole pages.
    allocator
        Takes back the pages of evicted nodes and of duplicates. Without one the tree only keeps the
        slots it is given.
    table
        The request table that `cache_unfinished` and `cache_finished` read and repoint.
    eviction
        A policy of :mod:`minikv.prefix.eviction`.
    disable
        The same calls, but nothing is kept or found, and finished requests give everything back.

    Attributes
    ----------
    evictable_size, protected_size
        Tokens in unlocked and in locked nodes; `total_size` is their sum.
    stats
        A :class:`CacheStats`.
    root
        The node without tokens; it counts as locked.

    Examples
    --------
    >>> cache = RadixCache(page_size=2)
    >>> cache.insert([1, 2, 3, 4])
    0
    >>> cache.insert([1, 2, 5, 6, 7])
    2
    >>> match = cache.match_prefix([1, 2, 5, 6, 9])
    >>> match.length, match.slots.tolist()
    (4, [2, 3, 6, 7])
    >>> cache.evict(2), cache.match_prefix([1, 2, 3, 4]).length
    (2, 2)
    """

    def __init__(
        self,
        page_size: int,
        allocator: PagedAllocator | None = None,
        table: RequestTable | None = None,
        eviction: str = "lru",
        disable: bool = False,
    ) -> None:
        self.page_size = whole("page_size", page_size, 1)
        if allocator is not None and allocator.page_size != page_size:
            raise ArgumentError(
                "page_size", page_size, f"must be the allocator's, {allocator.page_size}"
            )
        self.allocator = allocator
        self.table = table
        self.eviction = eviction
        self.disable = disable
        self.device = torch.device("cpu" if allocator is None else allocator.device)
        self.recorders: list[Recorder] = []
        self.decode: Any = None  # pictures spell token ids with it; an engine sets its tokenizer
        self._clear()

    def _clear(self) -> None:
        self.clock = 0  # ages, births and ids: one counter for all
        self.evictable_size = self.protected_size = 0
        self.stats = CacheStats()
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self.root = Node(b"", nothing, None, None, 0)
        self.root.lock_count = 1
        self.queue = EvictionQueue(self.eviction)
        self.fresh_page = 1

    @property
    def total_size(self) -> int:
        return self.evictable_size + self.protected_size

    # ---- find and insert

    def match_prefix(self, tokens: Any, namespace: Hashable = None) -> Match:
        """The longest cached prefix of `tokens`, in whole pages; one hit for every node it passes.

        A match that ends inside a node splits it there. A prompt that is cached entirely matches
        entirely: a caller that needs logits matches ``tokens[:-1]``. `slots` of the match are to be
        read only: within one node they are the tree's own memory.

        Parameters
        ----------
        tokens
            Token ids `[n]`: an int64 array (used as it is), list or tensor.
        namespace
            Any hashable; what was inserted under another namespace is not found.
        """
        tokens = as_tokens(tokens)
        path, length, part = self._walk(tokens, namespace)
        if part:
            path[-1] = self.split(path[-1], part)
        self._touch(path)
        self.stats.lookups += 1
        self.stats.hit_tokens += length
        self.stats.miss_tokens += tokens.size - length
        for recorder in self.recorders:
            recorder.note("match", path[-1], tokens=tokens, namespace=namespace, length=length)
        return Match([node.stored for node in path[1:]] or self.root.stored, path[-1], length)

    def peek(self, tokens: Any, namespace: Hashable = None) -> tuple[Node, int]:
        """The node where a match would end, and its length. Counts nothing and splits nothing."""
        path, length, _ = self._walk(as_tokens(tokens), namespace)
        return path[-1], length

    def evictable_part(self, node: Node, length: int) -> int:
        """How many of the first `length` tokens on the way to `node` are evictable.

        They are so no longer once a request that uses them is admitted: its room is what the
        allocator has, plus `evictable_size`, less these. `peek` gives both arguments.
        """
        locked = sum(at.length for at in self.way_up(node) if at.lock_count)
        return max(0, length - locked)

    def insert(
        self, tokens: Any, slots: Any = None, namespace: Hashable = None, priority: int = 0
    ) -> int:
        """Store the whole pages of `tokens`; from then on the tree owns ``slots[n:whole]``.

        Every node that is passed gets a hit, and at least `priority`; a new leaf starts with no
        hits.

        Parameters
        ----------
        tokens
            Token ids `[m]`; `whole` is `m` rounded down to pages.
        slots
            Their slots, at least `whole`, copied. None numbers fresh pages, or takes them from the
            allocator.
        namespace, priority
            See `match_prefix`, and the policy ``"priority"``.

        Returns
        -------
        int
            `n`, the tokens that were present before. ``slots[:n]`` and the tail after `whole` stay
            the caller's.

        Raises
        ------
        ArgumentError
            For tokens or slots that are no line of integers, or fewer slots than tokens.
        StateError
            When the allocator has too few pages. Nothing has changed then, as after each refusal.
        """
        tokens = as_tokens(tokens)
        priority = whole("priority", priority)
        tokens = tokens[: tokens.size // self.page_size * self.page_size]
        if slots is not None:
            slots = lifecycle.given(slots, tokens.size)
        if self.disable:
            if slots is not None:
                lifecycle.give_back(self, slots)
            return 0
        return self.add(tokens, slots, namespace, priority)[1]

    def add(
        self, tokens: np.ndarray, slots: Any, namespace: Hashable, priority: int, known: int = 0
    ) -> tuple[list[Node], int]:
        """Insert whole pages; returns the path to their node and the length present before.

        The first `known` tokens are the same request's from before: they count as no new use.
        """
        path, present, part = self._walk(tokens, namespace)
        if present < known:
            raise StateError(
                "the request's tokens or its namespace were changed while it ran: the tree holds "
                f"{known} tokens of it, and only the first {present} are still the same"
            )
        new = None
        if present < tokens.size:
            new = lifecycle.own(self, slots, present, tokens.size)
        if part:
            path[-1] = self.split(path[-1], part)
        self._touch(beyond(path, known) if known else path)
        for node in path:
            node.priority = max(node.priority, priority)
        if new is not None:
            leaf = Node(tokens[present:].tobytes(), new, path[-1], namespace, self.clock)
            leaf.priority = priority
            path[-1].adopt(leaf, self.page_size)
            self.evictable_size += leaf.length
            self.stats.inserted += leaf.length
            self.queue.push(leaf)
            path.append(leaf)
        for recorder in self.recorders:
            news = {"length": present, "namespace": namespace, "priority": priority, "known": known}
            recorder.note("insert", path[-1], tokens=tokens, slots=new, **news)
        return path, present

    def _walk(self, tokens: np.ndarray, namespace: Hashable) -> tuple[list[Node], int, int]:
        """The nodes that `tokens` pass from the root on, the length they have in common, and how
        much of the last node that is, unless it is all of it (then 0)."""
        size = self.page_size
        prompt = tokens.data
        path, at = [self.root], 0
        page = prompt[:size].tobytes()
        node = self.root.children.get(page if namespace is None else within(namespace, page))
        while node is not None:
            path.append(node)
            same = node.agrees(prompt, at)
            if same < node.length:
                same -= same % size
                return path, at + same, same
            at += same
            node = node.children.get(prompt[at : at + size].tobytes())
        return path, at, 0

    def split(self, node: Node, length: int) -> Node:
        """Move the first `length` tokens of a node to a new one above it, which is returned.

        The old node keeps its identity, so a request that holds it still does.
        """
        above = node.parent
        assert above is not None
        self.clock += 1
        upper = node.cut(length, self.clock)
        above.adopt(upper, self.page_size)
        upper.adopt(node, self.page_size)
        self.stats.splits += 1
        for recorder in self.recorders:
            recorder.note("split", node, length=length)
        return upper

    def _touch(self, path: list[Node]) -> None:
        """One tick of the counter: one use of every node of a path."""
        self.clock = clock = self.clock + 1
        for node in path:
            node.hit_count += 1
            node.last_use = clock
        if self.queue.falling and path:
            self.queue.push(path[-1])

    # ---- lock and evict

    def lock(self, node: Node) -> None:
        """Protect a node and all above it from eviction, until as many `unlock` calls."""
        for at in self.way_up(node):
            if at.lock_count == 0:
                self.evictable_size -= at.length
                self.protected_size += at.length
            at.lock_count += 1
        for recorder in self.recorders:
            recorder.note("lock", node)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the node."""
        path = self.way_up(node)
        if node.lock_count == (node is self.root):
            raise StateError(f"{node} is not locked; unlock a node once for each lock")
        for at in path:
            at.lock_count -= 1
            if at.lock_count == 0:
                self.evictable_size += at.length
                self.protected_size -= at.length
        if node.lock_count == 0:
            self.queue.push(node)
        for recorder in self.recorders:
            recorder.note("unlock", node)

    def way_up(self, node: Node) -> list[Node]:
        """A node of this tree and all above it, up to the root; anything else is refused."""
        if not isinstance(node, Node):
            raise ArgumentError("node", node, "is not a node; pass the `node` of a match")
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        if path[-1] is not self.root:
            where = "in another tree"
            if len(path) == 1:
                where = "no longer in the tree: it was evicted, or the tree was reset"
            raise StateError(f"{node} is {where}; match its tokens in this one")
        return path

    def evict(self, num_tokens: int) -> int:
        """Free unlocked leaves in policy order until at least `num_tokens` tokens went back, or
        none is left.

        Returns
        -------
        int
            Tokens freed. They go back to the allocator as one batch.
        """
        wanted = whole("num_tokens", num_tokens)
        gone, freed = [], 0
        while freed < wanted and (leaf := self.queue.pop()) is not None:
            gone.append(leaf.stored)
            freed += self.remove(leaf)
        if gone:
            lifecycle.give_back(self, join(gone))
        return freed

    def remove(self, leaf: Node) -> int:
        """Take an unlocked leaf out of the tree; returns its length. The caller frees its pages."""
        parent = leaf.parent
        assert parent is not None
        for recorder in self.recorders:
            recorder.note("evict", leaf, tokens=leaf.key, length=leaf.length)
        parent.disown(leaf, self.page_size)
        self.evictable_size -= leaf.length
        self.stats.evicted += leaf.length
        self.queue.push(parent)
        return leaf.length

    # ---- the life of a request

    cache_unfinished = lifecycle.cache_unfinished
    cache_finished = lifecycle.cache_finished

    # ---- look at it

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents first, children in order of insertion."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    check = invariants.check

    def reset(self) -> None:
        """Empty the tree, give its pages back, and start counting anew."""
        if self.root.lock_count > 1:
            held = self.root.lock_count - 1
            raise StateError(f"{held} locks are held: finish or abort the requests before a reset")
        self.evict(self.evictable_size)
        self._clear()
        for recorder in self.recorders:
            recorder.note("reset", self.root)

    def record(self) -> Recorder:
        """``with cache.record() as recorder:`` collects all events; see :class:`.Recorder`."""
        return Recorder(self)

    def __repr__(self) -> str:
        made = f"RadixCache(page_size={self.page_size}, eviction={self.eviction!r})"
        sizes = f"{self.evictable_size} evictable + {self.protected_size} protected tokens"
        return f"{made}: {sum(1 for _ in self.nodes())} nodes, {sizes}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from minikv.viz import tree

        return tree.mimebundle(self)
