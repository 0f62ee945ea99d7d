"""Small GGUF files drawn at random, each with a Hugging Face folder of the same model beside it.

The folder is what transformers reads: its own reader of GGUF files leaves out the scaling of
positions and most rules of tokenizers.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from checkpoints import VOCAB, tensors, write_json
from safetensors.torch import save_file
from tokenizer_kinds import TEMPLATES, special_tokens, tokenizer_json

from minikv.models.files.gguf import LAYER_TENSORS, TENSORS

# Architecture of the file, class of transformers, kind of tokenizer, and names of the kind's rule.
MODELS = [
    ("llama", "LlamaForCausalLM", "llama3", ("llama-bpe", "llama3", "llama-v3")),
    ("llama", "LlamaForCausalLM", "smollm", ("smollm",)),
    ("llama", "LlamaForCausalLM", "gpt2", ("gpt-2", "default", None)),
    ("qwen2", "Qwen2ForCausalLM", "qwen2", ("qwen2", "deepseek-r1-qwen")),
    ("qwen3", "Qwen3ForCausalLM", "qwen2", ("qwen2",)),
]
ENDS = {"<|eot_id|>", "<|im_end|>"}  # texts of these kinds that end a turn
NORMAL, CONTROL, BY_USER, UNUSED = 1, 3, 4, 5


@dataclass
class File:
    """What was drawn: the file to load, the twin folder, and the ids that must stop a text."""

    path: Path
    twin: Path
    kind: str
    stops: set[int] = field(default_factory=set)
    refused: str = ""
    drawn: list[str] = field(default_factory=list)


def file(folder: Path, seed: int) -> File:
    """Write a GGUF file, in one part or several, and its twin into an empty folder."""
    rng = random.Random(seed)
    arch, named, kind, rules = rng.choice(MODELS)
    (folder / "twin").mkdir()
    made = File(folder / "m.gguf", folder / "twin", kind)
    heads, kv_heads = rng.choice([(4, 2), (2, 2), (4, 1)])
    config: dict[str, Any] = {
        "architectures": [named],
        "model_type": arch,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "head_dim": 16 if arch == "qwen3" else rng.choice([32 // heads, 24]),
        "tie_word_embeddings": rng.random() < 0.5,
        "dtype": "float32",
    }
    parts = rng.choice([0, 0, 9])
    out = gguf.GGUFWriter(
        None if parts else str(made.path),
        arch,
        split_max_tensors=parts,
        endianess=gguf.GGUFEndian.LITTLE,
    )
    out.add_block_count(2)
    out.add_context_length(128)
    out.add_embedding_length(32)
    out.add_feed_forward_length(48)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    if config["head_dim"] != 32 // heads or rng.random() < 0.5:
        out.add_key_length(config["head_dim"])
        out.add_value_length(config["head_dim"])
    if rng.random() < 0.7:
        out.add_rope_dimension_count(config["head_dim"])
    elif rng.random() < 0.2:
        out.add_rope_dimension_count(config["head_dim"] // 2)
        made.refused = f"{arch}.rope.dimension_count"
    weights = tensors(config, seed)
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    _rope(rng, out, config)
    _words(rng, out, made, rng.choice(rules))
    write_json(made.twin / "config.json", config)
    save_file(weights, made.twin / "model.safetensors", metadata={"format": "pt"})
    places = {place: name for name, place in (LAYER_TENSORS | TENSORS).items()}
    for name, weight in weights.items():
        stem, suffix = name.rsplit(".", 1)
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        place = f"blk.{layer}.{places[part]}" if "layers" in stem else places[stem]
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            half = config["head_dim"] // 2
            weight = weight.view(-1, 2, half, 32).transpose(1, 2).reshape(weight.shape)
        out.add_tensor(f"{place}.{suffix}", weight.numpy().copy())
    out.write_header_to_file(made.path)
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    if parts:
        found = sorted(folder.glob("*.gguf"))
        made.path = rng.choice([*found, folder])
        made.drawn.append(f"{len(found)} parts, {made.path.name} is loaded")
    made.drawn.append(f"{arch} {config}")
    return made


def _rope(rng: random.Random, out: Any, config: dict[str, Any]) -> None:
    """Positions in both spellings; llama3 scaling is a tensor of divisors in GGUF files."""
    theta = rng.choice([1e4, 5e5])
    kind = rng.choice(["default", "linear", "yarn", "llama3"])
    config["rope_parameters"] = rope = {"rope_type": kind, "rope_theta": theta}
    if theta != 1e4 or rng.random() < 0.5:
        out.add_rope_freq_base(theta)
    if kind == "default" and rng.random() < 0.3:
        out.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    elif kind in ("linear", "yarn"):
        rope["factor"] = 4.0
        out.add_rope_scaling_type(gguf.RopeScalingType(kind))
        out.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            rope["original_max_position_embeddings"] = 32
            out.add_rope_scaling_orig_ctx_len(32)
    elif kind == "llama3":
        numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {**numbers, "original_max_position_embeddings": 64}
        size = config["head_dim"]
        divisors = []
        for i in range(0, size, 2):  # as convert_hf_to_gguf.py computes them
            wavelength = 2 * math.pi * theta ** (i / size)
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
            if wavelength < 64 / 4.0:
                divisors[-1] = 1.0
            elif wavelength > 64 / 1.0:
                divisors[-1] = 8.0
        out.add_tensor("rope_freqs.weight", torch.tensor(divisors).numpy())


def _words(rng: random.Random, out: Any, made: File, rule: str | None) -> None:
    """The tokenizer in both spellings."""
    twin = tokenizer_json(made.kind)
    if made.kind == "qwen2":
        last = twin["added_tokens"][-1]
        more = {"id": last["id"] + 1, "content": "<think>", "special": False}
        twin["added_tokens"].append(last | more)
    ids = dict(twin["model"]["vocab"]) | {t["content"]: t["id"] for t in twin["added_tokens"]}
    texts = [f"[PAD{i}]" for i in range(VOCAB)]
    types = [UNUSED] * VOCAB
    for text, i in ids.items():
        texts[i], types[i] = text, NORMAL
    for token in twin["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else BY_USER
    out.add_tokenizer_model("gpt2")
    if rule is not None:
        out.add_tokenizer_pre(rule)
    out.add_token_list(texts)
    out.add_token_types(types)
    out.add_token_merges([" ".join(pair) for pair in twin["model"]["merges"]])
    start, end, *_ = special_tokens(made.kind)
    for key, add in (("eos", out.add_eos_token_id), ("eot", out.add_eot_token_id)):
        if rng.random() < 0.7:
            made.stops.add(ids[end])
            add(ids[end])
            made.drawn.append(key)
    made.stops |= {ids[text] for text in ENDS & set(ids)}
    if rng.random() < 0.2:
        out.add_eom_token_id(ids[start])
        made.stops.add(ids[start])
    out.add_bos_token_id(ids[start])
    starts = made.kind == "llama3"
    if rng.random() < 0.5:
        starts = rng.random() < 0.5
        out.add_add_bos_token(starts)
    if starts:
        twin["post_processor"] = tokenizer_json(made.kind, start=True)["post_processor"]
    name = rng.choice(["chatml", "llama3", "deepseek", "loop"])
    out.add_chat_template(TEMPLATES[name])
    write_json(made.twin / "tokenizer.json", twin)
    settings = {"bos_token": start, "chat_template": TEMPLATES[name]}
    if "eos" in made.drawn:
        settings["eos_token"] = end
    write_json(made.twin / "tokenizer_config.json", settings)
    made.drawn.append(json.dumps({"rule": rule, "starts": starts, "template": name}))


def changed(source: Path, target: Path, **keys: Any) -> Path:
    """A copy of a GGUF file with other metadata; None leaves a key out."""
    reader = gguf.GGUFReader(source)
    out = gguf.GGUFWriter(str(target), reader.get_field("general.architecture").contents())
    for name, given in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in keys:
            continue
        inner = given.types[-1] if given.types[0] is gguf.GGUFValueType.ARRAY else None
        out.add_key_value(name, given.contents(), given.types[0], inner)
    for name, value in keys.items():
        kind = None if value is None else gguf.GGUFValueType.get_type(value)
        if value is not None:
            inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            out.add_key_value(name, value, kind, inner)
    for tensor in reader.tensors:
        out.add_tensor(tensor.name, tensor.data.copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return target


def plain_file(folder: Path, kind: str) -> Path:
    """A GGUF file in one part with this kind of tokenizer."""
    for seed in range(1000):
        path = folder / f"{kind}{seed}"
        path.mkdir(parents=True)
        made = file(path, seed)
        if made.kind == kind and made.path.name == "m.gguf" and not made.refused:
            return made.path
    raise AssertionError("no such file was drawn")


def in_parts(folder: Path) -> tuple[list[Path], Path]:
    """A GGUF file in parts, its head in the last, and the twin folder."""
    for seed in range(1000):
        path = folder / str(seed)
        path.mkdir(parents=True)
        made = file(path, seed)
        parts = sorted(path.glob("*.gguf"))
        untied = not json.loads((made.twin / "config.json").read_text())["tie_word_embeddings"]
        if len(parts) > 1 and untied and not made.refused:
            return parts, made.twin
    raise AssertionError("no file in parts was drawn")
