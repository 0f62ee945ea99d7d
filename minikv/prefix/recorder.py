"""What happened to a tree, one event at a time, and the tree after each of them: what the
animations play."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minikv.prefix.eviction import is_candidate
from minikv.prefix.node import Node, Slots, as_tensor, as_tokens

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

    @classmethod
    def of(
        cls, kind: str, node: Node, tokens: Any = None, slots: Slots | None = None, **news: Any
    ) -> Event:
        """An event from live values: arrays become tuples."""
        brought = () if slots is None else tuple(as_tensor(slots).tolist())
        return cls(
            kind, node.id, () if tokens is None else tuple(tokens.tolist()), slots=brought, **news
        )


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
    >>> [event.kind for event in recorder.events], [len(list(frame.tree.nodes())) for frame in recorder.frames]
    (['insert', 'split', 'match'], [0, 1, 2, 2])
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache, self._start, self.events = cache, cache, list[Event]()

    def __enter__(self) -> Recorder:
        self._start, self.events = copy_tree(self._cache), []
        self._cache.recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.recorders.remove(self)

    @property
    def frames(self) -> list[Frame]:
        tree = copy_tree(self._start)
        frames = [Frame(None, copy_tree(tree))]
        for event in self.events:
            apply(tree, event)
            frames.append(Frame(event, copy_tree(tree)))
        return frames

    def replay(self) -> RadixCache:
        """A copy of the tree before the recording, with all events done to it."""
        tree = copy_tree(self._start)
        for event in self.events:
            apply(tree, event)
        return tree


def apply(cache: RadixCache, event: Event) -> None:
    """Do to `cache` what the event says; it must be as it was when the event was recorded."""
    node = next((node for node in cache.nodes() if node.id == event.node), cache.root)
    if event.kind == "match":
        cache.match_prefix(event.tokens, event.namespace)
    elif event.kind == "insert":
        slots = np.array((0,) * event.length + event.slots, np.int64)
        cache._insert(as_tokens(event.tokens), slots, event.namespace, event.priority, event.known)
    elif event.kind == "split":
        cache.split(node, event.length)
    elif event.kind == "evict":
        cache.remove(node)
    elif event.kind == "reset":
        cache.reset()
    else:
        {"lock": cache.lock, "unlock": cache.unlock}[event.kind](node)


def copy_tree(cache: RadixCache) -> RadixCache:
    """The same tree on the CPU, without allocator and table; both go on alike."""
    copy = type(cache)(cache.page_size, eviction=cache.eviction, disable=cache.disable)
    copy._fresh_page = cache._fresh_page
    copy.clock, copy.stats = cache.clock, replace(cache.stats)
    copy.evictable_size, copy.protected_size = cache.evictable_size, cache.protected_size
    copy.root.lock_count = cache.root.lock_count
    twins = {id(cache.root): copy.root}
    for node in cache.nodes():
        slots = copy.hold(node.slots.cpu().numpy())
        twin = twins[id(node)] = Node(
            node.data, slots, twins[id(node.parent)], node.namespace, node.id
        )
        for name in ("lock_count", "hit_count", "last_use", "birth", "priority"):
            setattr(twin, name, getattr(node, name))
        twin.adopt(copy.page_bytes)
    for twin in twins.values():
        if is_candidate(twin):
            copy.queue.push(twin)
    return copy
