"""Block sizes: how many queries and keys a program holds at once, per chip, head size and dtype.

A table, not an autotuner: the first call on a new shape is then as fast as the second, results do not depend on timings,
and a reader sees what was chosen. Measured on an H200; the smaller chips get what their shared memory holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

SHARED_BYTES = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376, (12, 0): 101376}
SHARED_BYTES_SM90 = 232448  # also what is assumed of chips that are newer and not listed


@dataclass(frozen=True)
class Tiles:
    """Launch shape of one kernel: tile of `block_m` queries by `block_n` keys, warps, tiles in flight.

    `descriptors`: load whole tiles of new keys and values through host-made tensor descriptors.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use on a chip of this compute capability, in bytes."""
    return SHARED_BYTES.get(capability, SHARED_BYTES_SM90 if capability >= (9, 0) else 101376)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; the interpreter on the CPU takes the H200's tiles."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def head_blocks(d: int) -> tuple[int, int]:
    """Cut a head of `d` columns into a power of two and, where that wastes less, a smaller power of two; 0 is none.

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


# --- extend, two-stage -------------------------------------------------------------------------------------------------


@functools.cache
def extend_tiles(capability: tuple[int, int], d_qk: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the two-stage extend kernel."""
    return unified_tiles(capability, d_qk, d_v, dtype)


# --- extend, unified: tile sizes are a promise ---------------------------------------------------------------------------


@functools.cache
def unified_tiles(capability: tuple[int, int], d_qk: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of the unified kernel: `block_m` and `block_n` depend on head dims and dtype only, since they fix the bits."""
    return Tiles(64, 64, 4, 2)


# --- decode --------------------------------------------------------------------------------------------------------------
