"""Rotary positions (Su et al. 2021): how fast each pair of a head turns, and the turning itself.

A query and a key that are turned by their positions have a dot product that depends on the distance
between them alone. T tokens, H heads of d numbers: d / 2 pairs, each with a speed of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from minikv.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation speed of each pair of a head, fp32 [d / 2], and the factor on cos and sin.

    Unscaled it is ``theta ** (-2i / d)``. "linear" divides all by a factor (position
    interpolation); "llama3" divides only the slow ones, with a smooth passage between; "yarn" (Peng
    et al. 2023) ramps between divided and undivided by how often a pair turns within the original
    context, and scales the scores a little through cos and sin.
    """
    d = config.mla.rope_dim if config.mla else config.head_dim
    scaling = config.rope_scaling or {"rope_type": "default"}
    speed = 1.0 / (config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))
    kind = scaling["rope_type"]
    if kind == "linear":
        return speed / scaling["factor"], 1.0
    if kind == "factors":
        return speed / torch.tensor(scaling["factors"]), 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        context = scaling["original_max_position_embeddings"]
        turns = context * speed / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, untouched; 0: slow, divided
        return (1 - keep) * speed / scaling["factor"] + keep * speed, 1.0
    if kind == "yarn":
        return _yarn(speed, d, config.rope_theta, scaling)
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
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    scale = yarn_mscale(factor)
    if above and below:
        scale = yarn_mscale(factor, above) / yarn_mscale(factor, below)
    scale = scaling.get("attention_factor") or scale
    return speed / factor * divided + speed * (1 - divided), scale


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Yarn's correction of the attention temperature for a context stretched by `factor`."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


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
