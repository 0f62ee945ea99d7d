"""Rows of K and V to their slots: one Triton kernel for both, and the PyTorch twin."""

from __future__ import annotations

import torch

from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Elements of K, and of V, that one program moves: 8 or 16 a thread, so whole 16-byte loads.
TILE = 2048


def store_triton(
    caches: list[torch.Tensor], slots: torch.Tensor, rows: list[torch.Tensor], scales: list[float]
) -> None:
    """Write ``rows[p][i]`` to ``caches[p][slots[i]]`` for K (p = 0) and, where given, V (p = 1), in
    one launch.

    Parameters
    ----------
    caches
        One layer of the pool, each ``[slots, heads, head_dim]``, contiguous.
    slots
        int32 or int64 ``[n]``. On CUDA a row whose slot is outside the pool is dropped, so nothing
        is overwritten.
    rows
        ``[n, heads, head_dim]`` with any strides between tokens and between heads.
    scales
        Stored = value / scale.
    """
    k_cache, v_cache = caches[0], caches[-1]
    k, v = (row if row.stride(2) == 1 else row.contiguous() for row in (rows[0], rows[-1]))
    if not slots.is_contiguous():
        slots = slots.contiguous()
    n, heads, dim = k.shape
    width = heads * dim
    # The largest power of two that divides the row (at least 64 columns) leaves no lane idle: 576 =
    # 9 × 64.
    columns = min(width & -width, 1024)
    columns = columns if columns >= 64 else min(triton.next_power_of_2(width), 1024)
    tensors = (k, v, k_cache, v_cache, slots)
    scalars = (
        n,
        k_cache.shape[0],
        scales[0],
        scales[-1],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        width,
    )
    scaled = scales != [1.0] * len(scales)
    grid = (triton.cdiv(n, TILE // columns), triton.cdiv(width, columns))
    launch(
        store_kernel,
        grid,
        (*tensors, *scalars),
        num_warps=8 if scaled else 4,
        HEAD_DIM=dim,
        HAS_V=len(rows) == 2,
        SCALED=scaled,
        SATURATE=k_cache.dtype == FP8,
        TOKENS=TILE // columns,
        COLUMNS=columns,
    )


@triton.jit
def row_offset(slot, stride):
    """Where a slot's row begins. Widened before the product: in 32 bits a large pool would wrap to
    negative."""
    return slot.to(tl.int64) * stride


@triton.jit
def converted(x, scale, dtype: tl.constexpr, SCALED: tl.constexpr, SATURATE: tl.constexpr):
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), scale)
    if SATURATE:
        x = x.to(tl.float32)
        x = tl.where(x > 448.0, 448.0, x)  # comparisons, unlike min and max, let NaN through
        x = tl.where(x < -448.0, -448.0, x)
    return x.to(dtype)  # type: ignore


@triton.jit(
    do_not_specialize=["slots_ptr", "n", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr", "n", "num_slots"],
)
def store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    n, num_slots, k_scale, v_scale,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, width,
    HEAD_DIM: tl.constexpr, HAS_V: tl.constexpr, SCALED: tl.constexpr, SATURATE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) moves columns j*COLUMNS.. of the K rows and V rows of tokens i*TOKENS.. ."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
    # Rows are read whether or not their slot is good: no load waits for the slots.
    read = (token < n)[:, None] & (column < width)[None, :]
    write = ((slot >= 0) & (slot < num_slots))[:, None] & (column < width)[None, :]
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    target = row_offset(slot, width)[:, None] + column[None, :]
    k_from = row_offset(token, k_token_stride)[:, None] + (head * k_head_stride + dim)[None, :]
    k = tl.load(k_ptr + k_from, mask=read)
    if HAS_V:
        v_from = row_offset(token, v_token_stride)[:, None] + (head * v_head_stride + dim)[None, :]
        v = tl.load(v_ptr + v_from, mask=read)
        v = converted(v, v_scale, v_cache_ptr.dtype.element_ty, SCALED, SATURATE)
        tl.store(v_cache_ptr + target, v, mask=write)
    k = converted(k, k_scale, k_cache_ptr.dtype.element_ty, SCALED, SATURATE)
    tl.store(k_cache_ptr + target, k, mask=write)


def store_torch(
    caches: list[torch.Tensor], slots: torch.Tensor, rows: list[torch.Tensor], scales: list[float]
) -> None:
    """The same bits as :func:`store_triton`, with PyTorch operations on any device."""
    for cache, row, scale in zip(caches, rows, scales, strict=True):
        # A tensor, not a number: CUDA divides by a number as a product with its rounded inverse.
        value = row if scale == 1.0 else row.float() / torch.full((), scale, device=row.device)
        # fp8 is stored as bytes: PyTorch has no indexed store for it on every device.
        if cache.dtype == FP8:
            value = value.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)
            cache.view(torch.uint8)[slots.long()] = value.view(torch.uint8)
        else:
            cache[slots.long()] = value.to(cache.dtype)
