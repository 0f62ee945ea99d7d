"""How pages change hands: from a caller or a request to the tree, and back to the allocator.

A request is any object with `token_ids`, `computed` (tokens whose K and V are written), `row`,
`node` (locked for it), `protected_len` (its first tokens, whose pages are the tree's) and
`namespace`. With an attribute `cache` of False nothing of it is stored; a `priority` is passed on
to `insert`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minikv.errors import ArgumentError, StateError
from minikv.prefix.node import Slots, as_tokens, join

if TYPE_CHECKING:
    from minikv.prefix.tree import RadixCache


def cache_unfinished(cache: RadixCache, request: Any) -> None:
    """After a chunk: the tree takes the request's whole pages, and the request goes on with the
    tree's.

    The request's own copies of what others had cached meanwhile are freed, and its row points at
    the tree's slots. Its new node is locked, `protected_len` becomes the aligned length; the tail
    of less than a page stays its own. Calling it twice changes nothing.

    Raises
    ------
    ArgumentError, StateError
        For a request that cannot be stored or ended, before anything is changed.
    """
    table = cache.table
    node = request.node
    known = request.protected_len
    for name in ("computed", "protected_len"):
        value = getattr(request, name)
        if value < 0 or (table is not None and value > table.max_context):
            raise ArgumentError(
                name, value, "must count tokens of the request, as many as a row holds at most"
            )
    if table is not None and request.row and not table.is_held(request.row):
        raise ArgumentError(
            "row", request.row, "is not in use; a request's row comes from the table's alloc()"
        )
    if node is not None:
        if node.lock_count == (node is cache.root):
            raise StateError(
                f"{node} is not locked or was evicted: while a request runs, keep its node locked"
            )
        cache.way_up(node)
    whole = request.computed // cache.page_size * cache.page_size
    ended = table is not None and not request.row
    if whole <= known or ended or cache.disable or not getattr(request, "cache", True):
        return
    tokens = as_tokens(request.token_ids[:whole])
    if tokens.size < whole:
        raise ArgumentError(
            "computed", request.computed, f"is more than the request's {tokens.size} tokens"
        )
    row = None if table is None else table.table[request.row]
    priority = getattr(request, "priority", 0)
    path, present = cache.add(tokens, row, request.namespace, priority, known)
    if row is not None and present > known:
        give_back(cache, row[known:present])
        row[known:present] = join([node.stored for node in path[1:]])[known:present]
    request.node, request.protected_len = path[-1], whole
    cache.lock(path[-1])  # first: the tokens on the way are never evictable in between
    if node is not None:
        cache.unlock(node)


def cache_finished(cache: RadixCache, request: Any) -> None:
    """The same with all `computed` tokens; then the tail, anything reserved past it and the row are
    freed.

    Slots that the row holds beyond `computed` are reserved ones. The request's node is unlocked,
    and it holds nothing any more: `row` and `protected_len` are 0, `node` is None. Retraction and
    abort are this call too.
    """
    cache_unfinished(cache, request)
    table = cache.table
    if table is not None and request.row:
        end = table.end(request.row, request.computed)
        give_back(cache, table.table[request.row, request.protected_len : end])
        table.free([request.row])
    if request.node is not None:
        cache.unlock(request.node)
    request.row, request.node, request.protected_len = 0, None, 0


def given(slots: Any, count: int) -> np.ndarray | torch.Tensor:
    """The first `count` of the slots that a caller passed: a GPU's tensor as it is, else int64."""
    if not getattr(slots, "is_cuda", False):
        slots = as_tokens(slots, "slots")
    elif slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("slots", slots, "must be one line of integers")
    if len(slots) < count:
        raise ArgumentError(
            "slots", slots, f"holds {len(slots)} slots; {count} tokens need one each"
        )
    return slots[:count]


def own(cache: RadixCache, slots: Any, start: int, stop: int) -> Slots:
    """A copy of ``slots[start:stop]`` for a node; for None, the slots of fresh pages."""
    if slots is not None:
        return copy(cache, slots[start:stop])
    if cache.allocator is None:
        return copy(cache, np.arange(stop - start) + cache.fresh_page * cache.page_size)
    fresh = cache.allocator.alloc(stop - start)
    if fresh is None:
        left = f"the allocator has {cache.allocator.available_size()} tokens left"
        raise StateError(f"{left}, an insert without slots needs {stop - start}; evict first")
    return copy(cache, fresh)


def copy(cache: RadixCache, slots: Any) -> Slots:
    """A copy of `slots` for a node; pages that the tree numbers itself come after them."""
    if cache.device.type != "cpu":
        return torch.as_tensor(slots).to(cache.device, torch.int64, copy=True)
    slots = as_tokens(slots, "slots")
    if cache.allocator is None and slots.size:
        cache.fresh_page = max(cache.fresh_page, int(slots.max()) // cache.page_size + 1)
    return bytearray(slots.data)


def give_back(cache: RadixCache, slots: np.ndarray | torch.Tensor) -> None:
    """Free slots of whole pages; without an allocator there is nothing to do."""
    if cache.allocator is not None and len(slots):
        cache.allocator.free(torch.as_tensor(slots).to(cache.device, torch.int64))
