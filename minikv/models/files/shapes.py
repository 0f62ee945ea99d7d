"""Published model shapes for measuring without a download, and ``"tiny"`` for tests: weights are
drawn from a seed."""

from __future__ import annotations

import torch

from minikv.errors import ArgumentError
from minikv.models.config import MLAShape, ModelConfig
from minikv.models.decoder import Decoder

# Layers, hidden and intermediate size; query heads, KV heads and their size; vocabulary, context.
TINY = ModelConfig("llama", 3, 64, 128, 4, 2, 16, 512, 2048, eos_ids=frozenset([256]))
SHAPES = {
    "tiny": TINY,
    "smollm2-135m": ModelConfig(
        *("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192),
        rope_theta=1e5,
        rms_eps=1e-5,
        tie_embeddings=True,
    ),
    "qwen3-0.6b": ModelConfig(
        *("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960),
        rope_theta=1e6,
        tie_embeddings=True,
        qk_norm=True,
    ),
    "llama-3-8b": ModelConfig(
        *("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192),
        rope_theta=5e5,
        rms_eps=1e-5,
    ),
    "mla-tiny": ModelConfig(
        *("deepseek_v2", 2, 64, 128, 4, 1, 48, 512, 2048),
        mla=MLAShape(kv_lora_rank=32, rope_dim=16, nope_dim=16, v_dim=16),
        eos_ids=frozenset([256]),
    ),
}


def random_model(
    config: ModelConfig | str,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    draw_on: torch.device | str | None = None,
) -> Decoder:
    """A decoder of this shape whose weights are drawn from `seed`.

    Matrices have standard deviation ``1 / sqrt(inputs)``, so activations keep their size, attention
    depends on the content, and the best two of the logits are far enough apart for greedy tokens to
    be compared.

    Parameters
    ----------
    config
        A shape, or the name of a published one (see ``SHAPES``).
    device, dtype
        As for :class:`~minikv.models.decoder.Decoder`; weights are made there, one by one.
    seed
        The same seed gives the same weights where they are drawn on the same kind of device.
    draw_on
        Where the random numbers are made (default: `device`); "cpu" gives every device the same
        weights.

    Examples
    --------
    >>> from minikv.models.files.shapes import TINY
    >>> a, b = random_model(TINY, seed=1), random_model(TINY, seed=1)
    >>> bool((a.lm_head.weight == b.lm_head.weight).all())
    True
    """
    if isinstance(config, str):
        config = shape(config)
    decoder = Decoder(config, device, dtype)
    source = torch.device(draw_on or device)
    generator = torch.Generator(source).manual_seed(seed)
    for name, weight in decoder.named_parameters():
        std = weight.shape[-1] ** -0.5
        if name.startswith("embed_tokens") and not config.tie_embeddings:
            std = 1.0
        elif name.startswith("lm_head"):
            std *= 2.0
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator, device=source) * std)
    return decoder


def shape(name: str) -> ModelConfig:
    """A published shape by name; an unknown one raises and lists what there is."""
    if name not in SHAPES:
        raise ArgumentError("model", f"random:{name}", f"shapes are {', '.join(SHAPES)}")
    return SHAPES[name]
