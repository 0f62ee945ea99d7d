"""What the tree is made of: nodes, and the result of a match.

A node keeps its tokens as raw bytes of int64. A page of tokens is a dictionary key as it is, and
one ``memcmp`` tells whether a whole node agrees with a prompt, whatever its length. All other
files count in tokens; how many bytes a token takes is known here only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from minikv.errors import ArgumentError
from minikv.numbers import host_integers

INT64 = np.dtype(np.int64)
TOKEN_BYTES = INT64.itemsize
# Slots int64 [n] as nodes keep them: raw bytes on the CPU, where 50 slots as a tensor weigh twice
# as much; a tensor on a GPU.
Slots = bytearray | torch.Tensor
# The children of every leaf; an empty dictionary for each would cost 64 bytes.
NO_CHILDREN: Any = MappingProxyType({})
COUNTS = ("lock_count", "hit_count", "last_use", "birth", "priority")


class Node:
    """One edge and its end point: `n` tokens below their parent, and the slots that hold their K
    and V.

    Attributes
    ----------
    length
        `n`, a positive multiple of the page size (0 for the root).
    key
        Token ids, int64 `[n]`, a read-only array.
    slots
        int64 `[n]` tensor on the allocator's device: the node's own storage, to be read only.
    children
        Child nodes under the bytes of their first page (right below the root also under their
        namespace).
    parent
        None for the root, and for a node that was evicted.
    namespace
        As the caller gave it.
    lock_count
        Requests that use this node or one below it; 0 means that its tokens are evictable.
    hit_count, last_use, birth, priority
        Eviction orders by them. `last_use` and `birth` are readings of the tree's one counter.
    id
        A number that no other node of the tree has.
    queued
        Whether the eviction queue has an entry for the node.
    """

    __slots__ = (
        *("data", "length", "stored", "children", "parent", "namespace", "id", "queued"),
        *COUNTS,
    )

    def __init__(
        self, data: bytes, stored: Slots, parent: Node | None, namespace: Hashable, id: int
    ) -> None:
        self.data = data
        self.length = len(data) // TOKEN_BYTES
        self.stored = stored
        self.parent = parent
        self.namespace = namespace
        self.children: dict[Hashable, Node] = NO_CHILDREN
        self.lock_count = self.hit_count = self.priority = 0
        self.id = self.birth = self.last_use = id
        self.queued = False

    @property
    def key(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int64)

    @property
    def slots(self) -> torch.Tensor:
        return join([self.stored])

    def agrees(self, tokens: memoryview, at: int) -> int:
        """How many of the node's tokens the prompt `tokens` (int64) repeats from position `at`."""
        there = tokens[at : at + self.length]
        if self.data.startswith(there):
            return len(there)
        differ = self.key[: len(there)] != np.frombuffer(there, np.int64)
        return int(differ.argmax())

    def cut(self, n: int, id: int) -> Node:
        """Give the first `n` tokens to a new node, which becomes the parent; returns it.

        This node keeps its identity and the other tokens. Both halves copy their slots: a view
        would keep the whole storage alive for as long as either half.
        """
        end = n * TOKEN_BYTES
        upper = Node(self.data[:end], piece(self.stored, 0, n), self.parent, self.namespace, id)
        upper.count_like(self)
        self.data = self.data[end:]
        self.stored = piece(self.stored, n, self.length)
        self.length -= n
        self.parent = upper
        return upper

    def count_like(self, other: Node) -> None:
        """Take over another node's locks, hits, ages and priority."""
        for name in COUNTS:
            setattr(self, name, getattr(other, name))

    def key_of(self, child: Node, page_size: int) -> Hashable:
        """The key under which this node has a child: the child's first page; in the root also its
        namespace."""
        page = child.data[: page_size * TOKEN_BYTES]
        if self.parent is not None or child.namespace is None:
            return page
        return within(child.namespace, page)

    def adopt(self, child: Node, page_size: int) -> None:
        """Enter a node whose parent this one is."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[self.key_of(child, page_size)] = child

    def disown(self, child: Node, page_size: int) -> None:
        """Undo `adopt`; the child has no parent any more."""
        del self.children[self.key_of(child, page_size)]
        self.children = self.children or NO_CHILDREN
        child.parent = None

    def __lt__(self, other: Node) -> bool:
        """The deeper node first; asked only of halves of one node, which are equal in rank and
        birth."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is other

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.key[:6])) + (", ..." if self.length > 6 else "")
        space = "" if self.namespace is None else f" in {self.namespace!r}"
        uses = f"{self.lock_count} locks, {self.hit_count} hits"
        return f"Node {self.id} [{shown}]{space}, {self.length} tokens, {uses}"


@dataclass(slots=True, eq=False)
class Match:
    """The longest cached prefix of a prompt.

    Attributes
    ----------
    slots
        int64 `[length]` tensor of its slots, put together when first read. A match inside one node
        gives that node's own storage without a copy: read it only.
    node
        The node it ends at (the root when nothing matched): lock it before anything can be evicted.
    length
        Tokens matched, whole pages.
    """

    parts: Sequence[Slots] | Slots
    node: Node
    length: int

    @property
    def slots(self) -> torch.Tensor:
        if not isinstance(self.parts, torch.Tensor):
            self.parts = join(self.parts)
        return self.parts


@dataclass
class CacheStats:
    """What the cache has done since it was made or reset, in tokens unless said.

    `lookups` counts calls of `match_prefix`, `hit_tokens` and `miss_tokens` are those of their
    prompts, `splits` counts nodes that were split.
    """

    lookups: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    inserted: int = 0
    evicted: int = 0
    splits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of looked up tokens that were cached, 0 to 1."""
        return self.hit_tokens / max(1, self.hit_tokens + self.miss_tokens)


def join(parts: Sequence[Any]) -> torch.Tensor:
    """Slots of nodes laid end to end in new memory, int64 [n]; those of a single node are its own
    memory."""
    slots = parts[0]
    if isinstance(slots, torch.Tensor):
        return torch.cat(list(parts)) if len(parts) > 1 else slots
    if len(parts) > 1:
        slots = bytearray().join(parts)
    return torch.frombuffer(slots, dtype=torch.int64)


def piece(slots: Slots, start: int, stop: int) -> Slots:
    """A copy of the slots from `start` to `stop`, which keeps nothing else alive."""
    if isinstance(slots, torch.Tensor):
        return slots[start:stop].clone()
    return slots[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def as_tokens(tokens: Any, name: str = "tokens") -> np.ndarray:
    """Token ids as a contiguous int64 array `[n]`; an int64 array is taken as it is, a list is
    converted once.

    Raises
    ------
    ArgumentError
        For anything that is not one line of integers below 2**63.

    Examples
    --------
    >>> as_tokens([3, 1, 2])
    array([3, 1, 2])
    """
    if (
        type(tokens) is np.ndarray
        and tokens.dtype is INT64
        and tokens.ndim == 1
        and tokens.flags.c_contiguous
    ):
        return tokens
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu()
    return np.ascontiguousarray(host_integers(name, tokens, 1))


def beyond(path: Sequence[Node], known: int) -> list[Node]:
    """The nodes of a path that reach past its first `known` tokens."""
    ends = accumulate(node.length for node in path)
    return [node for node, end in zip(path, ends, strict=True) if end > known]


def within(namespace: Hashable, page: bytes) -> Hashable:
    """The key under which the root has a node of a namespace that begins with `page`."""
    try:
        hash(namespace)
    except TypeError as e:
        raise ArgumentError(
            "namespace", namespace, "must be hashable, such as a name or a tuple of names"
        ) from e
    return (typed(namespace), page)


def typed(namespace: Hashable) -> tuple:
    """A namespace as a dictionary key that equals another's only for equal types too (``1 == 1.0 ==
    True`` in Python).

    Examples
    --------
    >>> typed(1) == typed(True), typed(("a", "b")) == typed(("a", "b"))
    (False, True)
    >>> typed(("ab", "c")) == typed(("a", "bc"))
    False
    """
    if isinstance(namespace, tuple):
        return (type(namespace), *map(typed, namespace))
    if isinstance(namespace, frozenset):
        return (type(namespace), frozenset(map(typed, namespace)))
    return (type(namespace), namespace)
