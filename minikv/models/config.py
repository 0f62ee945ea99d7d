"""What a model's shape is, read from a Hugging Face ``config.json``.

Old and new spellings, and what each architecture means by a missing key, are settled here; GGUF
metadata is translated to the same keys first. The decoder sees plain numbers. One difference is
easily got wrong: a config's ``sliding_window = n`` means that n keys are seen, the kernels' ``W``
that ``q_pos - k_pos <= W``, so ``W = n - 1``. The subtraction is made in this file and nowhere
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minikv.errors import ArgumentError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")
# What configs of several families call the part of a head that rotates.
PARTS_OF_A_HEAD = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim")


@dataclass(frozen=True)
class MLAShape:
    """Sizes of multi-head latent attention (DeepSeek-V2): what a token caches is one row of rank +
    rope numbers.

    ``nope_dim`` and ``rope_dim`` are the parts of a query head without and with position, ``v_dim``
    a value head, ``kv_lora_rank`` the latent; ``q_lora_rank`` is None where queries are projected
    in one step.
    """

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder.

    Parameters
    ----------
    head_dim
        Size of one K or V head; with `mla`, the rank + rope numbers of the one latent row that all
        heads share.
    rope_scaling
        None, or a dict with ``rope_type`` "linear", "llama3" or "yarn" and its numbers, named as
        transformers does; "factors" with a list divides each frequency by its own factor (how GGUF
        files store llama3 scaling).
    sliding_window
        Per layer, in the kernels' form: n - 1 for a window of n keys, -1 for full attention. Empty:
        all layers full.
    sinks
        Each layer has one learned logit per head that joins the softmax's denominator (gpt-oss).
    dtype
        What the checkpoint stores; :func:`minikv.models.files.load` chooses its own.

    Examples
    --------
    >>> heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    >>> config = ModelConfig("llama", 2, 64, 128, **heads, vocab_size=512, max_context=256)
    >>> config.kv_bytes_per_token(torch.float16)  # 2 layers, K and V, 2 heads, 16 numbers, 2 bytes
    256
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sliding_window: tuple[int, ...] = ()
    mla: MLAShape | None = None
    eos_ids: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.sliding_window:
            object.__setattr__(self, "sliding_window", (-1,) * self.num_layers)
        if len(self.sliding_window) != self.num_layers:
            raise ArgumentError(
                "sliding_window",
                self.sliding_window,
                f"give one entry per layer ({self.num_layers})",
            )
        if self.q_heads % self.kv_heads:
            raise ArgumentError(
                "kv_heads", self.kv_heads, f"must divide the {self.q_heads} query heads"
            )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of cache that one token takes over all layers, stored as `dtype`."""
        numbers = self.head_dim if self.mla else 2 * self.kv_heads * self.head_dim
        return self.num_layers * numbers * dtype.itemsize

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Read a parsed ``config.json`` (old and new spellings) and, for its stop tokens,
        ``generation_config.json``.

        Raises
        ------
        ArgumentError
            For an architecture, or a feature of one, that minikv does not have; the message lists
            what it has.
        """
        named = str((config.get("architectures") or [config.get("model_type")])[0])
        architecture = ARCHITECTURES.get(named, named)
        if architecture not in ARCHITECTURES.values():
            raise ArgumentError("architectures", named, f"minikv has {', '.join(ARCHITECTURES)}")

        def need(key: str, default: int | None = None) -> int:
            value = default if config.get(key) is None else config[key]
            if value is None:
                raise ArgumentError(
                    "config.json", architecture, f"lacks {key!r}; is it a complete {named} config?"
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    key, value, "must be an integer, 1 or more; is the model's config damaged?"
                )
            return value

        layers, q_heads = need("num_hidden_layers"), need("num_attention_heads")
        biased = architecture not in ("mistral", "qwen2")  # to these the key means nothing
        bias = biased and bool(config.get("attention_bias", False))
        if config.get("hidden_act", "silu") != "silu":
            raise ArgumentError("hidden_act", config["hidden_act"], "minikv has silu")
        for flag in ("mlp_bias", "quantization_config"):
            if config.get(flag):
                raise ArgumentError(
                    flag,
                    config[flag],
                    "minikv does not read such checkpoints; use a plain bf16 one",
                )
        head_dim = need("head_dim", need("hidden_size") // q_heads)
        longest = need("max_position_embeddings")
        theta, scaling = _rope(config, head_dim)
        if scaling and scaling["rope_type"] == "yarn":  # some configs name the unscaled length
            scaled = int(scaling["factor"] * scaling["original_max_position_embeddings"])
            longest = max(longest, scaled)
        shape: dict[str, Any] = {
            "kv_heads": need("num_key_value_heads", q_heads),
            "head_dim": head_dim,
            "qkv_bias": bias or architecture == "qwen2",
            "o_bias": bias,
        }
        if architecture == "deepseek_v2":
            shape |= _mla(config, layers, bias)
        eos = (generation or {}).get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        return cls(
            architecture=architecture,
            num_layers=layers,
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            q_heads=q_heads,
            vocab_size=need("vocab_size"),
            max_context=longest,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "qwen3",
            sliding_window=_windows(config, architecture, layers),
            eos_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
            dtype=getattr(torch, stored),
            **shape,
        )


def _rope(config: dict[str, Any], head_dim: int) -> tuple[float, dict[str, Any] | None]:
    """Base frequency and scaling from ``rope_theta`` + ``rope_scaling``, or from the newer
    ``rope_parameters``; where a config has both, the older one counts, as in transformers."""
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = dict(config.get(spelling) or {})
    if any(isinstance(value, dict) for value in found.values()):
        raise ArgumentError(spelling, found, "minikv turns all layers alike; give one dict")
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    found.setdefault("rope_type", found.pop("type", "default"))
    kind = found["rope_type"]
    if kind not in ROPE_TYPES:
        raise ArgumentError("rope_type", kind, f"minikv has {', '.join(ROPE_TYPES)}")
    for key in PARTS_OF_A_HEAD:
        part = config.get(key) if found.get(key) is None else found[key]
        if part not in (None, head_dim if key.endswith("dim") else 1):
            raise ArgumentError(key, part, "minikv rotates whole heads only")
    if kind in ("llama3", "yarn"):
        key, longest = "original_max_position_embeddings", config["max_position_embeddings"]
        found[key] = _number(key, config.get(key) or found.get(key) or longest)
        found["factor"] = found.get("factor") or longest / found[key]
    if kind in ("linear", "llama3", "yarn"):
        found["factor"] = _number("factor", found["factor"])
    return _number("rope_theta", theta), None if kind == "default" else found


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(key, value, "must be a number above 0; is the model's config damaged?")
    return float(value)


def _windows(config: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Each layer's window as the kernels take it: n - 1, or -1 where the layer sees everything."""
    keys = config.get("sliding_window", 4096)  # what transformers takes where the key is missing
    if architecture in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        keys = None
    if keys is None or architecture in ("llama", "deepseek_v2"):
        return (-1,) * layers
    if architecture == "mistral":
        return (keys - 1,) * layers
    full = config.get("max_window_layers", 28)  # the first so many layers
    rule = ["full_attention"] * full + ["sliding_attention"] * layers
    kinds = config.get("layer_types") or rule[:layers]
    return tuple(keys - 1 if kind == "sliding_attention" else -1 for kind in kinds)


def _mla(config: dict[str, Any], layers: int, bias: bool) -> dict[str, Any]:
    """The fields that differ under latent attention; layers with experts are refused."""
    dense = config.get("first_k_dense_replace", 0)
    if dense < layers and config.get("n_routed_experts"):
        raise ArgumentError(
            "first_k_dense_replace",
            dense,
            f"minikv has dense layers only; all {layers} must be dense",
        )
    if bias:
        raise ArgumentError("attention_bias", bias, "minikv has latent attention without biases")
    mla = MLAShape(
        kv_lora_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        v_dim=config["v_head_dim"],
        q_lora_rank=config.get("q_lora_rank"),
    )
    return {"mla": mla, "kv_heads": 1, "head_dim": mla.kv_lora_rank + mla.rope_dim}
