"""Floor 3: which slots exist, who holds them, and where a request's slots are written down.

`PagedAllocator` hands out pages of slots, `RequestTable` keeps each request's slots in order, and
`KVPool` or `MLAPool` hold what the slots stand for.
"""

from __future__ import annotations

from minikv.memory.allocator import PagedAllocator
from minikv.memory.free_list import AllocatorState
from minikv.memory.pools import DEFAULT_SHARE, KVPool, MLAPool, plan_size
from minikv.memory.table import RequestTable

__all__ = [
    "DEFAULT_SHARE",
    "AllocatorState",
    "KVPool",
    "MLAPool",
    "PagedAllocator",
    "RequestTable",
    "plan_size",
]
