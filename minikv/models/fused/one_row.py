"""Matrix times one row, with what stands around it: normalised input, gated output, residual added
on the way out.

A decode step of one request reads every weight for a single row, so it takes as long as the weights
take to arrive. Two things keep them arriving: the norm before a product and the addition after it
cost no kernel of their own, and a product asks for its weights *before* it waits for its input
(programmatic dependent launch, sm90 and newer), so that the memory works on while the kernel before
it ends. Folding neighbours into a matrix-vector product is what FasterTransformer and TensorRT-LLM
do for small batches, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

# Bytes up to which a matrix is fetched ahead of its use. The L2 cache loses parts of larger ones
# before they are read: one request of Llama-3-8B's shape took 20 % longer on an H200 with all of
# them fetched ahead.
AHEAD_BYTES = 1 << 24


@dataclass(frozen=True)
class Tiles:
    """What one program of a product computes: `block_n` outputs, in steps of `block_k` inputs; with
    `parts`, only of its part of the inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 3
    parts: int = 1


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``residual + act(rms_norm(x) @ weight.T + bias)`` in one kernel, for one row.

    It rounds where the plain decoder's operations do: after the norm, the product, silu, the gate
    and the sum.

    Parameters
    ----------
    x
        [1, k]; fp16, bf16 or fp32.
    weight, bias
        [n, k] contiguous, and [n].
    norm, eps
        Weight [k] of an RMSNorm of `x`; None for none.
    gated
        The first half of the n outputs goes through silu and multiplies the second: n / 2 columns
        are left.
    residual
        [1, columns], added to the result.
    tiles
        For tests and tuning, in place of what is chosen here.

    Returns
    -------
    Tensor
        [1, n or n / 2] in x's dtype.
    """
    n, k = weight.shape
    if gated:
        n //= 2
    tiles = tiles or tiles_of(n, k, gated)
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    launch(
        one_row_kernel,
        (triton.cdiv(n, tiles.block_n),),
        (x, weight, bias, norm, residual, out, n, eps),
        num_warps=tiles.num_warps,
        dependent=True,
        K=k,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GATED=gated,
        WARPS=tiles.num_warps,
        AHEAD=k > tiles.block_k and weight.nbytes <= AHEAD_BYTES,
    )
    return out


def tiles_of(n: int, k: int, gated: bool) -> Tiles:
    """Block sizes for n outputs (pairs when `gated`) of k inputs: small programs, many of which
    share a processor."""
    whole = max(32, triton.next_power_of_2(k))
    if k >= 4096 and not gated:
        return Tiles(8 if n >= 16384 else 4, 1024, 4)
    if n >= 16384:
        return Tiles(8, min(512, whole), 2)
    if gated:
        return Tiles(2, min(512, whole), 2)
    if n >= 2048:
        return Tiles(4, min(512, whole), 2)
    return Tiles(2, min(1024, whole), 4)


@triton.jit
def fetch_ahead(
    weight, first, n,
    ROW_BYTES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Have the weights of this program brought into the L2 cache, without waiting for them.

    While the kernel before this one ends, memory would be idle: this fills the gap. The rows (of
    the gate, and of what it multiplies) lie end to end; each warp names its share of them by one
    instruction.
    """
    share: tl.constexpr = BLOCK_N * ROW_BYTES // WARPS // 16 * 16
    if ROW_BYTES % 16 == 0 and share > 0:
        start = tl.arange(0, 32 * WARPS) // 32 * share
        size = tl.minimum(tl.minimum(n - first, BLOCK_N) * ROW_BYTES - start, share)
        for part in tl.static_range(1 + GATED):  # type: ignore
            row = (first + part * n).to(tl.int64)
            at = weight.to(tl.int64, bitcast=True) + row * ROW_BYTES + start
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.gt.s32 p, $2, 0; "
                "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r",
                [at, size],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def gate_times_up(gate, up, kind: tl.constexpr):
    """``silu(gate) * up``, rounded to `kind` as each step's own kernel would."""
    gate = gate.to(kind).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return (act * up.to(kind).to(tl.float32)).to(kind)


@triton.jit
def normalised(v, gain, scale, kind: tl.constexpr):
    """A part of a row, normalised and rounded to its dtype; fp32."""
    return (v * scale * gain.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def one_row_kernel(
    x, weight, bias, norm, residual, out, n, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    WARPS: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``y[j] = sum_i x[i] w[j, i]``: one program computes `BLOCK_N` outputs from as many rows of w;
    gated, from as many of the gate and as many of what it multiplies.

    ::

               i  0      BLOCK_K            K
                 +-------+-------+-----+     The first tile of w, and the norm's weights, are on
        j rows   | tile  | next  | ... |  w  their way before the kernel waits for x; each further
                 +-------+-------+-----+     tile before the one in hand is multiplied. Sums stay
                                             apart until the end: one reduction per program.

    What is loaded after the wait is loaded at once, x and the residual together: a trip to the L2
    cache takes as long as a tenth of the whole kernel.
    """
    let_next_start(DEPENDENT)
    kind = x.dtype.element_ty
    first = tl.program_id(0) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    live = column < n
    i = tl.arange(0, BLOCK_K)
    at = weight + column.to(tl.int64)[:, None] * K + i[None, :]
    second = at + n.to(tl.int64) * K  # gated: the rows that the gate multiplies
    inside = live[:, None] & (i < K)[None, :]
    tile = tl.load(at, mask=inside, other=0.0)
    if GATED:
        tile_up = tl.load(second, mask=inside, other=0.0)
    if norm is not None:
        gain = tl.load(norm + i, mask=i < K, other=0.0)
    if AHEAD and DEPENDENT:
        row_bytes: tl.constexpr = K * weight.dtype.element_ty.primitive_bitwidth // 8
        fetch_ahead(weight, first, n, row_bytes, BLOCK_N, WARPS, GATED)
    wait_for_previous(DEPENDENT)

    v = tl.load(x + i, mask=i < K, other=0.0).to(tl.float32)
    old = 0.0
    if residual is not None:
        old = tl.load(residual + column, mask=live, other=0.0)
    if norm is not None:
        squares = v * v
        for k in range(BLOCK_K, K, BLOCK_K):
            further = tl.load(x + k + i, mask=k + i < K, other=0.0).to(tl.float32)
            squares += further * further
        scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / K + eps)
        v = normalised(v, gain, scale, kind)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(BLOCK_K, K, BLOCK_K):
        inside = live[:, None] & (k + i < K)[None, :]
        next_tile = tl.load(at + k, mask=inside, other=0.0)
        if GATED:
            next_up = tl.load(second + k, mask=inside, other=0.0)
        next_v = tl.load(x + k + i, mask=k + i < K, other=0.0).to(tl.float32)
        if norm is not None:
            gain = tl.load(norm + k + i, mask=k + i < K, other=0.0)
            next_v = normalised(next_v, gain, scale, kind)
        acc += tile.to(tl.float32) * v[None, :]
        tile = next_tile
        if GATED:
            up += tile_up.to(tl.float32) * v[None, :]
            tile_up = next_up
        v = next_v
    y = tl.sum(acc + tile.to(tl.float32) * v[None, :], 1)
    if bias is not None:
        y += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    y = y.to(kind)
    if GATED:
        other = tl.sum(up + tile_up.to(tl.float32) * v[None, :], 1)
        if bias is not None:
            other += tl.load(bias + n + column, mask=live, other=0.0).to(tl.float32)
        y = gate_times_up(y, other, kind)
    if residual is not None:
        y = (old.to(tl.float32) + y.to(tl.float32)).to(kind)
    tl.store(out + column, y, mask=live)
