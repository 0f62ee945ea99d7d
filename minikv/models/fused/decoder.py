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

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention.backend import AttentionBackend, Metadata
from minikv.models.decoder import Decoder
from minikv.models.fused.between import add_norm, silu_mul
from minikv.models.fused.few_rows import MOST_ROWS, add_parts, multiply
from minikv.models.fused.one_row import project
from minikv.models.fused.qkv import rotate_and_store
from minikv.models.layers import MLP, SelfAttention


def fused_for(decoder: Decoder, attention: AttentionBackend) -> FusedDecoder | None:
    """The fused form for decode steps, where there are kernels for it: Triton on sm80 or newer, no
    latent attention."""
    device = attention.device
    on_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    fits = on_gpu and attention.backend == "triton" and decoder.config.mla is None
    return FusedDecoder(decoder, attention.table.table.shape[1]) if fits else None


class FusedDecoder:
    """Calls like :class:`Decoder`, for decode steps.

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
        logits_at: None = None,
        keep: Sequence[int] = (),
    ) -> Any:
        """Logits [rows, vocab] of one new token per row, and the hidden states in `keep`, as
        ``Decoder.forward`` gives them."""
        hidden = F.embedding(token_ids, self.decoder.embed_tokens.weight)  # [rows, hidden]
        run = self._one if token_ids.shape[0] == 1 else self._several
        kept: list[Tensor] = []

        def attend(attn: SelfAttention, qkv: Tensor) -> Tensor:
            return self._attend(attn, qkv, positions, attention, metadata)

        def note(layer: int, states: Tensor) -> None:
            if layer in keep:
                kept.append(states)

        logits = run(hidden, attend, note)
        return (logits, torch.stack(kept, 1)) if keep else logits

    def _one(
        self, hidden: Tensor, attend: Callable[..., Tensor], note: Callable[[int, Tensor], None]
    ) -> Tensor:
        for i, layer in enumerate(self.decoder.layers):
            attn, mlp, before, after = _parts(layer)
            qkv = project(
                hidden, attn.qkv_proj.weight, attn.qkv_proj.bias, norm=before.weight, eps=before.eps
            )
            out = attend(attn, qkv)
            hidden = project(out, attn.o_proj.weight, attn.o_proj.bias, residual=hidden)
            gated = project(
                hidden, mlp.gate_up_proj.weight, norm=after.weight, eps=after.eps, gated=True
            )
            hidden = project(gated, mlp.down_proj.weight, residual=hidden)
            note(i, hidden)
        final = self.decoder.norm
        return project(hidden, self.decoder.lm_head.weight, norm=final.weight, eps=final.eps)

    def _several(
        self, hidden: Tensor, attend: Callable[..., Tensor], note: Callable[[int, Tensor], None]
    ) -> Tensor:
        few = hidden.shape[0] <= MOST_ROWS
        times = multiply if few else by_cublas
        delta = None  # what the last product left to add to the stream: the next norm's kernel does
        for i, layer in enumerate(self.decoder.layers):
            attn, mlp, before, after = _parts(layer)
            x, hidden = add_norm(hidden, delta, before.weight, before.eps, few)
            note(i - 1, hidden)
            out = attend(attn, times(x, attn.qkv_proj.weight, attn.qkv_proj.bias))
            delta = times(out, attn.o_proj.weight, attn.o_proj.bias)
            x, hidden = add_norm(hidden, delta, after.weight, after.eps, few)
            delta = times(times(x, mlp.gate_up_proj.weight, gated=True), mlp.down_proj.weight)
        final = self.decoder.norm
        x, hidden = add_norm(hidden, delta, final.weight, final.eps, few)
        note(len(self.decoder.layers) - 1, hidden)
        return add_parts(times(x, self.decoder.lm_head.weight), x.dtype)

    def _attend(
        self,
        attn: SelfAttention,
        qkv: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        metadata: Metadata,
    ) -> Tensor:
        """Attention's output [rows, q_heads * d] for the projection of each row."""
        norms: dict[str, Any] = {}
        if attn.q_norm is not None and attn.k_norm is not None:
            norms = {
                "q_norm": attn.q_norm.weight,
                "k_norm": attn.k_norm.weight,
                "eps": attn.q_norm.eps,
            }
        pool, i, rows = attention.pool, attn.layer, qkv.shape[-2]
        slots, layer = metadata.out_slots, (pool.k(i), pool.v(i))
        few = rows <= MOST_ROWS
        q = rotate_and_store(
            qkv, self.cos, self.sin, positions, slots, *layer, **norms, dependent=few
        )
        return attention.decode(i, q, metadata, early=few).view(rows, -1)


def by_cublas(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """As ``multiply``, for any number of rows."""
    y = F.linear(x, weight, bias)
    return silu_mul(y) if gated else y


def _parts(layer: Any) -> tuple[SelfAttention, MLP, Any, Any]:
    return layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
