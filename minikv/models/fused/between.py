"""What stands between the products of a large decode batch: residual sum with norm, and silu with
gate."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton
from minikv.models.fused.few_rows import sum_of_parts
from minikv.models.fused.one_row import gate_times_up


def add_norm(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum ``x + delta`` and its RMSNorm, each rounded to x's dtype.

    Parameters
    ----------
    x, delta
        [rows, k], contiguous; without `delta` the sum is x itself. `delta` may be in parts, fp32
        [parts, rows, k].
    norm, eps
        Weight [k] and epsilon.
    dependent
        Whether it may start before the kernel before it has ended, where the chip can.

    Returns
    -------
    normed, total
        Both [rows, k].
    """
    rows, k = x.shape
    normed = torch.empty_like(x)
    total = x
    parts = 1
    if delta is not None:
        total = torch.empty_like(x)
        parts = delta.shape[0] if delta.dim() == 3 else 1
    block = triton.next_power_of_2(k)
    launch(
        add_norm_kernel,
        (rows,),
        (x, delta, norm, normed, total, eps),
        num_warps=max(1, min(8, block // 512)),
        dependent=dependent,
        K=k,
        BLOCK=block,
        PARTS=parts,
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [rows, 2 k], gate in the first half of each row: [rows, k]."""
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, k), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(k))
    launch(
        silu_mul_kernel,
        (rows, triton.cdiv(k, block)),
        (gate_up, out),
        dependent=False,
        K=k,
        BLOCK=block,
    )
    return out


@triton.jit
def add_norm_kernel(
    x, delta, norm, normed, total, eps, K: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: ``t = x + delta``, ``t / sqrt(mean(t^2) + eps) * norm``."""
    let_next_start(DEPENDENT)
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * K + i
    weight = tl.load(norm + i, mask=i < K, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    t = tl.load(x + at, mask=i < K, other=0.0).to(tl.float32)
    if delta is not None:
        t += sum_of_parts(
            delta, at, i < K, tl.num_programs(0).to(tl.int64) * K, PARTS, total.dtype.element_ty
        )
        rounded = t.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=i < K)
        t = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(t * t, 0) / K + eps)
    tl.store(normed + at, (t * scale * weight).to(normed.dtype.element_ty), mask=i < K)


@triton.jit
def silu_mul_kernel(gate_up, out, K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Program (row, b): columns ``b * BLOCK ..`` of one row."""
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * K + i, mask=i < K, other=0.0)
    up = tl.load(gate_up + row * 2 * K + K + i, mask=i < K, other=0.0)
    tl.store(out + row * K + i, gate_times_up(gate, up, out.dtype.element_ty), mask=i < K)
