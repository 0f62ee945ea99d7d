"""What must hold of a tree at any moment, checked in full and reported by node and slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minikv.errors import StateError
from minikv.prefix.eviction import is_candidate
from minikv.prefix.node import Node, typed

if TYPE_CHECKING:
    from minikv.memory import PagedAllocator
    from minikv.prefix.tree import RadixCache


def check(cache: RadixCache, owned: Iterable[Any] = ()) -> None:
    """Raise a `StateError` that names what breaks an invariant, by node and slot.

    Checked are each node (key and slots of equal, whole length; filed in its parent under its own
    first page; of its parent's namespace; locked no more than its parent), the two sizes, the
    eviction queue, and all slots: none twice, and with an allocator whole pages, none both cached
    and free, and tree + free + owned = all pages.

    Parameters
    ----------
    owned
        Slots that running requests hold themselves (not the tree's): a tensor, or slots, or tensors
        of slots. That all pages add up is checked when it is given, or when no node is locked and
        no row is taken.
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
    if not node.length or node.length % cache.page_size:
        yield f"{node}: its key is not whole pages of {cache.page_size}"
    if len(node.slots) != node.length:
        yield f"{node}: {len(node.slots)} slots for {node.length} tokens"
    if node.parent is not parent:
        yield f"{node}: a child of {parent}, but its parent is {node.parent}"
    if key != parent.key_of(node, cache.page_size):
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
        have, want = getattr(cache, name), sum(node.length for node in which)
        if have != want:
            ids = ", ".join(str(node.id) for node in which[:20]) or "none"
            yield f"{name} is {have}, but its nodes (ids {ids}) hold {want} tokens"
    if cache.root.lock_count < 1:
        yield f"{cache.root}: {cache.root.lock_count} locks; the root is always locked"
    in_time = {id(node) for rank, _, node in cache.queue.heap if rank <= cache.queue.rank(node)}
    for node in nodes:
        if is_candidate(node) and id(node) not in in_time:
            yield f"{node}: an unlocked leaf that the eviction queue does not know or puts too late"


def _of_slots(cache: RadixCache, nodes: list[Node], owned: Iterable[Any]) -> Iterable[str]:
    size, allocator = cache.page_size, cache.allocator
    holder: dict[int, Node] = {}
    for node in nodes:
        for page in node.slots.reshape(-1, size).tolist():
            for slot in page:
                if slot in holder:
                    yield f"slot {slot} is in {holder[slot]} and in {node}"
                holder[slot] = node
            if allocator is None:
                continue
            if page[0] % size or page != list(range(page[0], page[0] + size)):
                yield f"{node}: slots {page} are not one page"
            if not size <= page[0] < (allocator.num_pages + 1) * size:
                yield f"{node}: slot {page[0]} is outside the allocator's pages"
    if allocator is not None:
        yield from _of_pages(cache, allocator, holder, owned)


def _of_pages(
    cache: RadixCache, allocator: PagedAllocator, holder: dict[int, Node], owned: Iterable[Any]
) -> Iterable[str]:
    """Each page has one use; `holder` says in which node a cached slot is."""
    size = cache.page_size
    parts = [owned] if isinstance(owned, torch.Tensor | np.ndarray) else owned
    mine = [slot for part in parts for slot in torch.as_tensor(part).reshape(-1).tolist()]
    for slot in mine:
        if not size <= slot < (allocator.num_pages + 1) * size:
            yield f"owned slot {slot} is outside the allocator's pages"
    by_use = {
        "cached": {slot // size for slot in holder},
        "owned by a request": {slot // size for slot in mine},
        "free": set(allocator.free_pages.tolist()),
    }
    rows_taken = cache.table is not None and cache.table.available_size() < cache.table.max_requests
    idle = cache.root.lock_count == 1 and not rows_taken
    all_known = idle or not (isinstance(owned, tuple) and not owned)
    for page in range(1, allocator.num_pages + 1):
        uses = [use for use, pages in by_use.items() if page in pages]
        if len(uses) > 1:
            node = holder.get(page * size)
            where = "" if node is None else f", in {node}"
            yield f"slot {page * size} (page {page}) is both {' and '.join(uses)}{where}"
        if not uses and all_known:
            lost = "neither free nor cached nor owned by a request"
            yield f"slot {page * size} (page {page}) is {lost}"
