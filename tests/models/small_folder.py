"""A small Llama folder for tests that change one thing of it, and both readings of its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCAB, tensors, write_json
from model_standins import full_logits
from safetensors.torch import save_file
from tokenizer_kinds import TEMPLATES, special_tokens, tokenizer_json

from minikv import LLM
from minikv.models import Model, load

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "dtype": "float32",
}


def write(path: Path, kind: str = "llama3", settings: dict | None = None, **config: Any) -> Path:
    """A small Llama folder with what a test changes."""
    config = CONFIG | config
    write_json(path / "config.json", config)
    write_json(path / "tokenizer.json", tokenizer_json(kind))
    start, end, *_ = special_tokens(kind)
    if settings is None:
        settings = {"bos_token": start, "eos_token": end, "chat_template": TEMPLATES["llama3"]}
    write_json(path / "tokenizer_config.json", settings)
    weights = tensors(config, 0)
    if config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def read(path: Path) -> Model:
    return load(path, device="cpu", dtype="float32", progress=False)


def logits(model: Model) -> torch.Tensor:
    return full_logits(model.decoder, list(range(3, 43)))


def their_logits(path: Path) -> torch.Tensor:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return theirs(torch.arange(3, 43)[None], attention_mask=torch.ones(1, 40)).logits[0]


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", graphs=False, kv_tokens=512, progress=False, **options)
