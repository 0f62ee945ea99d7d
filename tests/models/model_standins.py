"""An attention backend in plain PyTorch for the models' tests: dense history per request, no pages,
no kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class DenseAttention:
    """Keeps each request's keys and values per layer, and attends with a softmax written out. Its
    metadata are the options of all layers."""

    history: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, *spans: tuple[int, int]) -> DenseAttention:
        """The next forward holds, end to end, `count` new tokens of each (request, count)."""
        self.spans = list(spans)
        return self

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layers: Any) -> Tensor:
        options = layers[layer]
        out, at = [], 0
        for request, count in self.spans:
            old_k, old_v = self.history.get((layer, request), (k[:0], v[:0]))
            keys, values = (
                torch.cat((old_k, k[at : at + count])),
                torch.cat((old_v, v[at : at + count])),
            )
            self.history[layer, request] = keys, values
            out.append(self._attend(q[at : at + count], keys, values, options))
            at += count
        return torch.cat(out)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, options: Any) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        scale = q.shape[-1] ** -0.5 if options.sm_scale is None else options.sm_scale
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)).float() * scale
        gap = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None]
        hidden = gap < 0
        if options.sliding_window >= 0:
            hidden = hidden | (gap > options.sliding_window)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        if options.sinks is not None:
            sink = options.sinks.float()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : len(keys)].to(values.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def full_logits(decoder: Any, ids: list[int]) -> Tensor:
    """Logits of every token of one request in one pass."""
    attention = DenseAttention().begin((0, len(ids)))
    ids_, positions = torch.tensor(ids), torch.arange(len(ids))
    return decoder(ids_, positions, attention, decoder.attention_layers)
