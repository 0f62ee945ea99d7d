"""From a projection to attention's inputs in one kernel: norm of q and k, rotation, and K and V
written to their slots.

Between the two largest reads of a layer, the q/k/v weights and the cached keys, lie a few thousand
numbers. PyTorch takes eight kernels for them; here each program takes some heads of one token,
whichever of the three they belong to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.dependent import let_next_start, wait_for_previous
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton
from minikv.memory.store import FP8, converted, row_offset
from minikv.models.fused.few_rows import sum_of_parts

HEADS = 4  # that one program takes


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    dependent: bool = True,
) -> Tensor:
    """Rotated queries; keys (rotated) and values go to the pool. It rounds where the plain
    decoder's operations do.

    Parameters
    ----------
    qkv
        [tokens, (q_heads + 2 kv_heads) * d], contiguous: q, k and v of each token. Or in parts that
        are still to be added up, fp32 [parts, tokens, ...].
    cos, sin
        [longest context, d / 2] in the model's dtype, a row per position.
    positions, slots
        int64 [tokens]: where each token stands, and where its K and V go; a slot outside the pool
        is not written. Both must be older than the kernel before this one, since they are read
        before it has ended.
    k_cache, v_cache
        One layer of a pool, [slots, kv_heads, d], contiguous; any dtype that pools have.
    q_norm, k_norm, eps
        Weights [d] of an RMSNorm of each head; None for none.
    dependent
        Whether it may start before the kernel before it has ended, where the chip can.

    Returns
    -------
    Tensor
        [tokens, q_heads, d].
    """
    kv_heads, d = k_cache.shape[1:]
    tokens, heads = qkv.shape[-2], qkv.shape[-1] // d
    q_heads = heads - 2 * kv_heads
    q = torch.empty((tokens, q_heads, d), dtype=cos.dtype, device=qkv.device)
    launch(
        rotate_kernel,
        (tokens, triton.cdiv(heads, HEADS)),
        (
            qkv,
            q,
            k_cache,
            v_cache,
            cos,
            sin,
            q_norm,
            k_norm,
            positions,
            slots,
            k_cache.shape[0],
            eps,
        ),
        num_warps=1,
        dependent=dependent,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=d,
        HEADS=HEADS,
        BLOCK=triton.next_power_of_2(d // 2),
        PARTS=qkv.shape[0] if qkv.dim() == 3 else 1,
        SATURATE=k_cache.dtype == FP8,
    )
    return q


@triton.jit(do_not_specialize=["num_slots"])
def rotate_kernel(
    qkv, q, k_cache, v_cache, cos, sin, q_norm, k_norm, positions, slots,
    num_slots, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SATURATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (t, b): heads ``b * HEADS ..`` of token t, as two halves a, b [HEADS, d / 2].

    Turned, they are ``a cos - b sin`` and ``b cos + a sin``. Queries go to `q`, keys and values to
    the pool; values are neither normalised nor turned.
    """
    let_next_start(DEPENDENT)
    HALF: tl.constexpr = D // 2
    kind = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    is_q = head < Q_HEADS
    is_v = (head >= Q_HEADS + KV_HEADS)[:, None]
    slot = tl.load(slots + token)
    angle = tl.load(positions + token) * HALF + i
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    if q_norm is not None:
        norm = tl.where(is_q[:, None], q_norm + i[None, :], k_norm + i[None, :])
        norm_a = tl.load(norm, mask=inside[None, :], other=0.0).to(tl.float32)
        norm_b = tl.load(norm + HALF, mask=inside[None, :], other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)

    ALL: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    mask = (head < ALL)[:, None] & inside[None, :]
    at = token * ALL * D + head[:, None] * D + i[None, :]
    stride = tl.num_programs(0).to(tl.int64) * ALL * D
    a = sum_of_parts(qkv, at, mask, stride, PARTS, kind)
    b = sum_of_parts(qkv, at + HALF, mask, stride, PARTS, kind)
    turned_a, turned_b = a, b
    if q_norm is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        turned_a = (a * scale * norm_a).to(kind).to(tl.float32)
        turned_b = (b * scale * norm_b).to(kind).to(tl.float32)
    new_a = (turned_a * c).to(kind).to(tl.float32) - (turned_b * s).to(kind).to(tl.float32)
    new_b = (turned_b * c).to(kind).to(tl.float32) + (turned_a * s).to(kind).to(tl.float32)
    a = tl.where(is_v, a, new_a).to(kind)
    b = tl.where(is_v, b, new_b).to(kind)

    to_q = is_q[:, None] & mask
    q_at = q + token * Q_HEADS * D + head[:, None] * D + i[None, :]
    tl.store(q_at, a, mask=to_q)
    tl.store(q_at + HALF, b, mask=to_q)
    to_pool = (head >= Q_HEADS)[:, None] & mask & (slot >= 0) & (slot < num_slots)
    kv_head = tl.where(is_v, head[:, None] - Q_HEADS - KV_HEADS, head[:, None] - Q_HEADS)
    cache = tl.where(is_v, v_cache, k_cache)
    kv_at = cache + row_offset(slot, KV_HEADS * D) + kv_head * D + i[None, :]
    tl.store(kv_at, converted(a, 1.0, k_cache.dtype.element_ty, False, SATURATE), mask=to_pool)
    tl.store(
        kv_at + HALF, converted(b, 1.0, k_cache.dtype.element_ty, False, SATURATE), mask=to_pool
    )
