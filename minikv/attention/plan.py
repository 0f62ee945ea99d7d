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

from minikv.attention.tiles import DecodeTiles, decode_tiles, processors_of
from minikv.errors import ArgumentError, StateError
from minikv.kernels.staging import Stage

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
        write the result).
    merges
        int32 [entries, 4]: request, first row of `partial`, how many rows (0: nothing to do),
        unused.
    partial, partial_lse
        fp32 [rows, q_heads, d_v] and [rows, q_heads] (log-sum-exp in powers of two).

    Examples
    --------
    A chip of 4 processors has room for more programs than three short requests need, so the long one is cut:

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
        if max_requests < 1:
            raise ArgumentError("max_requests", max_requests, "must be at least 1")
        if num_kv_splits is not None and num_kv_splits < 1:
            raise ArgumentError(
                "num_kv_splits", num_kv_splits, "must be at least 1, or None to choose by length"
            )
        self.max_requests, self.q_heads, self.d_v = max_requests, q_heads, v_cache.shape[2]
        self.num_kv_splits, self.sliding_window = num_kv_splits, sliding_window
        self.tiles = decode_tiles_of(q_heads, k_cache, v_cache)
        self.lanes = self.tiles.programs(q_heads, k_cache.shape[1])
        self.processors = processors or processors_of(k_cache.device)
        self.batch: int | None = None
        self._planned = b""
        device, sizes = k_cache.device, range(1, max_requests + 1)
        capacity, entries = max(map(self.capacity, sizes)), max(map(self.entries, sizes))
        rows = (
            capacity
            if num_kv_splits
            else max(min(self.capacity(b), 2 * (self.capacity(b) - b)) for b in sizes)
        )
        self.partial = torch.empty((rows, q_heads, self.d_v), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty((rows, q_heads), dtype=torch.float32, device=device)
        size = 0 if num_kv_splits else 4 * (capacity + entries)
        self._stage = Stage(size, device, torch.int32)
        self.items = self._stage.block[: 4 * capacity].view(-1, 4)
        self.merges = self._stage.block[4 * capacity :].view(-1, 4)

    def tiles_for(self, batch: int) -> DecodeTiles:
        """The tiles that a batch of this size is computed with; always the same ones with fixed
        splits."""
        if self.num_kv_splits is not None:
            return self.tiles
        return self.tiles.for_programs(batch * self.lanes, self.processors)

    def chip(self, batch: int) -> tuple[float, float]:
        """How many items keep the chip busy, and how many it holds at once."""
        tiles = self.tiles_for(batch)
        return (
            tiles.per_processor * self.processors / self.lanes,
            tiles.resident * self.processors / self.lanes,
        )

    def capacity(self, batch: int) -> int:
        """Most items that a batch of this size is cut into: the grid of its launch."""
        if self.num_kv_splits is not None:
            return batch * self.num_kv_splits
        busy, room = self.chip(batch)
        return max(int(busy), batch + int(min(batch / 4, busy) if batch <= room else room))

    def entries(self, batch: int) -> int:
        """Most requests of such a batch that need merging: each takes at least one item more than a
        request."""
        return batch if self.num_kv_splits is not None else min(batch, self.capacity(batch) - batch)

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
        if lengths.device.type != "cpu" or lengths.dim() != 1 or lengths.is_floating_point():
            raise ArgumentError(
                "lengths",
                f"{lengths.dtype} on {lengths.device}",
                "must be a 1-D integer CPU tensor",
            )
        if not 1 <= lengths.shape[0] <= self.max_requests:
            raise ArgumentError(
                "lengths",
                tuple(lengths.shape),
                f"this plan holds 1 to {self.max_requests} requests",
            )
        self.batch = lengths.shape[0]
        if self.num_kv_splits is not None:
            return self
        spans = lengths.numpy().astype(np.int64)
        if spans.min() < 0:
            raise ArgumentError("lengths", int(spans.min()), "must not be negative")
        block, begin = self.tiles_for(self.batch).block_n, np.zeros_like(spans)
        if self.sliding_window >= 0:
            begin = np.maximum(spans - 1 - self.sliding_window, 0) // block * block
            spans = spans - begin
        planned = begin.tobytes() + (-(-spans // block)).tobytes()
        if (
            planned == self._planned
        ):  # no request grew by a tile: items whose last ends are open still fit
            return self
        self._planned = b""  # until it is there: whoever interrupts this must not leave an old plan that looks new
        self._stage.turn()
        self._fill(self._stage.host.numpy(), begin, spans)
        self._stage.send()
        self._planned = planned
        return self

    def _fill(self, staged: np.ndarray, begin: np.ndarray, spans: np.ndarray) -> None:
        """Write the rows of `items` and `merges` for requests that see `spans` keys from `begin`
        on."""
        tiles, batch = self.tiles_for(len(spans)), len(spans)
        block = tiles.block_n
        parts, step = split(
            -(-spans // block), *self.chip(batch), self.capacity(batch), tiles.min_tiles
        )
        step *= block

        ends = parts.cumsum()
        request = np.arange(batch).repeat(parts)
        number = np.arange(ends[-1]) - (ends - parts)[request]  # which part of its request
        start = number * step[request]
        size = np.minimum(step[request], spans[request] - start)
        cut = parts > 1
        first_row = np.where(cut, parts, 0).cumsum() - parts  # of those that are cut
        rows = np.empty((len(request), 4), np.int32)
        rows[:, 0] = request
        rows[:, 1] = begin[request] + start
        rows[:, 2] = np.where(number == parts[request] - 1, OPEN_END, rows[:, 1] + step[request])
        rows[:, 3] = np.where(cut[request], first_row[request] + number, -1)

        items, merges = np.split(staged.reshape(-1, 4), [self.items.shape[0]])
        items[:, 0] = -1
        items[: len(rows)] = rows[np.argsort(-size, kind="stable")]
        merges[:] = 0
        split_requests = np.flatnonzero(cut)
        merges[: len(split_requests), 0] = split_requests
        merges[: len(split_requests), 1] = first_row[split_requests]
        merges[: len(split_requests), 2] = parts[split_requests]

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
            raise ArgumentError(
                "num_kv_splits", num_kv_splits, f"the plan was made with {self.num_kv_splits}"
            )
        if self.sliding_window not in (-1, sliding_window):
            raise ArgumentError(
                "plan",
                self,
                f"was made for sliding_window={self.sliding_window}, not {sliding_window}",
            )
        if self.batch != q.shape[0]:
            raise StateError(
                f"plan: last updated for {self.batch} requests, called with {q.shape[0]}; call plan.update"
            )

    def __repr__(self) -> str:
        if self.batch is None or self.num_kv_splits is not None:
            return f"AttentionPlan({self.batch or 0} requests of {self.max_requests}, num_kv_splits={self.num_kv_splits})"
        items, merges = self._stage.host.view(-1, 4).tensor_split([self.items.shape[0]])
        used, merged = int((items[:, 0] >= 0).sum()), int((merges[:, 2] > 0).sum())
        return f"AttentionPlan({self.batch} requests of {self.max_requests} in {used} items, {merged} merged)"


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


def decode_tiles_of(q_heads: int, k_cache: Tensor, v_cache: Tensor) -> DecodeTiles:
    """The decode tiles for a pool; see ``tiles.decode_tiles``."""
    from minikv.device import capability_of

    _, kv_heads, d_qk = k_cache.shape
    return decode_tiles(
        capability_of(k_cache.device),
        d_qk,
        v_cache.shape[2],
        q_heads // kv_heads,
        k_cache.dtype.itemsize,
        values_in_keys(k_cache, v_cache),
    )


def values_in_keys(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the values are the first columns of the keys' rows, as in MLA, and can be taken from
    the tile of keys."""
    from minikv.attention.tiles import head_blocks

    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and k_cache.stride()[:2] == v_cache.stride()[:2]
        and v_cache.shape[2] == head_blocks(k_cache.shape[2])[0]
    )
