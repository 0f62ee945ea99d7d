"""Multi-head latent attention (DeepSeek-V2, 2024), absorbed: heads attend to the cached latent
itself.

A token caches one row, its latent c [r] and one rotated key [rope] that all heads share. Head h's
key is ``W_uk[h] c`` and its value ``W_uv[h] c``, but neither is ever built: ``q . (W_uk c) =
(W_uk^T q) . c`` moves the first onto the query, and ``sum p_i W_uv c_i = W_uv (sum p_i c_i)`` the
second onto the output. Attention then is multi-query with d_qk = r + rope (the row) and d_v = r
(its first r numbers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minikv.attention.backend import LayerAttention
from minikv.models.config import ModelConfig
from minikv.models.layers import Linear, RMSNorm, StepContext
from minikv.models.rope import rotate, yarn_mscale


class LatentAttention(nn.Module):
    """The absorbed form for prefill and decode alike; weights named as in DeepSeek-V2 and V2-Lite
    checkpoints."""

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        assert mla is not None
        self.layer, self.heads = layer, config.q_heads
        self.rank, self.rope, self.nope = mla.kv_lora_rank, mla.rope_dim, mla.nope_dim
        self.q_rank, width = mla.q_lora_rank, mla.nope_dim + mla.rope_dim
        if self.q_rank is None:
            self.q_proj = Linear(hidden, self.heads * width, **where)
        else:
            self.q_a_proj = Linear(hidden, self.q_rank, **where)
            self.q_a_layernorm = RMSNorm(self.q_rank, 1e-6, **where)
            self.q_b_proj = Linear(self.q_rank, self.heads * width, **where)
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.rope, **where)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6, **where)
        self.kv_b_proj = Linear(self.rank, self.heads * (mla.nope_dim + mla.v_dim), **where)
        self.o_proj = Linear(self.heads * mla.v_dim, hidden, **where)
        sm_scale = width**-0.5
        scaling = config.rope_scaling or {}
        if scaling.get("mscale_all_dim"):
            sm_scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        self.options = LayerAttention(sm_scale=sm_scale)

    def forward(self, x: Tensor, context: StepContext) -> Tensor:
        if self.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(x.shape[0], self.heads, -1)  # [T, H, nope + rope]
        latent = self.kv_a_proj_with_mqa(x)[:, None]  # [T, 1, r + rope]
        k_rope = rotate(latent[..., self.rank :], context.cos, context.sin, interleaved=True)
        row = torch.cat((self.kv_a_layernorm(latent[..., : self.rank]), k_rope), -1)  # to cache
        up = self.kv_b_proj.weight.view(self.heads, -1, self.rank)  # [H, nope + v, r]
        w_uk, w_uv = up[:, : self.nope], up[:, self.nope :]
        q_nope = torch.bmm(q[..., : self.nope].transpose(0, 1), w_uk).transpose(0, 1)  # [T, H, r]
        q_rope = rotate(q[..., self.nope :], context.cos, context.sin, interleaved=True)
        q, v = torch.cat((q_nope, q_rope), dim=-1), row[..., : self.rank]
        out = context.attention.forward(self.layer, q, row, v, context.metadata)  # [T, H, r]
        out = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)  # [T, H, v]
        return self.o_proj(out.reshape(x.shape[0], -1))
