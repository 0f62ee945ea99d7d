"""Block sizes: how many queries and keys a program holds at once, per chip, head size and dtype.

A table, not an autotuner: the first call on a new shape is then as fast as the second, results do
not depend on timings, and a reader sees what was chosen. Measured on an H200; smaller chips get
what their shared memory holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minikv.attention.options import Options
from minikv.device import capability_of

SHARED_BYTES = {
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (12, 0): 101376,
}
SHARED_BYTES_SM90 = 232448  # also what is assumed of chips that are newer and not listed


@dataclass(frozen=True)
class Tiles:
    """Launch shape of one kernel: tile of `block_m` queries by `block_n` keys, warps, tiles in
    flight.

    `descriptors`: load whole tiles of new keys and values, and of pages that hold whole tiles,
    through host-made tensor descriptors.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use on a chip of this compute capability, in bytes."""
    return SHARED_BYTES.get(capability, SHARED_BYTES_SM90 if capability >= (9, 0) else 101376)


def head_blocks(d: int) -> tuple[int, int]:
    """Cut a head of `d` columns into a power of two and, where that wastes less, a smaller power of
    two; 0 is none.

    Examples
    --------
    >>> [head_blocks(d) for d in (64, 80, 96, 112, 192, 576)]
    [(64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (512, 64)]
    """
    whole = power_of_two(d)
    if d == whole or d < 32:
        return max(whole, 16), 0
    tail = max(16, power_of_two(d - whole // 2))
    return (whole // 2, tail) if tail < whole // 2 else (whole, 0)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def head_sizes(d: int, d_v: int) -> dict[str, Any]:
    """The constexpr parameters of all attention kernels that say how wide heads are."""
    block_d, block_tail = head_blocks(d)
    blocks = {"BLOCK_D": block_d, "BLOCK_TAIL": block_tail, "BLOCK_DV": max(16, power_of_two(d_v))}
    return {"D": d, "DV": d_v, **blocks}


# --- extend ---


def grid_places(
    tokens: int, batch: int, block_m: int, extra: int, max_len: int | None
) -> tuple[bool, int]:
    """Shape of the grid: (compact?, places along its middle axis).

    The plain grid has ``batch`` columns of the longest request's tiles, most of them empty in a
    ragged batch. The compact one lays all requests' tiles end to end (see ``find_request``): that
    costs a search, but no longest length.
    """
    compact = tokens // block_m + extra * batch
    if max_len is None:
        return (True, compact) if batch > 1 else (False, -(-tokens // block_m) + extra - 1)
    plain = -(-min(max_len, tokens) // block_m) + extra - 1
    return (True, compact) if plain * batch > 1.5 * compact else (False, max(plain, 1))


def prefix_splits(processors: int, programs: int, mean_prefix: int, block_n: int) -> int:
    """Into how many parts to cut the prefix: 1, unless there are too few query tiles to fill the
    chip."""
    if programs > processors:
        return 1
    return max(1, min(16, 2 * processors // programs, mean_prefix // (8 * block_n)))


@functools.cache
def extend_tiles(capability: tuple[int, int], d_qk: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the two-stage kernel. On Hopper two programs share a processor up to 128 columns:
    115,712 bytes each."""
    widest = max(d_qk, d_v)
    if capability >= (9, 0) and dtype.itemsize == 2 and widest <= 192 and d_v <= 128:
        if widest <= 64:
            return Tiles(64, 128, 4, 3, descriptors=True)
        if widest <= 128:
            return Tiles(64, 64, 4, 3, descriptors=True)
        return Tiles(128, 64, 8, 3, descriptors=True)
    return unified_tiles(capability, d_qk, d_v, dtype)


@functools.cache
def unified_tiles(capability: tuple[int, int], d_qk: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the unified kernel: block sizes depend on head dims and dtype only, since they fix
    the bits.

    Only the tiles in flight follow the chip. The exception is sm75, where Triton has no tensor-core
    path: there, as with fp32, every product of a tile is an instruction of its own, so tiles are
    small.
    """
    columns = sum(head_blocks(d_qk)) + max(16, power_of_two(d_v))
    if dtype.itemsize == 4 or capability < (8, 0):
        if columns > 256:
            return Tiles(16, 16, 8, 1)
        return Tiles(16 if capability < (8, 0) else 32, 32, 4, 1)
    if columns > 576:  # MLA
        return Tiles(32, 32, 8, 1)
    block_m, block_n, stages = 64, 64, 3
    hopper, free = capability >= (9, 0), shared_bytes(capability)
    if columns > 320:
        block_n, stages = 32, 2
    elif columns > 256:
        block_m = 128
    elif hopper:
        free //= 2  # two programs share a processor
    query_bytes, tile_bytes = 2 * block_m * sum(head_blocks(d_qk)), 2 * block_n * columns
    stages = max(1, min(stages, (free - query_bytes) // tile_bytes))
    # With a tail block, 8 warps, few rows and an fp8 pool, Triton 3.6 compiles the tail's product
    # to wild reads.
    few = block_m == 64 and (columns <= 256 or head_blocks(d_qk)[1] > 0)
    return Tiles(block_m, block_n, 4 if few else 8, stages, descriptors=hopper and columns <= 320)


# --- tensor descriptors ---
#
# With them Hopper's copy engine loads a whole tile by one instruction of one thread. Through
# pointers every thread works out addresses and issues its own 16-byte copies; that costs extend 5
# to 20 %. A descriptor wants a rectangle: new keys are one, and so are the slots of a page.


def row_descriptors(k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Any, Any]:
    """Descriptors of keys ``[rows, heads, d_qk]`` and values ``[rows, heads, d_v]``, or Nones.

    A tile is ``tiles.block_n`` rows by the main block of columns of one head (a tail block goes
    through pointers): values need a power of two of them, heads must be adjacent and every row
    aligned to 16 bytes.
    """
    block_d, d_v = head_blocks(k.shape[2])[0], v.shape[2]
    for x in (k, v):
        if x.stride(1) != x.shape[2] or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
            return None, None
    fits = d_v == power_of_two(d_v) and max(block_d, d_v) <= 256 and k.shape[2] >= block_d
    if not (tiles.descriptors and fits):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    k_shape, v_shape = ([x.shape[0], x.shape[1] * x.shape[2]] for x in (k, v))
    return (
        TensorDescriptor(k, k_shape, [k.stride(0), 1], [tiles.block_n, block_d]),
        TensorDescriptor(v, v_shape, [v.stride(0), 1], [tiles.block_n, d_v]),
    )


def pool_descriptors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, opts: Options, tiles: Tiles
) -> tuple[Any, Any]:
    """Descriptors of the pool where every tile of a list lies in one page: lists from a page's
    start, large pages."""
    whole = opts.page_size % tiles.block_n == 0 and opts.window_start is None
    if not whole or k_cache.dtype != q.dtype:
        return None, None
    return row_descriptors(k_cache, v_cache, tiles)


# --- decode ---


@dataclass(frozen=True)
class DecodeTiles:
    """Launch shape of the decode kernel, and how its work is cut.

    Attributes
    ----------
    block_h
        Query heads of one group per program, padded: ``tl.dot`` needs 16 rows at least.
    block_n
        Keys per tile.
    per_processor
        Programs per processor that a small batch is cut into.
    resident
        Programs that a processor holds at once.
    crowded
        What to use for a batch that fills more than the chip with these tiles, but not with those:
        smaller programs, of which all requests' are held at once.
    min_tiles
        Least key tiles of a part.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int = 2
    min_tiles: int = 1
    resident: int = 3
    crowded: DecodeTiles | None = None

    def for_programs(self, programs: int, processors: int) -> DecodeTiles:
        """These tiles, or the ones for a crowded chip, for a batch of so many uncut programs."""
        crowded = self.crowded
        if crowded and self.resident * processors < programs <= crowded.resident * processors:
            return crowded
        return self

    def programs(self, q_heads: int, kv_heads: int) -> int:
        """Programs that read the same keys' item: each KV head, times the blocks of its group."""
        return kv_heads * -(-(q_heads // kv_heads) // self.block_h)


@functools.cache
def decode_tiles(
    capability: tuple[int, int],
    d_qk: int,
    d_v: int,
    group: int,
    item_bytes: int,
    values_in_keys: bool,
) -> DecodeTiles:
    """Tiles of the decode kernel: by chip and head shape only, so a fixed split gives the same bits
    in any batch.

    `group` query heads share a KV head of `item_bytes` per number; `values_in_keys`: no values are
    read besides (MLA).
    """
    columns = sum(head_blocks(d_qk)) + (0 if values_in_keys else max(16, power_of_two(d_v)))
    key_bytes, block_h = columns * item_bytes, min(max(16, power_of_two(group)), 64)
    small = shared_bytes(capability) < 128 * 1024
    if item_bytes == 4:  # without tensor cores a dot lives in registers
        if key_bytes <= 512:
            return DecodeTiles(16, 64, 4, 3)
        return DecodeTiles(16, 16, 4 if columns <= 512 else 8, 2)
    if columns > 512:  # MLA
        wide = DecodeTiles(min(block_h, 32), 32, 8, 2, per_processor=1, resident=1)
        return wide if small else DecodeTiles(block_h, 64, 8, 2, per_processor=1, resident=1)
    if capability < (8, 0):  # no asynchronous copies: a tile passes through registers
        return DecodeTiles(block_h, 32, 4, 2)
    # Two tiles in flight per program, a few programs per processor. With at least 32 keys per warp
    # each thread loads one slot; with fewer, every thread would load all the slots that it needs,
    # and wait for them.
    if block_h > 16 or item_bytes == 1 or key_bytes > 512:
        return DecodeTiles(block_h, 64 if key_bytes <= (384 if small else 640) else 32, 4, 3)
    if small:
        return DecodeTiles(16, 32, 1, 3, resident=2)
    if key_bytes <= 256:
        return DecodeTiles(16, 64, 2, 3, per_processor=4, min_tiles=2, resident=6)
    return DecodeTiles(16, 64, 2, 3, crowded=DecodeTiles(16, 32, 1, 3, per_processor=3, resident=6))


def decode_tiles_of(q_heads: int, k_cache: Tensor, v_cache: Tensor) -> DecodeTiles:
    """The decode tiles for a pool; see :func:`decode_tiles`."""
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
    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and k_cache.stride()[:2] == v_cache.stride()[:2]
        and v_cache.shape[2] == head_blocks(k_cache.shape[2])[0]
    )


def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; the interpreter counts as one."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
