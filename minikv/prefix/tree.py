"""The paged radix tree that finds which tokens of a prompt already have K and V in the pool.

The idea is RadixAttention (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
Model Programs"); whole pages as the unit of sharing come from PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minikv.errors import ArgumentError, StateError
from minikv.prefix.eviction import EvictionQueue, is_candidate
from minikv.prefix.invariants import check
from minikv.prefix.lifecycle import RequestLife
from minikv.prefix.node import (
    TOKEN_BYTES,
    CacheStats,
    Match,
    Node,
    Slots,
    as_tokens,
    cut,
    join,
    typed,
)
from minikv.prefix.recorder import Event, Recorder

if TYPE_CHECKING:
    from minikv.memory import PagedAllocator, RequestTable


class RadixCache(RequestLife):
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
        self, page_size: int, allocator: PagedAllocator | None = None, table: RequestTable | None = None,
        eviction: str = "lru", disable: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(page_size, int | np.integer) or page_size < 1:
            raise ArgumentError("page_size", page_size, "must be a whole number, at least 1")
        if allocator is not None and allocator.page_size != page_size:
            raise ArgumentError(
                "page_size", page_size, f"must be the allocator's, {allocator.page_size}"
            )
        self.page_size, self.allocator, self.table = page_size, allocator, table
        self.eviction, self.disable = eviction, disable
        self.device = torch.device(allocator.device if allocator is not None else "cpu")
        self.page_bytes = page_size * TOKEN_BYTES
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.device)
        self.recorders: list[Recorder] = []
        self.decode: Any = (
            None  # what pictures turn token ids into text with; an engine sets its tokenizer
        )
        self._clear()

    def _clear(self) -> None:
        self.clock = 0  # ages, births and ids: one counter for all
        self.evictable_size = self.protected_size = 0
        self.stats = CacheStats()
        self.root = Node(b"", self._no_slots, None, None, 0)
        self.root.lock_count = 1
        self.queue = EvictionQueue(self.eviction)
        self._fresh_page = 1

    @property
    def total_size(self) -> int:
        return self.evictable_size + self.protected_size

    # ---- find and insert

    def match_prefix(self, tokens: Any, namespace: Hashable = None) -> Match:
        """The longest cached prefix of `tokens`, in whole pages; one hit for every node it passes.

        A match that ends inside a node splits it there. A prompt that is cached entirely matches
        entirely: who needs logits matches ``tokens[:-1]``. `slots` of the match are to be read
        only: within one node they are the tree's own memory.

        Parameters
        ----------
        tokens
            Token ids `[n]`: an int64 array (used as it is), list or tensor.
        namespace
            Any hashable; what was inserted under another namespace is not found.
        """
        tokens = as_tokens(tokens)
        path, length = self._descend(tokens, namespace)
        self._touch(path)
        stats = self.stats
        stats.lookups += 1
        stats.hit_tokens += length
        stats.miss_tokens += tokens.size - length
        if self.recorders:
            self._emit("match", path, tokens=tokens, namespace=namespace, length=length)
        if not path:
            return Match([self._no_slots], self.root, 0)
        return Match([node.stored for node in path], path[-1], length)

    def peek(self, tokens: Any, namespace: Hashable = None) -> tuple[Node, int]:
        """The node where a match would end, and its length. Counts nothing and splits nothing."""
        path, length, _ = self._walk(as_tokens(tokens), namespace)
        return (path[-1] if path else self.root), length

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
        """
        tokens = as_tokens(tokens)
        if not isinstance(priority, int):
            raise ArgumentError("priority", priority, "must be an integer; higher stays longer")
        tokens = tokens[: tokens.size // self.page_size * self.page_size]
        if slots is not None and len(slots) < tokens.size:
            raise ArgumentError(
                "slots", slots, f"holds {len(slots)} slots; {tokens.size} tokens need one each"
            )
        if self.disable:
            if slots is not None:
                self._free(self._own(slots, 0, tokens.size))
            return 0
        return self._insert(tokens, slots, namespace, priority)[1]

    def _insert(
        self, tokens: np.ndarray, slots: Any, namespace: Hashable, priority: int, known: int = 0
    ) -> tuple[list[Node], int]:
        """Insert whole pages; returns the path to their node and the length present before.

        The first `known` tokens were matched or inserted by the same request before and count as no
        new use.
        """
        path, present = self._descend(tokens, namespace)
        if present < known:
            raise StateError(
                f"{known - present} tokens of a running request were evicted: keep its node locked"
            )
        new = None if present == tokens.size else self._own(slots, present, tokens.size)
        self._touch(path, known)
        for node in path:
            node.priority = max(node.priority, priority)
        if new is not None:
            parent = path[-1] if path else self.root
            leaf = Node(tokens[present:].tobytes(), new, parent, namespace, self.clock)
            leaf.priority = priority
            leaf.adopt(self.page_bytes)
            self.evictable_size += tokens.size - present
            self.stats.inserted += tokens.size - present
            self.queue.push(leaf)
            path.append(leaf)
        if self.recorders:
            news = {"length": present, "slots": new, "priority": priority, "known": known}
            self._emit("insert", path, tokens=tokens, namespace=namespace, **news)
        return path, present

    def _walk(self, tokens: np.ndarray, namespace: Hashable) -> tuple[list[Node], int, int]:
        """Nodes that agree with `tokens`, their common length, and how much of the last one when
        not all of it."""
        width = self.page_bytes
        end = tokens.size // self.page_size * width
        path: list[Node] = []
        if not end:
            return path, 0, 0
        view = tokens.data.cast("B")
        page: Hashable = view[:width].tobytes()
        try:
            node = self.root.children.get(page if namespace is None else (typed(namespace), page))
        except TypeError as e:
            raise ArgumentError(
                "namespace", namespace, "must be hashable, such as a name or a tuple of names"
            ) from e
        at = 0
        while node is not None:
            path.append(node)
            data = node.data
            stop = at + len(data)
            if stop > end or not data.startswith(view[at:stop]):
                part = _common_bytes(data, view[at:end]) // width * width
                return path, (at + part) // TOKEN_BYTES, part // TOKEN_BYTES
            at = stop
            if at == end:
                break
            node = node.children.get(view[at : at + width].tobytes())
        return path, at // TOKEN_BYTES, 0

    def _descend(self, tokens: np.ndarray, namespace: Hashable) -> tuple[list[Node], int]:
        """Walk, and split the last node where the tokens leave it, so that the path ends at a node."""
        path, length, part = self._walk(tokens, namespace)
        if part:
            path[-1] = self.split(path[-1], part)
        return path, length

    def split(self, node: Node, length: int) -> Node:
        """Put the first `length` tokens of a node into a new parent, which is returned; `node`
        keeps its identity.

        Both halves copy their slots: a view would keep the whole storage alive as long as either
        half.
        """
        above = node.parent
        assert above is not None
        self.clock += 1
        size = len(node.data) // TOKEN_BYTES
        upper = Node(
            node.data[: length * TOKEN_BYTES],
            cut(node.stored, 0, length),
            above,
            node.namespace,
            self.clock,
        )
        upper.lock_count, upper.hit_count, upper.priority = (
            node.lock_count,
            node.hit_count,
            node.priority,
        )
        upper.last_use, upper.birth = node.last_use, node.birth
        node.data, node.stored, node.parent = (
            node.data[length * TOKEN_BYTES :],
            cut(node.stored, length, size),
            upper,
        )
        upper.adopt(self.page_bytes)
        node.adopt(self.page_bytes)
        self.stats.splits += 1
        if self.recorders:
            self._emit("split", [node], length=length)
        return upper

    def _touch(self, path: list[Node], known: int = 0) -> None:
        """One tick of the counter, and one use of every node that reaches beyond `known` tokens."""
        self.clock = clock = self.clock + 1
        depth = 0
        for node in path:
            depth += len(node.data)
            if depth > known * TOKEN_BYTES:
                node.hit_count += 1
                node.last_use = clock
        if self.queue.falling and path and is_candidate(path[-1]):
            self.queue.push(path[-1])

    def _own(self, slots: Any, start: int, stop: int) -> Slots:
        """A copy of ``slots[start:stop]`` that belongs to the tree; fresh pages for None."""
        if slots is None and self.allocator is not None:
            slots, start, stop = self.allocator.alloc(stop - start), 0, stop - start
            if slots is None:
                raise StateError(
                    f"the allocator has no {stop} tokens left for an insert without slots; evict first"
                )
        elif slots is None:
            first = self._fresh_page * self.page_size
            self._fresh_page += (stop - start) // self.page_size
            return bytearray(np.arange(first, first + stop - start).data)
        if self.device.type != "cpu":
            return torch.as_tensor(slots)[start:stop].to(self.device, torch.int64, copy=True)
        return self.hold(as_tokens(slots[start:stop], "slots"))

    def hold(self, slots: np.ndarray) -> bytearray:
        """A node's own copy of `slots`; pages that the tree numbers itself come after them."""
        if self.allocator is None and slots.size:
            self._fresh_page = max(self._fresh_page, int(slots.max()) // self.page_size + 1)
        return bytearray(slots.data)

    # ---- lock and evict

    def lock(self, node: Node) -> None:
        """Protect a node of this tree and all above it from eviction; as many `unlock` calls undo
        it."""
        self._live(node)
        at: Node | None = node
        while at is not None:
            if at.lock_count == 0:
                self.evictable_size -= len(at.data) // TOKEN_BYTES
                self.protected_size += len(at.data) // TOKEN_BYTES
            at.lock_count += 1
            at = at.parent
        if self.recorders:
            self._emit("lock", [node])

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the node."""
        self._live(node)
        if node.lock_count == (node is self.root):
            raise StateError(f"{node} is not locked; unlock a node once for each lock")
        at: Node | None = node
        while at is not None:
            at.lock_count -= 1
            if at.lock_count == 0:
                self.evictable_size += len(at.data) // TOKEN_BYTES
                self.protected_size -= len(at.data) // TOKEN_BYTES
            at = at.parent
        if is_candidate(node):
            self.queue.push(node)
        if self.recorders:
            self._emit("unlock", [node])

    def _live(self, node: Node) -> None:
        top: Any = node
        while (
            getattr(top, "parent", None) is not None
        ):  # whatever else is passed is not in the tree either
            top = top.parent
        if top is not self.root:
            gone = "no longer in the tree: it was evicted, or the tree was reset"
            raise StateError(
                f"{node} is {gone if top is node else 'in another tree'}; match its tokens in this one"
            )

    def evict(self, num_tokens: int) -> int:
        """Free unlocked leaves in policy order until at least `num_tokens` tokens went back, or
        none is left.

        Returns
        -------
        int
            Tokens freed. They go back to the allocator as one batch.
        """
        freed, gone = 0, []
        while freed < num_tokens and (leaf := self.queue.pop()) is not None:
            gone.append(leaf.stored)
            freed += self.remove(leaf)
        if gone:
            self._free(join(gone))
        return freed

    def remove(self, leaf: Node) -> int:
        """Take an unlocked leaf out of the tree; returns its tokens. Its pages are the caller's to
        free."""
        parent = leaf.parent
        assert parent is not None
        if self.recorders:
            self._emit("evict", [leaf], tokens=leaf.key, length=len(leaf.key))
        leaf.leave(self.page_bytes)
        size = len(leaf.data) // TOKEN_BYTES
        self.evictable_size -= size
        self.stats.evicted += size
        if is_candidate(parent):
            self.queue.push(parent)
        return size

    # ---- look at it

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents before their children, children in order of insertion."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check(self, owned: Iterable[Any] = ()) -> None:
        """Raise a `StateError` that names the node or slot which breaks an invariant; see
        :mod:`.invariants`.

        Parameters
        ----------
        owned
            Slots that running requests hold themselves (not the tree's): a tensor, or slots, or
            tensors of slots. That all pages add up is checked when it is given, or when no node is
            locked and no row is taken.
        """
        check(self, owned)

    def reset(self) -> None:
        """Empty the tree, give its pages back, and start counting anew."""
        if self.root.lock_count > 1:
            raise StateError(
                f"{self.root.lock_count - 1} locks are held: finish or abort the requests before a reset"
            )
        self.evict(self.evictable_size)
        self._clear()
        if self.recorders:
            self._emit("reset", [])

    def record(self) -> Recorder:
        """``with cache.record() as recorder:`` collects what happens to the tree; see
        :class:`.events.Recorder`."""
        return Recorder(self)

    def _emit(self, kind: str, path: list[Node], **news: Any) -> None:
        event = Event.of(kind, path[-1] if path else self.root, **news)
        for recorder in self.recorders:
            recorder.events.append(event)

    def __repr__(self) -> str:
        made = f"RadixCache(page_size={self.page_size}, eviction={self.eviction!r})"
        sizes = f"{self.evictable_size} evictable + {self.protected_size} protected tokens"
        return f"{made}: {sum(1 for _ in self.nodes())} nodes, {sizes}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from minikv.viz import tree

        return tree.mimebundle(self)


def _common_bytes(data: bytes, other: memoryview) -> int:
    """Bytes up to the first token in which the two differ, or the length of the shorter."""
    size = min(len(data), len(other))
    differ = np.frombuffer(data, np.int64, size // TOKEN_BYTES) != np.frombuffer(
        other[:size], np.int64
    )
    first = int(differ.argmax())
    return first * TOKEN_BYTES if differ[first] else size
