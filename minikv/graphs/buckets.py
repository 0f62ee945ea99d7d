"""Which batch sizes get a graph, and which of them a batch runs in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from minikv.errors import ArgumentError
from minikv.numbers import whole

PADDED = (1, 2, 4, *range(8, 161, 8))
EXACT = (*range(1, 33), 64, 96, 128, 160)


def capture_batch_sizes(
    max_requests: int,
    *,
    sizes: Iterable[int] | None = None,
    cap: int | None = None,
    padding: bool = True,
) -> list[int]:
    """The batch sizes to capture, ascending.

    Parameters
    ----------
    max_requests
        Largest batch that will ever come. Where the sizes reach beyond it, it and the size below
        get graphs of their own: a full engine, and a full engine but one, are the batches that
        matter most.
    sizes
        Instead of the usual ones; duplicates and sizes below 1 are dropped.
    cap
        Nothing above this, to save memory and time.
    padding
        Whether a batch may run in a larger size. Without padding every size up to 32 gets its own
        graph.

    Raises
    ------
    ArgumentError
        For sizes of which none is left, and numbers that are not whole or below 1.

    Examples
    --------
    >>> capture_batch_sizes(10)
    [1, 2, 4, 8, 9, 10]
    >>> capture_batch_sizes(160, cap=16), capture_batch_sizes(64, sizes=[0, 1, 1, 2])
    ([1, 2, 4, 8, 16], [1, 2])
    """
    max_requests = whole("max_requests", max_requests, 1)
    given = PADDED if padding else EXACT
    if sizes is not None:
        given = tuple(whole("sizes", size) for size in sizes)
    chosen = set(given)
    if max(given, default=0) > max_requests:
        chosen |= {max_requests - 1, max_requests}
    limit = max_requests if cap is None else min(whole("cap", cap, 1), max_requests)
    kept = sorted(size for size in chosen if 1 <= size <= limit)
    if not kept:
        remedy = f"leaves no batch size of 1 to {limit}; name one, or pass None for the usual ones"
        raise ArgumentError("sizes", sizes, remedy)
    return kept


def pick_size(sizes: Sequence[int], batch_size: int, padding: bool = True) -> int | None:
    """The smallest of the ascending `sizes` that holds a batch; None when none does, or none
    exactly without padding.

    An empty batch runs in the smallest size whatever `padding` says: it is all padding.
    """
    at = bisect_left(sizes, int(batch_size))
    if at == len(sizes) or not (padding or batch_size == 0 or sizes[at] == batch_size):
        return None
    return sizes[at]
