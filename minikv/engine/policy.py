"""In which order waiting requests are looked at, and which of them had better wait for another's
cache.

Longest prefix match and depth-first weight come from SGLang (Zheng et al. 2024, "RadixAttention");
so does letting one of several requests with a common, uncached beginning go first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from minikv.engine.request import Request

POLICIES = ("fcfs", "lpm", "dfs-weight")
LPM_LIMIT = 128  # matching every waiting request costs more than it brings above this many
SHARED = 32  # so many uncached tokens in common are worth a step's wait

# the tree node that a request's prefix ends at, and the prefix's length
Probe = Callable[[Request], tuple[Any, int]]


def order(policy: str, waiting: Sequence[Request], probe: Probe) -> list[Request]:
    """`waiting` in the order of admission; ties keep their order of arrival.

    Parameters
    ----------
    policy
        ``"fcfs"`` (first come), ``"lpm"`` (longest cached prefix first; above 128 waiting: fcfs) or
        ``"dfs-weight"`` (depth first through the tree, subtrees with more waiting requests first).
    waiting
        Requests that hold nothing.
    probe
        Looks a request up in the prefix cache without counting it as a use.
    """
    arrived = sorted(waiting, key=lambda r: r.arrival)
    if policy == "lpm" and len(arrived) <= LPM_LIMIT:
        return sorted(arrived, key=lambda r: -probe(r)[1])
    if policy == "dfs-weight":
        return _depth_first(arrived, probe)
    return arrived


def _depth_first(waiting: Sequence[Request], probe: Probe) -> list[Request]:
    here: dict[Any, list[Request]] = defaultdict(list)
    weight: dict[Any, int] = defaultdict(int)
    below: dict[Any, dict[Any, None]] = defaultdict(dict)  # insertion-ordered sets
    roots: dict[Any, None] = {}
    for r in waiting:
        node = probe(r)[0]
        here[node].append(r)
        while node is not None:
            weight[node] += 1
            if node.parent is None:
                roots[node] = None
            else:
                below[node.parent][node] = None
            node = node.parent
    result: list[Request] = []
    stack = [(root, False) for root in reversed(roots)]
    while stack:  # a long conversation makes a deep tree: no recursion
        node, children_done = stack.pop()
        if children_done:
            result += sorted(here.get(node, ()), key=lambda r: -probe(r)[1])
            continue
        stack.append((node, True))
        heaviest_last = sorted(below.get(node, ()), key=lambda child: weight[child])
        stack += [(child, False) for child in heaviest_last]
    return result


def shared_key(cache: Any, request: Request, node: Any, cached: int) -> tuple | None:
    """Equal for two requests exactly when they have the same cached prefix, which ends at `node`,
    and share the next 32 (page-rounded) tokens.

    None when the request is too short or is not cached: then it neither waits nor is waited for.
    (The node names the cached prefix; the namespace is for nodes at the root.)
    """
    end = (cached + SHARED + cache.page_size - 1) // cache.page_size * cache.page_size
    if cache.disable or not request.cache or request.length < end:
        return None
    return id(node), request.namespace, request.token_ids[cached:end].tobytes()
