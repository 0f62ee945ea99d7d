"""What happened to a tree, one event at a time, and the tree after each: animations play them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minikv.prefix import lifecycle
from minikv.prefix.node import Node, Slots, as_tokens, join

if TYPE_CHECKING:
    from minikv.prefix.tree import RadixCache


@dataclass(frozen=True)
class Event:
    """One change of a tree, as plain data.

    `kind` is ``"match"``, ``"insert"``, ``"split"``, ``"lock"``, ``"unlock"``, ``"evict"`` or
    ``"reset"``; `node` the id of the node it ends at (0: the root; of a split: the lower half).
    `length` counts the tokens matched, present before an insert, split off above, or evicted;
    `slots` are those that an insert brought in. The first `known` tokens of an insert were not
    counted as a use.
    """

    kind: str
    node: int
    tokens: tuple[int, ...] = ()
    namespace: Hashable = None
    length: int = 0
    slots: tuple[int, ...] = ()
    priority: int = 0
    known: int = 0


@dataclass(frozen=True)
class Frame:
    """A tree (its own copy, without an allocator) right after `event`; the first frame has none."""

    event: Event | None
    tree: RadixCache


class Recorder:
    """Collects the events of a tree between entering and leaving it as a context manager.

    Attributes
    ----------
    events
        What happened, in order. A call may give several: a match that splits a node gives
        ``split``, ``match``.
    frames
        The tree before the first event and after each, as a list of :class:`Frame`: the events
        played to copies of the tree, so recording itself costs no more than the events.

    Examples
    --------
    >>> from minikv.prefix import RadixCache
    >>> cache = RadixCache(page_size=1)
    >>> with cache.record() as recorder:
    ...     _ = cache.insert([1, 2, 3])
    ...     _ = cache.match_prefix([1, 2])
    >>> [event.kind for event in recorder.events]
    ['insert', 'split', 'match']
    >>> [len(list(frame.tree.nodes())) for frame in recorder.frames]
    [0, 1, 2, 2]
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache = self._start = cache
        self.events: list[Event] = []

    def __enter__(self) -> Recorder:
        self._start = copy_tree(self._cache)
        self.events = []
        self._cache.recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.recorders.remove(self)

    def note(
        self, kind: str, node: Node, tokens: Any = None, slots: Slots | None = None, **news: Any
    ) -> None:
        """Append an event, made of live values: arrays become tuples."""
        told = () if tokens is None else tuple(tokens.tolist())
        brought = () if slots is None else tuple(join([slots]).tolist())
        self.events.append(Event(kind, node.id, told, slots=brought, **news))

    @property
    def frames(self) -> list[Frame]:
        frames = [Frame(None, copy_tree(self._start))]
        for event in self.events:
            tree = copy_tree(frames[-1].tree)
            apply(tree, event)
            frames.append(Frame(event, tree))
        return frames

    def replay(self) -> RadixCache:
        """A copy of the tree before the recording, with all events done to it."""
        return self.frames[-1].tree


def apply(cache: RadixCache, event: Event) -> None:
    """Do to `cache` what the event says; it must be as it was when the event was recorded."""
    node = next((node for node in cache.nodes() if node.id == event.node), cache.root)
    if event.kind == "match":
        cache.match_prefix(event.tokens, event.namespace)
    elif event.kind == "insert":
        slots = np.array((0,) * event.length + event.slots, np.int64)
        cache.add(as_tokens(event.tokens), slots, event.namespace, event.priority, event.known)
    elif event.kind == "split":
        cache.split(node, event.length)
    elif event.kind == "evict":
        cache.remove(node)
    elif event.kind == "reset":
        cache.reset()
    else:  # "lock" or "unlock"
        getattr(cache, event.kind)(node)


def copy_tree(cache: RadixCache) -> RadixCache:
    """The same tree on the CPU, without allocator and table; both go on alike."""
    copy = type(cache)(cache.page_size, eviction=cache.eviction, disable=cache.disable)
    for name in ("clock", "fresh_page", "evictable_size", "protected_size"):
        setattr(copy, name, getattr(cache, name))
    copy.stats = replace(cache.stats)
    copy.root.lock_count = cache.root.lock_count
    twins = {cache.root.id: copy.root}
    for node in (cache.root, *cache.nodes()):
        for child in node.children.values():
            slots = lifecycle.copy(copy, child.slots.cpu())
            twin = Node(child.data, slots, twins[node.id], child.namespace, child.id)
            twin.count_like(child)
            twins[node.id].adopt(twin, copy.page_size)
            twins[child.id] = twin
    for twin in twins.values():
        copy.queue.push(twin)
    return copy
