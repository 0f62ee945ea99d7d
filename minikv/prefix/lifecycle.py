"""How a request's pages become the tree's while it runs and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from minikv.errors import ArgumentError, StateError
from minikv.prefix.node import Node, Slots, as_tensor, as_tokens, join

if TYPE_CHECKING:
    from minikv.memory import PagedAllocator, RequestTable


class RequestLife:
    """The part of :class:`.RadixCache` that a scheduler calls for a request after each chunk and at
    its end.

    A request is any object with `token_ids`, `computed` (tokens whose K and V are written), `row`,
    `node` (locked for it), `protected_len` (its first tokens, whose pages are the tree's) and
    `namespace`. With an attribute `cache` of False nothing of it is stored; a `priority` is passed
    on to `insert`.
    """

    page_size: int
    allocator: PagedAllocator | None
    table: RequestTable | None
    disable: bool
    device: torch.device
    lock: Any
    unlock: Any
    root: Node
    _live: Any
    _insert: Any

    def cache_unfinished(self, request: Any) -> None:
        """After a chunk: the tree takes the request's whole pages, and the request goes on with the
        tree's.

        Of what others had cached meanwhile its own copies are freed, and its row points at the
        tree's slots. Its new node is locked, `protected_len` becomes the aligned length; the tail
        of less than a page stays its own. Calling it twice changes nothing.
        """
        if path := self._store(request):
            before, request.node = request.node, path[-1]
            self.lock(path[-1])
            if before is not None:
                self.unlock(before)

    def cache_finished(self, request: Any) -> None:
        """The same with all `computed` tokens; then the tail, anything reserved past it and the row
        are freed.

        Reserved is what the row holds beyond `computed`. The request's node is unlocked, and it
        holds nothing any more: `row` and `protected_len` are 0, `node` is None. Retraction and
        abort are this call too.
        """
        self._refuse(request)
        self._store(request)
        if self.table is not None and request.row:
            end = self.table.end(request.row, request.computed)
            self._free(self.table.table[request.row, request.protected_len : end])
            self.table.free([request.row])
        if request.node is not None:
            self.unlock(request.node)
        request.row, request.node, request.protected_len = 0, None, 0

    def _store(self, request: Any) -> list[Node]:
        """Insert what is new of a request's whole pages; returns the path to their node, empty when
        nothing is new."""
        known, whole = request.protected_len, request.computed // self.page_size * self.page_size
        gone = self.table is not None and not request.row
        if whole <= known or gone or self.disable or not getattr(request, "cache", True):
            return []
        self._refuse(request)
        row = None if self.table is None else self.table.table[request.row]
        tokens = as_tokens(request.token_ids[:whole])
        if tokens.size < whole:
            raise ArgumentError(
                "computed", request.computed, f"is more than the request's {tokens.size} tokens"
            )
        path, present = self._insert(
            tokens, row, request.namespace, getattr(request, "priority", 0), known
        )
        if row is not None and present > known:
            self._free(row[known:present])
            row[known:present] = join([node.stored for node in path])[known:present]
        request.protected_len = whole
        return path

    def _refuse(self, request: Any) -> None:
        """Raise for a request that cannot be stored or ended, before anything is changed."""
        for name, value in (
            ("computed", request.computed),
            ("protected_len", request.protected_len),
        ):
            if value < 0 or (self.table is not None and value > self.table.max_context):
                raise ArgumentError(
                    name, value, "must count tokens of the request, as many as a row holds at most"
                )
        if self.table is not None and request.row and not self.table.is_held(request.row):
            raise ArgumentError(
                "row", request.row, "is not in use; a request's row comes from the table's alloc()"
            )
        node = request.node
        if node is not None:
            if node.lock_count == (node is self.root):
                raise StateError(
                    f"{node} is not locked or was evicted: while a request runs, keep its node locked"
                )
            self._live(node)

    def _free(self, slots: Slots) -> None:
        if self.allocator is not None and len(slots):
            self.allocator.free(as_tensor(slots).to(self.device, torch.int64))
