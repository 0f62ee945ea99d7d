"""What the tree is made of: nodes, the result of a match, and the keys that tokens and namespaces
turn into.

A node keeps its tokens as raw bytes of int64. Then a page of tokens is a dictionary key as it is,
and one ``memcmp`` tells whether a whole node agrees with a prompt, whatever its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from minikv.errors import ArgumentError

INT64 = np.dtype(np.int64)
TOKEN_BYTES = INT64.itemsize
Slots = (
    bytearray | torch.Tensor
)  # int64 [n]: on the CPU raw bytes, since 50 slots as a tensor weigh twice as much
NO_CHILDREN: Any = MappingProxyType({})  # of every leaf, which saves each its own empty dictionary


class Node:
    """One edge and its end point: `n` tokens below their parent, and the slots that hold their K
    and V.

    Attributes
    ----------
    key
        Token ids, int64 `[n]`, a read-only array; `n` is a positive multiple of the page size (0
        for the root).
    slots
        int64 `[n]` tensor on the allocator's device: the node's own storage, to be read only.
    children
        Child nodes under the bytes of their first page (right below the root also under their
        namespace).
    parent
        None for the root, and for a node that was evicted.
    lock_count
        Requests that use this node or one below it; 0 means that its tokens are evictable.
    hit_count, last_use, birth, priority
        What eviction orders by. `last_use` and `birth` are readings of the tree's one counter.
    id
        A number that no other node of the tree has; `namespace`, as it was given; `queued`, whether
        the eviction queue has an entry for the node.
    """

    __slots__ = (
        *("data", "stored", "children", "parent", "namespace", "lock_count", "hit_count"),
        *("last_use", "birth", "priority", "id", "queued"),
    )

    def __init__(
        self, data: bytes, stored: Slots, parent: Node | None, namespace: Hashable, id: int
    ) -> None:
        self.data, self.stored, self.parent, self.namespace = data, stored, parent, namespace
        self.children: dict[Hashable, Node] = NO_CHILDREN
        self.lock_count = self.hit_count = self.priority = 0
        self.id = self.birth = self.last_use = id
        self.queued = False

    @property
    def key(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int64)

    @key.setter
    def key(self, tokens: Sequence[int] | np.ndarray) -> None:
        self.data = as_tokens(tokens).tobytes()

    @property
    def slots(self) -> torch.Tensor:
        return as_tensor(self.stored)

    @slots.setter
    def slots(self, slots: torch.Tensor) -> None:
        self.stored = (
            slots
            if isinstance(self.stored, torch.Tensor)
            else bytearray(slots.contiguous().numpy().data)
        )

    def child_key(self, page_bytes: int) -> Hashable:
        """Under which key the parent has this node: its first page, right below the root with its
        namespace."""
        page = self.data[:page_bytes]
        top = self.parent is not None and self.parent.parent is None
        return (typed(self.namespace), page) if top and self.namespace is not None else page

    def adopt(self, page_bytes: int) -> None:
        """Become a child of the parent."""
        assert self.parent is not None
        if self.parent.children is NO_CHILDREN:
            self.parent.children = {}
        self.parent.children[self.child_key(page_bytes)] = self

    def leave(self, page_bytes: int) -> None:
        """Undo `adopt`; the node has no parent any more."""
        assert self.parent is not None
        del self.parent.children[self.child_key(page_bytes)]
        self.parent.children, self.parent = self.parent.children or NO_CHILDREN, None

    def __lt__(self, other: Node) -> bool:
        """The deeper node first; asked only of halves of one node, which are equal in rank and
        birth."""
        at = self.parent
        while at is not None and at is not other:
            at = at.parent
        return at is other

    def __repr__(self) -> str:
        key, space = self.key, "" if self.namespace is None else f" in {self.namespace!r}"
        shown = ", ".join(map(str, key[:6])) + (", ..." if len(key) > 6 else "")
        return f"Node {self.id} [{shown}]{space}, {len(key)} tokens, {self.lock_count} locks, {self.hit_count} hits"


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

    parts: Sequence[Slots]
    node: Node
    length: int

    @property
    def slots(self) -> torch.Tensor:
        if len(self.parts) > 1:
            self.parts = [join(self.parts)]
        return as_tensor(self.parts[0])


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


def as_tensor(slots: Slots) -> torch.Tensor:
    """The same memory as an int64 tensor."""
    if isinstance(slots, torch.Tensor):
        return slots
    return (
        torch.frombuffer(slots, dtype=torch.int64) if slots else torch.empty(0, dtype=torch.int64)
    )


def join(parts: Sequence[Slots]) -> torch.Tensor:
    """Slots of several nodes laid end to end in new memory."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)  # type: ignore[arg-type]
    return as_tensor(bytearray().join(parts))  # type: ignore[arg-type]


def cut(slots: Slots, start: int, stop: int) -> Slots:
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
    given = tokens
    try:
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.detach().cpu().numpy()
        elif not isinstance(tokens, np.ndarray):
            tokens = np.array(tokens if isinstance(tokens, Sequence) else list(tokens))
    except (
        TypeError,
        ValueError,
    ):  # no sequence, lists of unequal lengths, a type that NumPy lacks
        raise ArgumentError(name, given, "must be one line of integers") from None
    tokens = tokens if tokens.size else tokens.astype(np.int64)
    if (
        tokens.dtype.kind not in "iu"
        or tokens.ndim != 1
        or (tokens.dtype.kind == "u" and (tokens >= 2**63).any())
    ):
        raise ArgumentError(name, given, "must be one line of integers, below 2**63")
    return np.ascontiguousarray(tokens, np.int64)


def typed(namespace: Hashable) -> tuple:
    """A namespace as a dictionary key that equals another's only for equal types too (``1 == 1.0 ==
    True`` in Python).

    Examples
    --------
    >>> typed(1) == typed(True), typed(("a", "b")) == typed(("a", "b")), typed(("ab", "c")) == typed(("a", "bc"))
    (False, True, False)
    """
    if isinstance(namespace, tuple):
        return (type(namespace), *map(typed, namespace))
    if isinstance(namespace, frozenset):
        return (type(namespace), frozenset(map(typed, namespace)))
    return (type(namespace), namespace)
