"""How a decode batch is cut into programs: one row of work per program, in buffers that a captured
graph can read.

A long request is read by many programs, each over one part of its keys, and their results are
merged. What to cut, and where, follows from the lengths and from how many programs the chip runs at
once; uneven batches profit most when their longest items start first. FlashInfer's decode scheduler
(Ye et al., 2025) plans on the host in the same spirit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minikv.attention.tiles import DecodeTiles, decode_tiles_of, processors_of
from minikv.errors import ArgumentError, StateError
from minikv.kernels.staging import Stage
from minikv.numbers import host_integers, whole

OPEN_END = 2**31 - 1


class AttentionPlan:
    """Work items, partial results and their log-sum-exp for decode batches of up to `max_requests`
    requests.

    Serves every batch size up to `max_requests`, so one plan can be shared by all graphs and layers
    that run one after another. A launch's grid depends on the batch size alone; items that are not
    needed exit early. What a plan says is only about speed: the last item of a request ends where
    the request ends now, so an outdated plan stays correct.

    Parameters
    ----------
    max_requests
        Largest batch.
    q_heads
        Query heads.
    k_cache, v_cache
        The pool of one layer: head sizes, dtype and device are taken from it.
    num_kv_splits
        n: each request is cut into n parts of ``ceil(length / n)`` keys rounded up to the tile,
        whatever else is in the batch; the device works this out itself, and `update` only notes the
        batch size. None: by length and chip.
    sliding_window
        The window of the layers that use the plan (keys seen minus one), so that no item lies left
        of it; -1 for none.

    Attributes
    ----------
    items
        int32 [capacity, 4]: request (-1: nothing to do), first key, end, row of `partial` (-1:
        write the result). None with a fixed number of splits, as `merges`.
    merges
        int32 [entries, 4]: request, first row of `partial`, how many rows (0: nothing to do),
        unused.
    partial, partial_lse
        fp32 [rows, q_heads, d_v] and [rows, q_heads] (log-sum-exp in powers of two).

    Examples
    --------
    A chip of 4 processors has room for more programs than three short requests need, so the long
    one is cut:

    >>> pool = torch.zeros(4096, 2, 64)
    >>> plan = AttentionPlan(4, 4, pool, pool, processors=4)
    >>> plan.update(torch.tensor([700, 100, 0]))
    AttentionPlan(3 requests of 4 in 4 items, 1 merged)
    >>> plan.items[:4].tolist()
    [[0, 0, 384, 0], [0, 384, 2147483647, 1], [1, 0, 2147483647, -1], [2, 0, 2147483647, -1]]
    """

    def __init__(
        self,
        max_requests: int,
        q_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_kv_splits: int | None = None,
        sliding_window: int = -1,
        processors: int | None = None,
    ) -> None:
        self.max_requests = whole("max_requests", max_requests, 1)
        if num_kv_splits is not None and num_kv_splits < 1:
            remedy = "must be at least 1, or None to choose by length"
            raise ArgumentError("num_kv_splits", num_kv_splits, remedy)
        self.q_heads, self.d_v = q_heads, v_cache.shape[2]
        self.num_kv_splits, self.sliding_window = num_kv_splits, sliding_window
        self.tiles = decode_tiles_of(q_heads, k_cache, v_cache)
        self.lanes = self.tiles.programs(q_heads, k_cache.shape[1])
        self.processors = processors or processors_of(k_cache.device)
        self.batch: int | None = None
        self.items: Tensor | None = None
        self.merges: Tensor | None = None
        self._planned = b""
        device, sizes = k_cache.device, range(1, max_requests + 1)
        capacity, entries = max(map(self.capacity, sizes)), max(map(self.entries, sizes))
        self._items = rows = capacity
        if num_kv_splits is None:
            # A request that is cut takes a row per part: two rows at least, one of them besides.
            rows = max(min(self.capacity(b), 2 * (self.capacity(b) - b)) for b in sizes)
            self._stage = Stage(4 * (capacity + entries), device, torch.int32)
            self.items, self.merges = self._stage.block.view(-1, 4).split([capacity, entries])
        self.partial = torch.empty((rows, q_heads, self.d_v), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty((rows, q_heads), dtype=torch.float32, device=device)

    def tiles_for(self, batch: int) -> DecodeTiles:
        """The tiles that a batch of this size is computed with; always the same ones with fixed
        splits."""
        if self.num_kv_splits is not None:
            return self.tiles
        return self.tiles.for_programs(batch * self.lanes, self.processors)

    def chip(self, batch: int) -> tuple[float, float]:
        """How many items keep the chip busy, and how many it holds at once."""
        tiles, share = self.tiles_for(batch), self.processors / self.lanes
        return tiles.per_processor * share, tiles.resident * share

    def capacity(self, batch: int) -> int:
        """Most items that a batch of this size is cut into: the grid of its launch."""
        if self.num_kv_splits is not None:
            return batch * self.num_kv_splits
        busy, room = self.chip(batch)
        if batch <= room:
            return max(int(busy), batch + int(min(batch / 4, busy)))
        return max(int(busy), batch + int(room))

    def entries(self, batch: int) -> int:
        """Most requests of such a batch that need merging: each takes at least one item more than a
        request."""
        if self.num_kv_splits is not None:
            return batch
        return min(batch, self.capacity(batch) - batch)

    def update(self, lengths: Tensor) -> AttentionPlan:
        """Plan the next batch; one copy to the device, which the host does not wait for.

        Parameters
        ----------
        lengths
            Integer CPU tensor [batch]: the keys of each request, padded rows of a graph included.

        Raises
        ------
        ArgumentError
            For lengths on a device, negative ones, or more than `max_requests`.
        """
        spans = host_integers("lengths", lengths, ndim=1)
        if not 1 <= len(spans) <= self.max_requests:
            remedy = f"this plan holds 1 to {self.max_requests} requests"
            raise ArgumentError("lengths", spans.shape, remedy)
        if spans.min() < 0 or spans.max() >= OPEN_END:
            raise ArgumentError("lengths", spans.tolist(), f"must be between 0 and {OPEN_END - 1}")
        self.batch = len(spans)
        if self.num_kv_splits is not None:
            return self
        block, begin = self.tiles_for(self.batch).block_n, np.zeros_like(spans)
        if self.sliding_window >= 0:
            begin = np.maximum(spans - 1 - self.sliding_window, 0) // block * block
            spans = spans - begin
        planned = begin.tobytes() + (-(-spans // block)).tobytes()
        if planned == self._planned:
            return self  # no request grew by a tile: items whose last ends are open still fit
        self._planned = b""  # an interrupted copy must not leave an old plan that looks new
        self._stage.turn()
        self._fill(self._stage.host.numpy(), begin, spans)
        self._stage.send()
        self._planned = planned
        return self

    def _fill(self, staged: np.ndarray, begin: np.ndarray, spans: np.ndarray) -> None:
        """Write the rows of `items` and `merges` for requests that see `spans` keys from `begin`
        on.

        700 and 100 keys, tiles of 64: 700 keys are 11 tiles, cut into parts of 6::

            request   first  end    row        parts, longest first; the last part of a request ends
            0         0      384    0          where the request ends by then
            0         384    open   1          ->  merges: request 0, rows 0.., 2 of them
            1         0      open   -1         whole: written to the result
        """
        tiles, batch = self.tiles_for(len(spans)), len(spans)
        key_tiles, chip = -(-spans // tiles.block_n), self.chip(batch)
        parts, step = split(key_tiles, *chip, self.capacity(batch), tiles.min_tiles)
        step *= tiles.block_n
        cut = parts > 1
        first_row = np.where(cut, parts, 0).cumsum() - parts  # of `partial`, for those that are cut

        request = np.arange(batch).repeat(parts)
        number = np.arange(len(request)) - (parts.cumsum() - parts)[request]  # part of its request
        start = number * step[request]
        size = np.minimum(step[request], spans[request] - start)
        first = begin[request] + start
        end = np.where(number == parts[request] - 1, OPEN_END, first + step[request])
        row = np.where(cut[request], first_row[request] + number, -1)
        items = np.stack((request, first, end, row), 1)[np.argsort(-size, kind="stable")]
        merges = np.stack((np.arange(batch), first_row, parts, np.zeros_like(parts)), 1)[cut]

        staged_items, staged_merges = np.split(staged.reshape(-1, 4), [self._items])
        staged_items[:, 0] = -1
        staged_items[: len(items)] = items
        staged_merges[:] = 0
        staged_merges[: len(merges)] = merges

    def check(
        self, q: Tensor, v_cache: Tensor, num_kv_splits: int | None, sliding_window: int
    ) -> None:
        """Raise unless this plan was made, and last updated, for such a call of
        ``decode_attention``."""
        if (self.q_heads, self.d_v, self.partial.device) != (
            q.shape[1],
            v_cache.shape[2],
            q.device,
        ):
            made_for = f"{self.q_heads} heads of {self.d_v} on {self.partial.device}"
            raise ArgumentError("plan", self, f"was made for {made_for}; make one from this pool")
        if num_kv_splits not in (None, self.num_kv_splits):
            remedy = f"the plan was made with {self.num_kv_splits}"
            raise ArgumentError("num_kv_splits", num_kv_splits, remedy)
        if self.sliding_window not in (-1, sliding_window):
            remedy = f"was made for sliding_window={self.sliding_window}, not {sliding_window}"
            raise ArgumentError("plan", self, remedy)
        if self.batch != q.shape[0]:
            called = f"last updated for {self.batch} requests, called with {q.shape[0]}"
            raise StateError(f"plan: {called}; call plan.update")

    def __repr__(self) -> str:
        requests = f"{self.batch or 0} requests of {self.max_requests}"
        if self.batch is None or self.num_kv_splits is not None:
            return f"AttentionPlan({requests}, num_kv_splits={self.num_kv_splits})"
        items, merges = self._stage.host.view(-1, 4).tensor_split([self._items])
        used, merged = int((items[:, 0] >= 0).sum()), int((merges[:, 2] > 0).sum())
        return f"AttentionPlan({requests} in {used} items, {merged} merged)"


def split(
    tiles: np.ndarray, busy: float, room: float, budget: int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut requests of `tiles` [batch] key tiles into at most `budget` parts in all: (parts [batch],
    tiles per part).

    A batch that the chip holds at once (`room` items) is cut evenly into as many items as keep it
    `busy`: more would only add beginnings and merges. In a larger batch items follow each other,
    and the last ones leave the chip idle if they are long: no part is longer than its share of what
    is left when it starts, longest first.
    """
    total = tiles.sum()
    size = np.full(len(tiles), total / busy)
    if len(tiles) > room:
        order = np.argsort(-tiles, kind="stable")
        left = total - tiles[order].cumsum() + tiles[order]
        size[order] = np.maximum(left / room, total / room / 4)
    while True:
        parts = np.maximum(-(-tiles // np.maximum(np.ceil(size), least).astype(np.int64)), 1)
        if parts.sum() <= budget:
            step = np.maximum(-(-tiles // parts), 1)  # even parts
            return np.maximum(-(-tiles // step), 1), step
        size *= 1.06


def uniform_splits(
    batch: int, lanes: int, entries: int, tiles: DecodeTiles, processors: int
) -> int:
    """Parts per request when only shapes are known: as many as the chip has room for, by the mean
    length."""
    mean_tiles = entries // (batch * tiles.block_n)
    return max(
        1, min(tiles.per_processor * processors // (batch * lanes), mean_tiles // tiles.min_tiles)
    )
