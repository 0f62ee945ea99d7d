"""Matrix times a few rows: too many for a dot product per output, too few for cuBLAS to be at its
best.

With 2 to :data:`MOST_ROWS` rows a product still takes as long as its weights take to arrive, and
1,024 outputs do not make enough programs to keep a large chip's memory busy. So it is also cut
along its inputs (split-K, as cuBLAS and CUTLASS call it): each part's sums are a result of their
own, which the kernel that reads the product adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.attention.tiles import shared_bytes
from minikv.device import capability_of
from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton
from minikv.models.fused.one_row import Tiles, gate_times_up

MOST_ROWS = 32  # up to which these kernels are used; cuBLAS reads larger batches as fast


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """``act(x @ weight.T + bias)``, perhaps in parts that are still to be added up; see
    :func:`add_parts`.

    Parameters
    ----------
    x
        [rows, k], contiguous, at most ``MOST_ROWS`` rows; fp16, bf16 or fp32. A row's result does
        not depend on how many others there are.
    weight, bias
        [n, k] contiguous, and [n].
    gated
        The first half of the n outputs goes through silu and multiplies the second: n / 2 columns
        are left.
    tiles
        For tests and tuning, in place of what is chosen here.

    Returns
    -------
    Tensor
        [rows, n or n / 2] in x's dtype, or fp32 [parts, rows, n].
    """
    rows, (n, k) = x.shape[0], weight.shape
    if gated:
        n //= 2
    tiles = tiles or tiles_of(rows, n, gated, x.dtype.itemsize, capability_of(x.device))
    assert not gated or tiles.parts == 1, "a gate needs the whole sum"
    if tiles.parts == 1:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiles.parts, rows, n), dtype=torch.float32, device=x.device)
    span = triton.cdiv(triton.cdiv(k, tiles.parts), tiles.block_k) * tiles.block_k
    launch(
        few_rows_kernel,
        (triton.cdiv(n, tiles.block_n), tiles.parts),
        (x, weight, bias, out, rows, n),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        dependent=True,
        K=k,
        SPAN=span,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GATED=gated,
    )
    return out


def add_parts(product: Tensor, dtype: torch.dtype) -> Tensor:
    """What kernels that read a product in parts do first: [rows, n] in `dtype`."""
    return product if product.dim() == 2 else product.sum(0).to(dtype)


def tiles_of(rows: int, n: int, gated: bool, item_bytes: int, capability: tuple[int, int]) -> Tiles:
    """Block sizes for n outputs (pairs when `gated`), for numbers of `item_bytes`.

    How a sum is cut into parts follows from n alone: a row's result must not depend on how many
    others there are. (Tensor cores add up 16 inputs at a time, in order, whatever the block.)
    """
    parts = 4
    if gated or n >= 16384:
        parts = 1
    elif n >= 2048:
        parts = 2
    if item_bytes == 4:  # without tensor cores a dot lives in registers
        return Tiles(16, 32, 4, 2, parts)
    if n >= 16384:
        return Tiles(32, 128, 2, 5)
    if gated and shared_bytes(capability) >= 160 * 1024:
        return Tiles(32, 256, 4, 3) if rows <= 16 else Tiles(64, 128, 4, 4)
    return Tiles(16, 128, 2, 5, parts)


@triton.jit(do_not_specialize=["rows", "n"])
def few_rows_kernel(
    x, weight, bias, out, rows, n,
    K: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (b, p): outputs ``b * BLOCK_N ..`` of all rows, summed over the inputs ``p * SPAN
    ..`` of part p."""
    let_next_start(DEPENDENT)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    low = tl.program_id(1) * SPAN
    high = tl.minimum(low + SPAN, K)
    kind = x.dtype.element_ty
    line = weight + tl.minimum(column, n - 1).to(tl.int64) * K
    other_line = line + n.to(tl.int64) * K
    wait_for_previous(DEPENDENT)
    row = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_K)
    EVEN: tl.constexpr = K % SPAN == 0 and SPAN % BLOCK_K == 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(low, high, BLOCK_K):
        at = k + i
        v = tl.load(
            x + row[:, None] * K + at[None, :],
            mask=(row[:, None] < rows) & (at[None, :] < K),
            other=0.0,
        )
        inside = (at[None, :] < high) | EVEN
        tile = tl.load(line[:, None] + at[None, :], mask=inside, other=0.0)
        acc = tl.dot(v, tile.T, acc, input_precision="ieee")
        if GATED:
            tile = tl.load(other_line[:, None] + at[None, :], mask=inside, other=0.0)
            up = tl.dot(v, tile.T, up, input_precision="ieee")
    if bias is not None:
        if tl.program_id(1) == 0:
            acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + n + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gate_times_up(acc, up, kind)
    place = tl.program_id(1).to(tl.int64) * rows * n + row[:, None] * n + column[None, :]
    tl.store(
        out + place,
        acc.to(out.dtype.element_ty),
        mask=(row[:, None] < rows) & (column[None, :] < n),
    )


@triton.jit
def sum_of_parts(product, at, mask, stride, PARTS: tl.constexpr, kind: tl.constexpr):
    """Entries `at` of a product that lies in parts, `stride` apart, rounded as the whole product
    would be; fp32."""
    y = tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    for p in tl.static_range(1, PARTS):  # type: ignore
        y += tl.load(product + p * stride + at, mask=mask, other=0.0)
    return y.to(kind).to(tl.float32)
