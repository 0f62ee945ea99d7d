"""What must hold of a tree at any moment, checked in full and reported by node and slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minikv.errors import StateError
from minikv.prefix.eviction import is_candidate
from minikv.prefix.node import TOKEN_BYTES, Node, typed

if TYPE_CHECKING:
    from minikv.prefix.tree import RadixCache


def check(cache: RadixCache, owned: Iterable[Any] = ()) -> None:
    """Raise a `StateError` that lists what is wrong; see :meth:`.RadixCache.check`.

    Checked are each node (key and slots of equal, whole length; filed in its parent under its own
    first page; of its parent's namespace; locked no more than its parent), the two sizes, the
    eviction queue, and all slots: none twice, and with an allocator whole pages, none both cached
    and free, and tree + free + owned = all pages.
    """
    nodes = list(cache.nodes())
    edges = [(parent, *edge) for parent in (cache.root, *nodes) for edge in parent.children.items()]
    problems = [problem for edge in edges for problem in _of_edge(cache, *edge)]
    problems += _of_sizes(cache, nodes)
    if not problems:  # else keys and slots may not even be of one length
        problems = list(_of_slots(cache, nodes, owned))
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateError("the prefix cache is inconsistent:\n  " + "\n  ".join(problems[:8]) + more)


def _of_edge(cache: RadixCache, parent: Node, key: Hashable, node: Node) -> Iterable[str]:
    tokens = len(node.data) // TOKEN_BYTES
    if not tokens or tokens % cache.page_size:
        yield f"{node}: its key is not whole pages of {cache.page_size}"
    if len(node.slots) != tokens:
        yield f"{node}: {len(node.slots)} slots for {tokens} tokens"
    if node.parent is not parent:
        yield f"{node}: a child of {parent}, but its parent is {node.parent}"
    if key != node.child_key(cache.page_bytes):
        yield f"{node}: filed in {parent} under a key that is not its first page"
    if parent is not cache.root and typed(parent.namespace) != typed(node.namespace):
        yield f"{node}: under {parent}, of another namespace"
    if not 0 <= node.lock_count <= parent.lock_count:
        yield f"{node}: {node.lock_count} locks under {parent} with {parent.lock_count}"


def _of_sizes(cache: RadixCache, nodes: list[Node]) -> Iterable[str]:
    for name, which in (
        ("evictable_size", [node for node in nodes if not node.lock_count]),
        ("protected_size", [node for node in nodes if node.lock_count]),
    ):
        have, want = getattr(cache, name), sum(len(node.data) // TOKEN_BYTES for node in which)
        if have != want:
            ids = ", ".join(str(node.id) for node in which[:20]) or "none"
            yield f"{name} is {have}, but its nodes (ids {ids}) hold {want} tokens"
    if cache.root.lock_count < 1:
        yield f"{cache.root}: {cache.root.lock_count} locks; the root is always locked"
    queued = {id(node) for _, _, node in cache.queue.heap}
    for node in nodes:
        if is_candidate(node) and id(node) not in queued:
            yield f"{node}: an unlocked leaf that the eviction queue does not know"


def _of_slots(cache: RadixCache, nodes: list[Node], owned: Iterable[Any]) -> Iterable[str]:
    size, allocator = cache.page_size, cache.allocator
    slots = (
        np.concatenate([_numbers(node.slots) for node in nodes]) if nodes else np.empty(0, np.int64)
    )
    holder = np.repeat(np.arange(len(nodes)), [len(node.slots) for node in nodes])
    order = np.argsort(slots, kind="stable")
    for i in np.flatnonzero(np.diff(slots[order]) == 0):
        yield f"slot {slots[order[i]]} is in {nodes[holder[order[i]]]} and in {nodes[holder[order[i + 1]]]}"
    if allocator is None:
        return
    pages = slots.reshape(-1, size)
    torn = (pages[:, :1] % size != 0) | (pages != pages[:, :1] + np.arange(size))
    for i in np.flatnonzero(torn.any(1)):
        yield f"{nodes[holder[i * size]]}: slots {pages[i].tolist()} are not one page"
    cached = pages[:, 0] // size
    for i in np.flatnonzero((cached < 1) | (cached > allocator.num_pages)):
        yield f"{nodes[holder[i * size]]}: slot {pages[i, 0]} is outside the allocator's pages"
    parts = [owned] if isinstance(owned, torch.Tensor | np.ndarray) else list(owned)
    given = np.concatenate([np.empty(0, np.int64), *(_numbers(part).reshape(-1) for part in parts)])
    mine = np.unique(given // size)
    for slot in given[(given < size) | (given >= (allocator.num_pages + 1) * size)]:
        yield f"owned slot {slot} is outside the allocator's pages"
    free = _numbers(allocator.free_pages)
    for one, other, names in (
        (cached, free, "both cached and free"),
        (cached, mine, "both cached and owned by a request"),
        (mine, free, "both owned by a request and free"),
    ):
        for page in np.intersect1d(one, other):
            where = np.flatnonzero(cached == page)
            by = f", in {nodes[holder[where[0] * size]]}" if len(where) else ""
            yield f"slot {page * size} (page {page}) is {names}{by}"
    rows = cache.table
    idle = cache.root.lock_count == 1 and (
        rows is None or rows.available_size() == rows.max_requests
    )
    if idle or not (isinstance(owned, tuple) and not owned):
        lost = np.setdiff1d(
            np.arange(1, allocator.num_pages + 1), np.concatenate([cached, mine, free])
        )
        for page in lost:
            yield f"slot {page * size} (page {page}) is neither free nor cached nor owned by a request"


def _numbers(values: Any) -> np.ndarray:
    return (
        values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    ).astype(np.int64)
