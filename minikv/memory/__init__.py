"""Floor 1: which slots exist, who holds them, and where a request's slots are written down.

`PagedAllocator` hands out pages of slots, `RequestTable` keeps each request's slots in order, and `KVPool` or `MLAPool`
hold what the slots stand for.
"""

from __future__ import annotations

from minikv.memory.allocator import AllocatorState, PagedAllocator

__all__ = ["AllocatorState", "PagedAllocator"]
