"""How a ragged batch becomes a few rectangular ones, for implementations that want rectangles
(PyTorch's).

Long requests are cut into blocks of queries, each with only the keys it can see; blocks of like
size are padded to one rectangle, as long as that at most doubles the work and its keys stay within
a cache's reach. Padding repeats a key that the block sees anyway, so that a masked weight never
meets a NaN. All of this depends on lengths and slots only: a model computes it once per step for
all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minikv.attention.options import Options

QUERY_BLOCK = 256
KV_BYTES = 8 << 20
"""Keys and values gathered at once: beyond this they leave the cache between being copied and being
read."""
CELLS = 1 << 24
"""Scores (queries x keys x heads) at once."""
SMALL = 1 << 16
"""Rectangles of fewer cells are padded freely: there the number of calls is what costs."""


@dataclass(frozen=True, eq=False)
class Rectangle:
    """n blocks of N queries over T = L + M keys: L from the pool, M from the new ones.

    Attributes
    ----------
    shape
        (n, N).
    rows
        Which rows of q: a slice, or int64 [n * N]; padding repeats a row.
    real
        Which of the n * N are not padding, int64; None for all.
    slots
        Which slots of the pool [n * L]; a slice when they are one run, which needs no copy.
    new
        Which rows of the new keys: slice, int64 [n * M], or None for none.
    mask
        bool [n, 1, N, T], True where seen; None when all is seen, or `triangle` says what is.
    triangle
        Query i sees keys 0..i.
    hidden
        bool [n, T, 1, 1]: keys that no query sees and that may hold anything; None for none.
    dead
        bool [n, N]: queries that see no key; None for none.
    temperature
        fp32 [n, N], what multiplies each query's scores; None for 1.
    """

    shape: tuple[int, int]
    rows: slice | Tensor
    real: Tensor | None
    slots: slice | Tensor | None
    new: slice | Tensor | None
    mask: Tensor | None = None
    triangle: bool = False
    hidden: Tensor | None = None
    dead: Tensor | None = None
    temperature: Tensor | None = None


class Block(NamedTuple):
    """Some neighbouring queries of one request, and the keys they can see."""

    request: int
    row: int  # first row of q
    rows: int
    pos: int  # of the first query, counted from the first listed key
    listed_at: int  # where its keys begin in kv_indices
    listed: int
    listed_pos: int
    new_at: int  # first row of the new keys
    new: int
    new_pos: int
    prefix: int
    width: int  # columns of the request's custom mask
    mask_at: int

    @property
    def keys(self) -> int:
        return self.listed + self.new


def rectangles(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    opts: Options,
    *,
    q_heads: int,
    token_bytes: int,
    qo_indptr: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    new_keys: bool = False,
) -> list[Rectangle]:
    """Cut and pad a batch.

    Parameters
    ----------
    kv_indptr, kv_indices, qo_indptr, prefix_lens
        As in the three public functions; None for `qo_indptr` means one query per request (decode),
        None for `prefix_lens` that all listed keys (in decode: all but the last) are prefix.
    new_keys
        Whether the new tokens' keys are given as tensors beside the lists.
    token_bytes
        Bytes of one token's keys and values in the pool.

    Returns
    -------
    list of Rectangle
        Together they hold every query that has a key to see.
    """
    blocks = _blocks(kv_indptr, opts, qo_indptr, prefix_lens, new_keys)
    groups: list[list[Block]] = []
    longest = total = 0
    for block in sorted(blocks, key=lambda b: (b.listed == 0, b.rows, b.keys), reverse=True):
        cells = block.rows * block.keys
        if groups:
            first = groups[-1][0]
            n, keys = len(groups[-1]) + 1, max(longest, block.keys)
            padded = n * first.rows * keys
            if (
                (padded <= 2 * (total + cells) or padded <= SMALL)
                and padded * q_heads <= CELLS
                and n * keys * token_bytes <= KV_BYTES
                and (block.listed == 0) == (first.listed == 0)
            ):
                groups[-1].append(block)
                longest, total = keys, total + cells
                continue
        groups.append([block])
        longest, total = block.keys, cells
    return [_pad(sorted(group), kv_indices, opts) for group in groups]


def _blocks(
    kv_indptr: Tensor,
    opts: Options,
    qo_indptr: Tensor | None,
    prefix_lens: Tensor | None,
    new_keys: bool,
) -> list[Block]:
    starts = kv_indptr.tolist()
    rows = list(range(len(starts))) if qo_indptr is None else qo_indptr.tolist()
    prefixes = None if prefix_lens is None else prefix_lens.tolist()
    mask_at = None if opts.mask_indptr is None else opts.mask_indptr.tolist()
    window = opts.sliding_window if opts.sliding_window >= 0 else math.inf
    blocks = []
    for r in range(len(starts) - 1):
        listed, queries = starts[r + 1] - starts[r], rows[r + 1] - rows[r]
        prefix = (listed if new_keys else listed - 1) if prefixes is None else prefixes[r]
        total = listed + queries if new_keys else listed
        for begin in range(0, queries, QUERY_BLOCK):
            stop = min(queries, begin + QUERY_BLOCK)
            first = int(max(0, prefix + begin - window))
            end = min(total, prefix + stop) if opts.causal and mask_at is None else total
            from_list = max(0, min(end, listed) - first)
            first_new = max(0, first - prefix) if new_keys else 0
            new = max(0, end - prefix - first_new) if new_keys else 0
            if from_list + new:
                block = Block(
                    request=r,
                    row=rows[r] + begin,
                    rows=stop - begin,
                    pos=prefix + begin,
                    listed_at=starts[r] + first,
                    listed=from_list,
                    listed_pos=first,
                    new_at=rows[r] + first_new,
                    new=new,
                    new_pos=prefix + first_new,
                    prefix=prefix,
                    width=total,
                    mask_at=0 if mask_at is None else mask_at[r] + begin * total,
                )
                blocks.append(block)
    return blocks


def _pad(blocks: list[Block], kv_indices: Tensor, opts: Options) -> Rectangle:
    """One rectangle from blocks of like size."""
    device, n = kv_indices.device, len(blocks)
    N, L, M = max(b.rows for b in blocks), max(b.listed for b in blocks), max(b.new for b in blocks)
    even = all(b.rows == N for b in blocks)
    plain, window = opts.custom_mask is None, opts.sliding_window
    q_at, l_at, m_at = (torch.arange(size, device=device) for size in (N, L, M))
    rows = _places([b.row for b in blocks], [b.rows for b in blocks], q_at)
    new = _places([b.new_at for b in blocks], [b.new for b in blocks], m_at) if M else None
    slots = None
    if L:
        listed = _places([b.listed_at for b in blocks], [b.listed for b in blocks], l_at)
        slots = _run(kv_indices[listed])
    if plain and opts.xai_temperature_len < 0 and N == 1 and all(b.keys == L + M for b in blocks):
        return Rectangle(
            (n, N), rows, None, slots, new
        )  # what most decode steps are: all see all their keys

    table = torch.tensor(blocks, device=device)  # int64 [n, 13]
    column = dict(zip(Block._fields, table.T[..., None], strict=True))  # each [n, 1]
    real = None if even else (q_at < column["rows"]).flatten().nonzero().flatten()
    q_in = torch.minimum(q_at, column["rows"] - 1)  # [n, N]: padding sees what the last query sees
    q_pos = column["pos"] + q_in
    temperature = (
        None if opts.xai_temperature_len < 0 else _temperature(q_pos, column["request"], opts)
    )
    if (
        plain
        and opts.causal
        and N > 1
        and not L
        and not 0 <= window < N
        and all(b.row == b.new_at and b.rows == b.new for b in blocks)
    ):
        return Rectangle((n, N), rows, real, slots, new, triangle=True, temperature=temperature)

    k_pos = torch.cat((column["listed_pos"] + l_at, column["new_pos"] + m_at), 1)[
        :, None, :
    ]  # [n, 1, T]
    seen = torch.cat((l_at < column["listed"], m_at < column["new"]), 1)[:, None, :]
    distance = q_pos[:, :, None] - k_pos  # [n, N, T]
    hidden = dead = None
    if opts.custom_mask is not None:
        at = (column["mask_at"] + q_in * column["width"])[:, :, None] + k_pos
        asked = opts.custom_mask[at.clamp(max=opts.custom_mask.shape[0] - 1)]
        if opts.skip_prefix_mask:
            asked = asked | (k_pos < column["prefix"][:, :, None])
        seen = seen & asked
    elif opts.causal:
        seen = seen & (distance >= 0)
    if window >= 0:
        seen = seen & (distance <= window)
    if not plain:
        hidden, dead = ~seen.any(1)[:, :, None, None], ~seen.any(2)
    mask = None if even and bool(seen.all()) else seen[:, None].expand(n, 1, N, L + M)
    return Rectangle((n, N), rows, real, slots, new, mask, False, hidden, dead, temperature)


def _places(start: list[int], count: list[int], at: Tensor) -> slice | Tensor:
    """``start[i] .. start[i] + count[i]``, all padded to the length of `at`; a slice where they
    follow each other."""
    n, longest = len(start), at.shape[0]
    if all(c == longest for c in count) and all(
        s == start[0] + i * longest for i, s in enumerate(start)
    ):
        return slice(start[0], start[0] + n * longest)
    begin, size = torch.tensor((start, count), device=at.device)[..., None]
    return (begin + torch.minimum(at, size - 1)).flatten()


def _run(slots: Tensor) -> slice | Tensor:
    """The same slots as a slice when they count up by one, which needs no copy (looked for on the
    CPU only)."""
    if slots.device.type == "cpu":
        first, count = int(slots[0]), slots.shape[0]
        if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
            return slice(first, first + count)
    return slots


def _temperature(q_pos: Tensor, request: Tensor, opts: Options) -> Tensor:
    """fp32 [n, N]: what multiplies the scores of each query."""
    pos = q_pos if opts.window_start is None else q_pos + opts.window_start[request]
    length = opts.xai_temperature_len
    if opts.xai_temperature_rule == "log":
        return torch.where(pos > length, pos.clamp(min=1).float().log2() / math.log2(length), 1.0)
    return torch.where(pos >= length, length / (pos + 1.0), 1.0)
