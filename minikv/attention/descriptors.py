"""Tensor descriptors: Hopper's copy engine loads a whole tile by one instruction of one thread.

Through pointers every thread works out addresses and issues its own 16-byte copies; that costs
extend 5 to 20 %. A descriptor wants a rectangle: new keys are one, and so are the slots of a page.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minikv.attention.options import Options
from minikv.attention.tiles import Tiles, power_of_two


def of_rows(k: Tensor, v: Tensor, tiles: Tiles, block_d: int) -> tuple[Any, Any]:
    """Descriptors of keys ``[rows, heads, d_qk]`` and values ``[rows, heads, d_v]``, or Nones.

    A tile is ``tiles.block_n`` rows by the first `block_d` columns of one head (a tail block goes
    through pointers): values need a power of two of them, heads must be adjacent and every row
    aligned to 16 bytes.
    """
    d_v = v.shape[2]
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


def of_pool(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, opts: Options, tiles: Tiles, block_d: int
) -> tuple[Any, Any]:
    """Descriptors of the pool where every tile of a list lies in one page: lists from a page's
    start, large pages."""
    whole = opts.page_size % tiles.block_n == 0 and opts.window_start is None
    if not whole or k_cache.dtype != q.dtype:
        return None, None
    return of_rows(k_cache, v_cache, tiles, block_d)
