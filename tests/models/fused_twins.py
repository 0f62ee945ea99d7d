"""PyTorch twins of the fused kernels: the oracle of their tests.

Each rounds where the decoder's own parts do, and takes float64 as well.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minikv.memory.store import store_torch
from minikv.models.fused.few_rows import add_parts
from minikv.models.rope import rotate


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


def multiply_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """:func:`multiply` with PyTorch operations, whole and for any number of rows."""
    y = F.linear(x, weight, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_norm_torch(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`add_norm` with PyTorch operations."""
    total = x if delta is None else x + add_parts(delta, x.dtype)
    return F.rms_norm(total, norm.shape, norm, eps), total


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """:func:`silu_mul` with PyTorch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_and_store_torch(
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
) -> Tensor:
    """:func:`rotate_and_store` with PyTorch operations."""
    kv_heads, d = k_cache.shape[1:]
    qkv = add_parts(qkv, cos.dtype)
    parts = qkv.view(qkv.shape[0], -1, d)
    q, k, v = parts.split((parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None:
        q = F.rms_norm(q, (d,), q_norm, eps)
    if k_norm is not None:
        k = F.rms_norm(k, (d,), k_norm, eps)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    inside = (slots >= 0) & (slots < k_cache.shape[0])
    store_torch(
        [k_cache, v_cache], slots[inside], [rotate(k, cos, sin)[inside], v[inside]], [1.0, 1.0]
    )
    return rotate(q, cos, sin)
