"""Small checkpoints with random weights: Hugging Face folders of every supported family, in the
spellings that versions 4 and 5 of transformers write, drawn at random from a seed.

:func:`folder` writes one and says what it drew, and which keys minikv may refuse.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizer_kinds import (
    TEMPLATES,
    added_tokens,
    size_of,
    special_tokens,
    tokenizer_json,
)
from torch import Tensor

FAMILIES = {
    "llama-2": ("LlamaForCausalLM", "llama", ("fallback", "metaspace", "unigram")),
    "llama-3": ("LlamaForCausalLM", "llama", ("llama3",)),
    "mistral": ("MistralForCausalLM", "mistral", ("metaspace", "fallback", "metaspace-first")),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", ("qwen2",)),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", ("qwen2", "gpt2")),
    "smollm2": ("LlamaForCausalLM", "llama", ("smollm",)),
    "deepseek": ("DeepseekV2ForCausalLM", "deepseek_v2", ("deepseek",)),
}
VOCAB = 400  # rows of the embedding: more than any tokenizer here has tokens
INDEX = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """What :func:`folder` drew.

    Attributes
    ----------
    config, generation
        Contents of ``config.json`` and, where it was written, ``generation_config.json``.
    refused
        Keys that the checkpoint has and minikv may refuse, if it names one of them.
    drawn
        What else was chosen, for messages.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] | None = None
    kind: str = ""
    refused: set[str] = field(default_factory=set)
    drawn: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.family}/{self.kind} {self.drawn} {self.config} {self.generation}"


def folder(path: Path, seed: int, family: str | None = None) -> Checkpoint:
    """Write a checkpoint drawn from `seed` into the empty folder `path`."""
    rng = random.Random(seed)
    made = Checkpoint(family or rng.choice(list(FAMILIES)))
    made.kind = rng.choice(FAMILIES[made.family][2])
    made.config = shape(rng, made.family)
    _rope(rng, made)
    _rare(rng, made)
    _stops(rng, made)
    write_json(path / "config.json", made.config)
    if made.generation is not None:
        write_json(path / "generation_config.json", made.generation)
    _tokenizer(rng, made, path)
    _weights(rng, made, path, seed)
    return made


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def shape(rng: random.Random, family: str) -> dict[str, Any]:
    """The sizes of a small model as a ``config.json`` without positions and stop tokens."""
    named, model_type, _ = FAMILIES[family]
    heads, kv_heads = rng.choice([(4, 2), (4, 1), (2, 2), (4, 4)])
    config: dict[str, Any] = {
        "architectures": [named],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": rng.choice([64, 128, 256]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "hidden_act": "silu",
        "tie_word_embeddings": rng.random() < 0.5,
        "transformers_version": rng.choice(["4.41.2", "4.57.1", "5.24.0"]),
    }
    config[rng.choice(["dtype", "torch_dtype"])] = rng.choice(["float32", "bfloat16", "float16"])
    if family == "qwen3" or rng.random() < 0.3:
        config["head_dim"] = rng.choice([8, 16, 24])
    if family in ("llama-2", "llama-3", "smollm2", "mistral") and rng.random() < 0.3:
        config["head_dim"] = None
    if heads == kv_heads and rng.random() < 0.5 and family in ("llama-2", "smollm2"):
        del config["num_key_value_heads"]  # as many as there are heads
    if family in ("llama-2", "llama-3", "qwen3") and rng.random() < 0.3:
        config["attention_bias"] = True
    if family in ("qwen2", "mistral") and rng.random() < 0.1:
        config["attention_bias"] = True  # not a key of these families: it means nothing
    if not config["tie_word_embeddings"] and rng.random() < 0.5:
        del config["tie_word_embeddings"]
    if family == "mistral":
        config["sliding_window"] = rng.choice([None, 5, 12, 4096])
    elif family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = rng.random() < 0.5
        config["sliding_window"] = rng.choice([5, 12])
        config["max_window_layers"] = rng.choice([0, 1, 2])
        if config["use_sliding_window"] and rng.random() < 0.3:
            config["layer_types"] = rng.choices(["sliding_attention", "full_attention"], k=2)
    elif family == "deepseek":
        config = {key: value for key, value in config.items() if key != "head_dim"}
        config |= {
            "num_key_value_heads": heads,
            "kv_lora_rank": 16,
            "q_lora_rank": rng.choice([None, 12]),
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": rng.choice([4, 8]),
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
        }
    return config


def _rope(rng: random.Random, made: Checkpoint) -> None:
    """Positions, as version 4 spells them, as version 5 does, or both at once."""
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": rng.choice([2.0, 4])},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": rng.choice([2.0, 4.0])},
    }
    theta = rng.choice([1e4, 5e5, 1e6])
    original = rng.choice([16, 32, 64])

    def draw(kind: str) -> dict[str, Any]:
        found = dict(kinds[kind])
        if kind == "llama3" or (kind == "yarn" and rng.random() < 0.7):
            found["original_max_position_embeddings"] = original
        if kind == "yarn":
            more = {"beta_fast": 20.0, "beta_slow": 2, "truncate": False, "attention_factor": 0.9}
            found |= {k: v for k, v in more.items() if rng.random() < 0.2}
            if rng.random() < 0.3 or made.family == "deepseek":
                found |= {"mscale": 0.7, "mscale_all_dim": rng.choice([0.7, 1.0])}
        return found

    kind = rng.choice(list(kinds))
    spelling = rng.choice(["4", "4-old", "5", "5-theta-outside", "both", "both-none"])
    if spelling.startswith("4"):
        named = "type" if spelling == "4-old" else "rope_type"
        made.config["rope_theta"] = theta
        if kind != "default" or rng.random() < 0.3:
            made.config["rope_scaling"] = {named: kind, **draw(kind)}
        elif rng.random() < 0.5:
            made.config["rope_scaling"] = None
    else:
        found = {"rope_type": kind, "rope_theta": theta, **draw(kind)}
        if spelling == "5-theta-outside":
            made.config["rope_theta"] = found.pop("rope_theta")
        made.config["rope_parameters"] = found
    if spelling == "both":
        other = rng.choice(list(kinds))
        made.config["rope_scaling"] = {rng.choice(["type", "rope_type"]): other, **draw(other)}
        if rng.random() < 0.5:
            made.config["rope_theta"] = rng.choice([1e4, 1e6])
        made.drawn.append(f"{other} beside {kind}")
    if spelling == "both-none":
        made.config["rope_scaling"] = rng.choice([None, {}])
    if rng.random() < 0.1:
        made.config["original_max_position_embeddings"] = 48
    made.drawn.append(f"rope {spelling} {kind}")


def _rare(rng: random.Random, made: Checkpoint) -> None:
    """Sometimes a key is left out, and sometimes there is a thing that minikv does not have."""
    for key in ("rms_norm_eps", "architectures", "hidden_act"):
        if rng.random() < 0.1:
            del made.config[key]
    if rng.random() > 0.12:
        return
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    rare: dict[str, Any] = {
        "mlp_bias": True,
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.5,
        "rotary_pct": 0.25,
        "rotary_dim": 4,
        "rope_scaling": {"rope_type": rng.choice(["dynamic", "longrope"]), "factor": 2.0},
        "rope_parameters": nested | {"sliding_attention": dict(nested["full_attention"])},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    key = rng.choice(list(rare))
    made.config[key] = rare[key]
    if key == "rope_parameters":
        made.config.pop("rope_scaling", None)
    made.refused = {key, "rope_type"} if key == "rope_scaling" else {key}
    made.drawn.append(f"rare {key}")


def _stops(rng: random.Random, made: Checkpoint) -> None:
    """Start and end tokens in ``config.json`` and ``generation_config.json``: one, a list, null or
    nothing."""
    size = size_of(made.kind)
    ids = [2, size + 1, [size, size + 1], None]
    made.config["bos_token_id"] = rng.choice([1, size, None])
    made.config["eos_token_id"] = rng.choice(ids)
    if rng.random() < 0.2:
        del made.config["eos_token_id"]
    if made.family == "qwen2" or rng.random() < 0.6:
        made.generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": rng.choice(ids)}
        if rng.random() < 0.3:
            del made.generation["eos_token_id"]


def _tokenizer(rng: random.Random, made: Checkpoint, path: Path) -> None:
    """``tokenizer.json`` and the files beside it."""
    inside = rng.random() < 0.6
    made_json = tokenizer_json(made.kind, specials=inside, start=rng.random() < 0.5)
    extra = added_tokens(made.kind)
    extra.append(extra[-1] | {"id": extra[-1]["id"] + 1, "content": "<think>", "special": False})
    if inside and rng.random() < 0.5:
        made_json["added_tokens"].append(extra[-1])
    if rng.random() < 0.3:
        made_json["truncation"] = {
            "direction": rng.choice(["Left", "Right"]),
            "max_length": 6,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        made.drawn.append("truncation")
    if rng.random() < 0.3:
        made_json["padding"] = {
            "strategy": rng.choice(["BatchLongest", {"Fixed": 30}]),
            "direction": "Left",
            "pad_to_multiple_of": rng.choice([None, 8]),
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
        made.drawn.append("padding")
    write_json(path / "tokenizer.json", made_json)
    start, end, *others = special_tokens(made.kind)
    names: dict[str, Any] = {"bos_token": start, "eos_token": rng.choice([end, others[0]])}
    if rng.random() < 0.3:
        names["pad_token"] = end
    if made.family.startswith("qwen") and rng.random() < 0.5:
        names["bos_token"] = None
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if rng.random() < 0.3:
        settings["clean_up_tokenization_spaces"] = rng.random() < 0.5
    if rng.random() < 0.3:
        settings["add_bos_token"] = rng.random() < 0.5
    listed = rng.choice(["decoder", "decoder", "none", "added_tokens.json", "additional"])
    # Beside an added_tokens.json transformers 5 forgets which tokens these name.
    if listed != "added_tokens.json":
        if rng.random() < 0.4:
            plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
            names = {k: v and {"content": v, **plain} for k, v in names.items()}
        if rng.random() < 0.2:
            settings["image_token"] = others[-1]
    place = rng.choice(["settings", "map", "both"])
    if place != "map":
        settings |= {
            k: {"__type": "AddedToken", **v} if isinstance(v, dict) else v for k, v in names.items()
        }
    if listed == "decoder":
        if rng.random() < 0.3:
            extra[-2] |= {rng.choice(["lstrip", "rstrip", "single_word"]): True}
        settings["added_tokens_decoder"] = {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in extra
        }
    elif listed == "added_tokens.json":
        write_json(path / "added_tokens.json", {t["content"]: t["id"] for t in extra})
    elif listed == "additional":
        key = rng.choice(["additional_special_tokens", "extra_special_tokens"])
        settings[key] = [t["content"] for t in extra[-2:]]
    if place != "settings":
        given: dict[str, Any] = {k: v for k, v in names.items() if v}
        if listed != "added_tokens.json" and rng.random() < 0.3:
            given["additional_special_tokens"] = others
        write_json(path / "special_tokens_map.json", given)
    made.drawn.append(f"specials inside {inside}, names in {place}, tokens in {listed}")
    _template(rng, made, path, settings)
    if rng.random() < 0.95:
        write_json(path / "tokenizer_config.json", settings)


def _template(rng: random.Random, made: Checkpoint, path: Path, settings: dict[str, Any]) -> None:
    """A chat template in ``tokenizer_config.json``, alone or by name, or in a file of its own."""
    name = rng.choice(list(TEMPLATES))
    place = rng.choice(["settings", "list", "file", "file and settings", "none"])
    if place == "settings":
        settings["chat_template"] = TEMPLATES[name]
    elif place == "list":
        named = [{"name": "tool_use", "template": "{{ tools }}"}]
        named.insert(rng.randrange(2), {"name": "default", "template": TEMPLATES[name]})
        settings["chat_template"] = named
    elif place != "none":
        (path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
        if place == "file and settings":
            settings["chat_template"] = "{{ 'the file wins' }}"
    made.drawn.append(f"template {name} in {place}")


def tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random weights under the names of a Hugging Face checkpoint, a head among them."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    model_type, hidden, heads = config["model_type"], 32, config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3")

    def matrix(name: str, rows: int, columns: int, biased: bool = False) -> None:
        made[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        if biased:
            made[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.2

    def norm(name: str, size: int) -> None:
        made[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.2

    matrix("model.embed_tokens", VOCAB, hidden)
    made["model.embed_tokens.weight"] *= hidden**0.5
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm", hidden)
        norm(f"{at}.post_attention_layernorm", hidden)
        for name, rows, columns in (("gate", 48, hidden), ("up", 48, hidden), ("down", hidden, 48)):
            matrix(f"{at}.mlp.{name}_proj", rows, columns)
        at += ".self_attn"
        if model_type == "deepseek_v2":
            nope, rope, v = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
            rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
            if q_rank is None:
                matrix(f"{at}.q_proj", heads * (nope + rope), hidden)
            else:
                matrix(f"{at}.q_a_proj", q_rank, hidden)
                norm(f"{at}.q_a_layernorm", q_rank)
                matrix(f"{at}.q_b_proj", heads * (nope + rope), q_rank)
            matrix(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden)
            norm(f"{at}.kv_a_layernorm", rank)
            matrix(f"{at}.kv_b_proj", heads * (nope + v), rank)
            matrix(f"{at}.o_proj", hidden, heads * v)
            continue
        matrix(f"{at}.q_proj", heads * head, hidden, bias or model_type == "qwen2")
        matrix(f"{at}.k_proj", kv_heads * head, hidden, bias or model_type == "qwen2")
        matrix(f"{at}.v_proj", kv_heads * head, hidden, bias or model_type == "qwen2")
        matrix(f"{at}.o_proj", hidden, heads * head, bias)
        if model_type == "qwen3":
            norm(f"{at}.q_norm", head)
            norm(f"{at}.k_norm", head)
    norm("model.norm", hidden)
    matrix("lm_head", VOCAB, hidden)
    return made


def _weights(rng: random.Random, made: Checkpoint, path: Path, seed: int) -> None:
    """Weights in one file or in shards, where an index may have to decide between two copies."""
    weights = tensors(made.config, seed)
    dtype = getattr(torch, made.config.get("dtype") or made.config["torch_dtype"])
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    if made.config.get("tie_word_embeddings"):
        head = rng.choice(["none", "none", "copy", "another"])
        made.drawn.append(f"tied, head: {head}")
        if head == "copy":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        elif head == "none":
            del weights["lm_head.weight"]
    if rng.random() < 0.2:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if rng.random() < 0.5:
        return save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    count = rng.choice([1, 2, 3])
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    shards: list[dict[str, Tensor]] = [{} for _ in names]
    place = {name: rng.randrange(count) for name in weights}
    for name, weight in weights.items():
        shards[place[name]][name] = weight
        if place[name] > 0 and rng.random() < 0.1:  # transformers takes the last one
            shards[place[name] - 1][name] = weight + 1  # not the one of the index
            made.drawn.append(f"two copies of {name}")
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, path / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {n: names[i] for n, i in place.items()}}
    write_json(path / INDEX, index)
