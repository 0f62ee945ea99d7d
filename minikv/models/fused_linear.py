"""Matrix times few rows, with what stands around it: normalised input, gated output, residual added on the way out.

A decode step reads every weight once for a handful of rows, so it takes as long as the weights take to arrive. Two
things keep them arriving: the norm before a product and the addition after it cost no kernel of their own, and a
product asks for its weights *before* it waits for its input (programmatic dependent launch, sm90 and newer), so that
the memory works on while the kernel before it ends. Folding neighbours into a matrix-vector product is what
FasterTransformer and TensorRT-LLM do for small batches, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv._triton import INTERPRETED, tl, triton
from minikv.attention.tiles import capability_of
from minikv.device import refuse_interpreted_bf16
from minikv.memory.launch import Binary, pointer

MOST_ROWS = 16
"""Rows up to which these kernels are used; cuBLAS reads larger batches as fast."""


@dataclass(frozen=True)
class LinearTiles:
    """What one program computes: `block_n` outputs, in steps of `block_k` inputs."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """``residual + act(rms_norm(x) @ weight.T + bias)`` in one kernel, for at most ``MOST_ROWS`` rows.

    It rounds where :func:`project_torch` rounds: after the norm, the product, silu, the gate and the sum.

    Parameters
    ----------
    x
        [rows, k], contiguous rows; fp16, bf16 or fp32.
    weight, bias
        [n, k] contiguous, and [n].
    norm, eps
        Weight [k] of an RMSNorm of `x`; None for none.
    gated
        The first half of the n outputs goes through silu and multiplies the second: n / 2 columns are left.
    residual
        [rows, columns], added to the result.
    tiles
        For tests and tuning, in place of what is chosen here.

    Returns
    -------
    Tensor
        [rows, n or n / 2] in x's dtype.
    """
    refuse_interpreted_bf16(x=x, weight=weight)
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    tiles = tiles_of(rows, n, k, gated) if tiles is None else tiles
    block_m: dict[str, Any] = {} if rows == 1 else {"BLOCK_M": max(16, triton.next_power_of_2(rows))}
    launch(
        one_row_kernel if rows == 1 else few_rows_kernel,
        (triton.cdiv(n, tiles.block_n), 1),
        (x, weight, bias, norm, residual, out, rows, n, eps),
        tiles.num_warps,
        tiles.num_stages,
        K=k,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        ROW=triton.next_power_of_2(k),
        GATED=gated,
        WARPS=tiles.num_warps,
        **block_m,
    )
    return out


def project_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`project` with PyTorch operations, for any number of rows."""
    y = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def launch(
    kernel: Any,
    grid: tuple[int, int],
    args: tuple[Any, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    dependent: bool = True,
    **constexprs: Any,
) -> None:
    """Run a kernel of these rooms, `dependent` where the chip can, with the host time of a :class:`Binary`."""
    device = args[0].device
    dependent = dependent and device.type == "cuda" and capability_of(device) >= (9, 0)
    constexprs["DEPENDENT"] = dependent
    given = tuple(pointer(a) if isinstance(a, Tensor) else a for a in args)
    kinds = tuple((a.dtype, INTERPRETED or p % 16 == 0) for a, p in zip(args, given, strict=True) if type(a) is Tensor)
    key = (id(kernel), device, num_warps, num_stages, kinds, *(a is None for a in args), *constexprs.values())
    binary = _binaries.get(key)
    if binary is None:
        binary = _binaries[key] = Binary(kernel, args, num_warps, num_stages, dependent, **constexprs)
    binary(*grid, *given)


_binaries: dict[tuple[Any, ...], Binary] = {}


def tiles_of(rows: int, n: int, k: int, gated: bool) -> LinearTiles:
    """Block sizes for a product of so many rows with n outputs (pairs when `gated`) of k inputs."""
    if rows > 1:
        return LinearTiles(64, 128, 4, 4) if n >= 16384 else LinearTiles(16, 128, 2, 5)
    whole = min(1024, max(32, triton.next_power_of_2(k)))
    if gated:
        return LinearTiles(4, min(512, whole), 2)
    if n < 2048:
        return LinearTiles(2, whole, 4)
    return LinearTiles(8, whole, 4) if n >= 16384 else LinearTiles(4, whole, 2)


@triton.jit
def ask_for(weight, row, rows, ROW_BYTES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Have rows `row` .. ``row + BLOCK_N`` (of `rows`) of a matrix brought into the L2 cache; nobody waits for them.

    They lie end to end in memory; each warp names its share by one instruction.
    """
    share: tl.constexpr = BLOCK_N * ROW_BYTES // WARPS // 16 * 16
    if ROW_BYTES % 16 == 0 and share > 0:
        start = tl.arange(0, 32 * WARPS) // 32 * share
        size = tl.minimum(tl.minimum(rows - row, BLOCK_N) * ROW_BYTES - start, share)
        at = weight.to(tl.int64, bitcast=True) + row.to(tl.int64) * ROW_BYTES + start
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [at, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def finished(acc, up, bias, residual, out, row, column, n, mask, GATED: tl.constexpr):
    """Round, add the bias, gate, add the residual and store, each step rounded as its own kernel would."""
    kind = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
    y = acc.to(kind)
    if GATED:
        if bias is not None:
            up += tl.load(bias + n + column, mask=column < n, other=0.0).to(tl.float32)
        gate = y.to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(kind)
        y = (y.to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)
    if residual is not None:
        old = tl.load(residual + row * n + column, mask=mask, other=0.0)
        y = (old.to(tl.float32) + y.to(tl.float32)).to(kind)
    tl.store(out + row * n + column, y, mask=mask)


@triton.jit
def part_of_row(x, norm, scale, i, K: tl.constexpr):
    """Entries i of a row, normalised and rounded where there is a norm; fp32."""
    v = tl.load(x + i, mask=i < K, other=0.0).to(tl.float32)
    if norm is not None:
        v = v * scale * tl.load(norm + i, mask=i < K, other=0.0).to(tl.float32)
        v = v.to(x.dtype.element_ty).to(tl.float32)
    return v


@triton.jit(do_not_specialize=["rows", "n"])
def one_row_kernel(
    x, weight, bias, norm, residual, out, rows, n, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW: tl.constexpr, GATED: tl.constexpr,
    WARPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``y[j] = sum_i x[i] w[j, i]``: one program computes `BLOCK_N` outputs from `BLOCK_N` rows of the weights.

    ::

               i  0      BLOCK_K            K
                 +-------+-------+-----+          The first tile of w is on its way before the kernel waits for x, and
        j rows   | tile  | next  | ... |   w      each further one before the tile in hand is multiplied.
                 +-------+-------+-----+
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
    first = tl.program_id(0) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    live = column < n
    EVEN: tl.constexpr = K % BLOCK_K == 0
    at = weight + column.to(tl.int64)[:, None] * K + i[None, :]
    seen = live[:, None] if EVEN else live[:, None] & (i[None, :] < K)
    tile = tl.load(at, mask=seen, other=0.0)
    if GATED:
        tile_up = tl.load(at + n.to(tl.int64) * K, mask=seen, other=0.0)
    if DEPENDENT:
        item: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        if K > BLOCK_K:
            ask_for(weight, first, n, K * item, BLOCK_N, WARPS)
            if GATED:
                ask_for(weight, first + n, 2 * n, K * item, BLOCK_N, WARPS)
        tl.extra.cuda.gdc_wait()  # type: ignore

    if norm is not None:
        whole = tl.load(x + tl.arange(0, ROW), mask=tl.arange(0, ROW) < K, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(whole * whole, 0) / K + eps)
    else:
        scale = 1.0
    acc = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for k in range(BLOCK_K, K, BLOCK_K):
        ahead = seen if EVEN else live[:, None] & (k + i[None, :] < K)
        next_tile = tl.load(at + k, mask=ahead, other=0.0)
        if GATED:
            next_up = tl.load(at + n.to(tl.int64) * K + k, mask=ahead, other=0.0)
        v = part_of_row(x, norm, scale, k - BLOCK_K + i, K)
        acc += tl.sum(tile.to(tl.float32) * v[None, :], 1)
        tile = next_tile
        if GATED:
            up += tl.sum(tile_up.to(tl.float32) * v[None, :], 1)
            tile_up = next_up
    v = part_of_row(x, norm, scale, (K - 1) // BLOCK_K * BLOCK_K + i, K)
    acc += tl.sum(tile.to(tl.float32) * v[None, :], 1)
    if GATED:
        up += tl.sum(tile_up.to(tl.float32) * v[None, :], 1)
    finished(acc, up, bias, residual, out, 0, column, n, live, GATED)


@triton.jit(do_not_specialize=["rows", "n"])
def few_rows_kernel(
    x, weight, bias, norm, residual, out, rows, n, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW: tl.constexpr, GATED: tl.constexpr,
    WARPS: tl.constexpr, BLOCK_M: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The same for up to `BLOCK_M` rows by ``tl.dot``; a row's result does not depend on how many others there are."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore
    first = tl.program_id(0) * BLOCK_N
    if DEPENDENT:
        item: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        ask_for(weight, first, n, K * item, BLOCK_N, WARPS)
        if GATED:
            ask_for(weight, first + n, 2 * n, K * item, BLOCK_N, WARPS)
        tl.extra.cuda.gdc_wait()  # type: ignore
    row = tl.arange(0, BLOCK_M)
    column = first + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    live = column < n
    EVEN: tl.constexpr = K % BLOCK_K == 0
    kind = x.dtype.element_ty
    x_at = x + row[:, None] * K + i[None, :]
    at = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * K + i[None, :]
    up_at = at + n.to(tl.int64) * K
    if norm is not None:
        # The rows whole, or in as few pieces as registers allow: each piece costs a trip to the L2 cache.
        PART: tl.constexpr = ROW if ROW * BLOCK_M <= 16384 else 16384 // BLOCK_M
        squares = tl.zeros([BLOCK_M], tl.float32)
        for k in range(0, K, PART):
            j = k + tl.arange(0, PART)
            mask = (row[:, None] < rows) & (j[None, :] < K)
            v = tl.load(x + row[:, None] * K + j[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(v * v, 1)
        scale = 1.0 / tl.sqrt_rn(squares / K + eps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        v = tl.load(x_at + k, mask=(row[:, None] < rows) & (k + i[None, :] < K), other=0.0)
        if norm is not None:
            g = tl.load(norm + k + i, mask=k + i < K, other=0.0).to(tl.float32)
            v = (v.to(tl.float32) * scale[:, None] * g[None, :]).to(kind)
        if EVEN:
            tile = tl.load(at + k)
        else:
            tile = tl.load(at + k, mask=k + i[None, :] < K, other=0.0)
        acc = tl.dot(v, tile.T, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                tile_up = tl.load(up_at + k)
            else:
                tile_up = tl.load(up_at + k, mask=k + i[None, :] < K, other=0.0)
            up = tl.dot(v, tile_up.T, up, input_precision="ieee")
    finished(
        acc, up, bias, residual, out, row[:, None], column[None, :], n, (row[:, None] < rows) & live[None, :], GATED
    )  # fmt: skip
