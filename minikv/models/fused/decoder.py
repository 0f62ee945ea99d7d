"""A decode step in few kernels: the same decoder, its layers as seven launches for one row, eight
or nine for a few.

Between two reads of weights nothing is launched that could be part of the one before or after it.
The results are the plain decoder's but for the order of additions: each fused kernel rounds where
its parts would. Eager and captured steps run the same kernels, and from 2 to ``MOST_ROWS`` rows a
row's numbers do not depend on the others.

======================  ==========  ==========================  ================================
for each layer          one row     up to ``MOST_ROWS`` rows    more rows
======================  ==========  ==========================  ================================
norm, q/k/v             1           2 (with the sum before)     2 (with the sum before), cuBLAS
q/k norm, rotate, K/V   1           1                           1
attention               2           1 or 2                      1 or 2
output, sum             1           1                           1, cuBLAS
norm, gate and up, act  1           2 (with the sum before)     3 (with the sum before), cuBLAS
down, sum               1           1                           1, cuBLAS
======================  ==========  ==========================  ================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention.backend import AttentionBackend, Metadata
from minikv.device import capability_of
from minikv.models.decoder import Decoder
from minikv.models.fused.between import add_norm, silu_mul
from minikv.models.fused.few_rows import MOST_ROWS, add_parts, multiply
from minikv.models.fused.one_row import project
from minikv.models.fused.qkv import rotate_and_store
from minikv.models.layers import Linear, RMSNorm, SelfAttention


def fused_for(decoder: Decoder, attention: AttentionBackend) -> FusedDecoder | None:
    """The fused form for decode steps, where there are kernels for it: Triton on sm80 or newer, no
    latent attention."""
    compiles = attention.backend == "triton" and attention.device.type == "cuda"
    if decoder.config.mla or not compiles or capability_of(attention.device) < (8, 0):
        return None
    return FusedDecoder(decoder, attention.table.table.shape[1])


class FusedDecoder:
    """Calls like :class:`Decoder`, for steps with one new token per row.

    Parameters
    ----------
    decoder
        The model, whose weights are used as they are.
    longest
        Positions are below this: the cosines and sines of all of them are kept.
    """

    def __init__(self, decoder: Decoder, longest: int) -> None:
        self.decoder = decoder
        weight = decoder.embed_tokens.weight
        with torch.inference_mode(False):
            angles = decoder.rotary(torch.arange(longest, device=weight.device), weight.dtype)
        self.cos, self.sin = (part.view(longest, -1).contiguous() for part in angles)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        metadata: Metadata,
        logits_at: Tensor | None = None,
        keep: Sequence[int] = (),
    ) -> Any:
        """Logits, and hidden states of the layers `keep`, as ``Decoder.forward`` gives them."""
        decoder = self.decoder
        decoder.check_keep(keep)
        kept: dict[int, Tensor] = {}
        hidden = F.embedding(token_ids, decoder.embed_tokens.weight)  # [rows, hidden]
        stream = OneRow(hidden) if token_ids.shape[0] == 1 else Rows(hidden)
        for i, layer in enumerate(decoder.layers):
            attn, mlp = layer.self_attn, layer.mlp
            qkv = stream.read(attn.qkv_proj, layer.input_layernorm)
            if i - 1 in keep:
                kept[i - 1] = stream.hidden
            stream.add(self._attend(attn, qkv, positions, attention, metadata), attn.o_proj)
            gated = stream.read(mlp.gate_up_proj, layer.post_attention_layernorm, gated=True)
            stream.add(gated, mlp.down_proj)
        logits = add_parts(stream.read(decoder.lm_head, decoder.norm), hidden.dtype)
        kept[len(decoder.layers) - 1] = stream.hidden
        if logits_at is not None:
            logits = logits[logits_at]
        return (logits, torch.stack([kept[i] for i in keep], 1)) if keep else logits

    def _attend(
        self,
        attn: SelfAttention,
        qkv: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        metadata: Metadata,
    ) -> Tensor:
        """Attention's output [rows, q_heads * d] for the projection of each row."""
        pool, few = attention.pool, qkv.shape[-2] <= MOST_ROWS
        q = rotate_and_store(
            *(qkv, self.cos, self.sin, positions, metadata.out_slots),
            *(pool.k(attn.layer), pool.v(attn.layer)),
            q_norm=attn.q_norm and attn.q_norm.weight,
            k_norm=attn.k_norm and attn.k_norm.weight,
            eps=self.decoder.config.rms_eps,
            dependent=few,
        )
        return attention.decode(attn.layer, q, metadata, early=few).view(q.shape[0], -1)


class OneRow:
    """The stream of one row: norms and sums are parts of the products around them."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden  # [1, hidden]

    def read(self, linear: Linear, norm: RMSNorm, gated: bool = False) -> Tensor:
        """The product of the normalised stream."""
        return project(
            self.hidden, linear.weight, linear.bias, norm=norm.weight, eps=norm.eps, gated=gated
        )

    def add(self, x: Tensor, linear: Linear) -> None:
        """Add the product of x to the stream."""
        self.hidden = project(x, linear.weight, linear.bias, residual=self.hidden)


class Rows:
    """The stream of several rows: what is added waits for the next norm, whose kernel adds it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden  # [rows, hidden]
        self.waiting: Tensor | None = None
        self.few = hidden.shape[0] <= MOST_ROWS
        self.times = multiply if self.few else by_cublas

    def read(self, linear: Linear, norm: RMSNorm, gated: bool = False) -> Tensor:
        x, self.hidden = add_norm(self.hidden, self.waiting, norm.weight, norm.eps, self.few)
        return self.times(x, linear.weight, linear.bias, gated=gated)

    def add(self, x: Tensor, linear: Linear) -> None:
        self.waiting = self.times(x, linear.weight, linear.bias)


def by_cublas(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """As ``multiply``, for any number of rows."""
    y = F.linear(x, weight, bias)
    return silu_mul(y) if gated else y
