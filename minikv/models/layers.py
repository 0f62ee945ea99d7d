"""The parts of a decoder layer: attention with grouped heads, and the gated MLP.

Projections that read the same input are stored as one matrix (q, k and v; gate and up): a decode
step, bound by reading weights, launches few large products. All other modules carry the names of
Hugging Face checkpoints. In comments: T tokens, Hq and Hk query and KV heads, d the size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minikv.attention.backend import AttentionBackend, LayerAttention
from minikv.models.config import ModelConfig
from minikv.models.rope import rotate


class Linear(nn.Module):
    """``x @ weight.T + bias`` with uninitialised, untrained parameters: checkpoints fill them in
    place."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, **where), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_out, **where), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 <= tokens <= 8:
            return F.linear(x, self.weight, self.bias)
        if tokens == 1 and torch.compiler.is_compiling():
            out = (self.weight * x).sum(-1)[None]  # a loop that Inductor joins to its neighbours
        else:
            # MKL reads the weights up to twice as fast this way round, given two columns or more.
            columns = torch.cat((x, x)) if tokens == 1 else x
            out = (self.weight @ columns.t()).t()[:tokens].contiguous()
        return out if self.bias is None else out + self.bias


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **where), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class StepContext(NamedTuple):
    """What all layers of one step share: the angles of its tokens, and where attention finds keys.

    Attributes
    ----------
    cos, sin
        [T, 1, d / 2] for the positions of the step's tokens.
    attention, metadata
        The backend, and what its ``prepare`` gave for the step.
    """

    cos: Tensor
    sin: Tensor
    attention: AttentionBackend
    metadata: Any


class SelfAttention(nn.Module):
    """Grouped-query attention: projections and positions here, keys, values and scores in the
    attention backend."""

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.layer, self.d = layer, config.head_dim
        self.q_heads, self.kv_heads = config.q_heads, config.kv_heads
        heads = self.q_heads + 2 * self.kv_heads
        self.qkv_proj = Linear(config.hidden_size, heads * self.d, config.qkv_bias, **where)
        self.o_proj = Linear(self.q_heads * self.d, config.hidden_size, config.o_bias, **where)
        self.q_norm = self.k_norm = self.sinks = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.d, config.rms_eps, **where)
            self.k_norm = RMSNorm(self.d, config.rms_eps, **where)
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(self.q_heads, **where), requires_grad=False)
        self.options = LayerAttention(sliding_window=config.sliding_window[layer], sinks=self.sinks)

    def forward(self, x: Tensor, context: StepContext) -> Tensor:
        rotated = self.q_heads + self.kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.d)  # [T, Hq + 2 Hk, d]
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (self.q_norm(qk[:, : self.q_heads]), self.k_norm(qk[:, self.q_heads :])), dim=1
            )
        qk = rotate(qk, context.cos, context.sin)
        q, k = qk[:, : self.q_heads], qk[:, self.q_heads :]  # [T, Hq, d], [T, Hk, d]
        out = context.attention.forward(self.layer, q, k, v, context.metadata)  # [T, Hq, d]
        return self.o_proj(out.reshape(x.shape[0], -1))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, **where)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [T, intermediate] each
        return self.down_proj(F.silu(gate) * up)
