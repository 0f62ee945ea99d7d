"""The parts of a decoder layer: rotary positions, attention with grouped heads, and the gated MLP.

Projections that read the same input are stored as one matrix (q, k and v; gate and up): a decode
step, bound by reading weights, launches few large products. All other modules carry the names of
Hugging Face checkpoints. In comments: T tokens, Hq and Hk query and KV heads, d the size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minikv.attention.backend import AttentionBackend, LayerAttention
from minikv.models.config import ModelConfig


class Linear(nn.Module):
    """``x @ weight.T + bias`` with uninitialised, untrained parameters: checkpoints fill them in
    place."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, **where), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_out, **where), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if x.device.type == "cpu" and x.dtype == torch.float32 and 1 <= tokens <= 8:
            if (
                tokens == 1 and torch.compiler.is_compiling()
            ):  # a loop that Inductor joins to those around it
                out = (self.weight * x).sum(-1)[None]
            else:  # MKL reads the weights up to twice as fast this way round, if there are at least two columns
                columns = torch.cat((x, x)) if tokens == 1 else x  # [max(T, 2), in]
                out = (self.weight @ columns.t()).t()[:tokens].contiguous()
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **where), requires_grad=False)
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation speed of each pair of a head, fp32 [d / 2], and the factor on cos and sin.

    Unscaled it is ``theta ** (-2i / d)``. "linear" divides all by a factor (position
    interpolation); "llama3" divides only the slow ones, with a smooth passage between; "yarn" (Peng
    et al. 2023) ramps between divided and undivided by how often a pair turns within the original
    context, and scales the scores a little through cos and sin.
    """
    d = config.mla.rope_dim if config.mla else config.head_dim
    base, scaling = config.rope_theta, config.rope_scaling or {"rope_type": "default"}
    speed = 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))
    kind = scaling["rope_type"]
    if kind == "linear":
        return speed / scaling["factor"], 1.0
    if kind == "factors":
        return speed / torch.tensor(scaling["factors"]), 1.0
    if kind == "llama3":
        context, low, high = (
            scaling[k]
            for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        turns = context * speed / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, untouched; 0: slow, divided
        return (1 - keep) * speed / scaling["factor"] + keep * speed, 1.0
    if kind == "yarn":
        return _yarn(speed, d, base, scaling)
    return speed, 1.0


def _yarn(speed: Tensor, d: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return d * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    if first == last:
        last += 0.001
    divided = ((torch.arange(d // 2).float() - first) / (last - first)).clamp(0, 1)
    scale = scaling.get("attention_factor")
    if scale is None:
        above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = (
            yarn_mscale(factor, above) / yarn_mscale(factor, below)
            if above and below
            else yarn_mscale(factor)
        )
    return speed / factor * divided + speed * (1 - divided), scale


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Yarn's correction of the attention temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rotary(nn.Module):
    """Cosines and sines of the tokens' positions, computed once per forward pass and used by all
    layers."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        inv_freq, self.scale = inverse_frequencies(config)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle = positions.float()[:, None, None] * self.inv_freq  # [T, 1, d / 2]
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the pairs of every head of x [T, H, d] by their angles.

    Pair i is numbers (i, i + d/2), or (2i, 2i + 1) when `interleaved` (DeepSeek). The result always
    has the first members in its first half: queries and keys agree, and only their dot product
    matters.
    """
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SelfAttention(nn.Module):
    """Grouped-query attention: projections and positions here, keys, values and scores in the
    attention backend."""

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.layer, self.q_heads, self.kv_heads, self.d = (
            layer,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
        )
        heads = config.q_heads + 2 * config.kv_heads
        self.qkv_proj = Linear(config.hidden_size, heads * self.d, config.qkv_bias, **where)
        self.o_proj = Linear(config.q_heads * self.d, config.hidden_size, config.o_bias, **where)
        self.q_norm = RMSNorm(self.d, config.rms_eps, **where) if config.qk_norm else None
        self.k_norm = RMSNorm(self.d, config.rms_eps, **where) if config.qk_norm else None
        self.sinks = (
            nn.Parameter(torch.empty(config.q_heads, **where), requires_grad=False)
            if config.sinks
            else None
        )
        self.options = LayerAttention(sliding_window=config.sliding_window[layer], sinks=self.sinks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        rotated = self.q_heads + self.kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.d)  # [T, Hq + 2 Hk, d]
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (self.q_norm(qk[:, : self.q_heads]), self.k_norm(qk[:, self.q_heads :])), dim=1
            )
        qk = rotate(qk, cos, sin)
        q, k = qk[:, : self.q_heads], qk[:, self.q_heads :]  # [T, Hq, d], [T, Hk, d]
        out = attention.forward(self.layer, q, k, v, self.options)  # [T, Hq, d]
        return self.o_proj(out.reshape(x.shape[0], -1))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.size = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, 2 * self.size, **where)
        self.down_proj = Linear(self.size, config.hidden_size, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).split(self.size, dim=-1)  # [T, intermediate] each
        return self.down_proj(F.silu(gate) * up)
