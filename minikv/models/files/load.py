"""``load``: from a name, a folder, a file or a hub id to a decoder with its tokenizer."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minikv.device import default_dtype, pick_device
from minikv.errors import ArgumentError, Error, StateError
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.files.download import model_path
from minikv.models.files.gguf_file import GGUFFile
from minikv.models.files.shapes import TINY, random_model, shape
from minikv.models.files.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

PRESETS = ("smollm2-135m", "tiny")
DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
_GGUF_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Model:
    """A loaded model: ``decoder`` computes logits, ``tokenizer`` turns text to ids and back."""

    decoder: Decoder
    tokenizer: Tokenizer
    config: ModelConfig
    name: str


def load(
    model: str | os.PathLike[str] = "smollm2-135m",
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Model:
    """Load a model onto a device.

    Parameters
    ----------
    model
        "smollm2-135m" (fetched once through pip), "tiny" (random weights, no file),
        "random:qwen3-0.6b" and other published shapes with random weights, a local folder in
        Hugging Face layout, a ``.gguf`` file, or a hub id such as "Qwen/Qwen3-0.6B".
    device
        "auto", "cpu", "cuda" or a ``torch.device``; weights are placed there one by one.
    dtype
        "auto" (bf16 on sm80 and newer, fp16 on older GPUs, fp32 on the CPU), a torch dtype or its
        name.
    seed
        Seed of random weights.
    progress
        Whether downloads and loading show a bar.

    Raises
    ------
    ArgumentError
        For a model that is not known, not complete, or of an architecture that minikv does not
        have.
    StateError
        When something must be fetched and cannot be.

    Examples
    --------
    >>> model = load("tiny", device="cpu")
    >>> model.config.vocab_size, model.tokenizer.encode("A")
    (512, [65])
    """
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(name, str):
        raise ArgumentError(
            "model", model, f"must be a text or a path, such as {PRESETS[0]!r}, a folder or a file"
        )
    where = pick_device(device)
    kind = pick_dtype("dtype", dtype, where)
    if name == "tiny":
        decoder = random_model(TINY, seed, where, kind, draw_on="cpu")
        return Model(decoder, ByteTokenizer(TINY.vocab_size, TINY.eos_ids), TINY, name)
    if name.startswith("random:"):
        config = shape(name.removeprefix("random:"))
        tokenizer = ByteTokenizer(config.vocab_size, config.eos_ids or {256})
        return Model(random_model(config, seed, where, kind), tokenizer, config, name)
    if name == "smollm2-135m":
        return _load_gguf(model_path(progress=progress), name, where, kind, progress)
    path = Path(os.path.expanduser(name))  # leaves a user that does not exist as it is
    if name and path.is_dir():
        return _load_folder(path, name, where, kind, progress)
    if path.is_file():
        return _load_gguf(path, name, where, kind, progress)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _load_folder(_from_hub(name), name, where, kind, progress)
    what = (
        "no such file or folder"
        if len(path.parts) > 1 or path.suffix == ".gguf"
        else "not a model minikv knows"
    )
    raise ArgumentError(
        "model",
        name,
        f"{what}; use {', '.join(map(repr, PRESETS))}, a folder, a GGUF file, or a hub id 'owner/name'",
    )


def pick_dtype(
    argument: str, value: Any, device: torch.device, names: dict[str, torch.dtype] = DTYPES
) -> torch.dtype:
    """``"auto"``, a name or a torch dtype as a torch dtype."""
    if isinstance(value, str) and value == "auto":
        return default_dtype(device)
    found = names.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in names.values():
        raise ArgumentError(argument, value, f"use 'auto', {', '.join(map(repr, names))}")
    return found


def _load_gguf(
    path: Path, name: str, device: torch.device, dtype: torch.dtype, progress: bool
) -> Model:
    file = GGUFFile(path)
    names = file.names
    with _reading(path, "its header"):
        factors = file.read("rope_freqs.weight").tolist() if "rope_freqs.weight" in names else None
        config = ModelConfig.from_gguf(file.metadata, names, factors)
        tokenizer = FileTokenizer.from_gguf(file.metadata, config.eos_ids)
        decoder = Decoder(config, device, dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for found in names:
            stem, _, kind = found.rpartition(".")
            if stem == "rope_freqs":
                continue
            block, _, part = stem.removeprefix("blk.").partition(".")
            target = (
                f"model.layers.{block}.{_GGUF_LAYER.get(part, part)}"
                if part
                else _GGUF_TOP.get(stem, stem)
            )
            tensor = file.read(found)
            if config.architecture == "llama" and part in ("attn_q", "attn_k"):
                tensor = unpermute(tensor, config.head_dim)
            yield f"{target}.{kind}", tensor

    _fill(
        decoder,
        tqdm(tensors(), name, len(names), unit="tensor", leave=False, disable=not progress),
        path,
    )
    return Model(decoder, tokenizer, config, name)


def unpermute(weight: Tensor, head_dim: int) -> Tensor:
    """Undo the row order that GGUF's Llama files use for interleaved rotation: back to half-split
    heads.

    Parameters
    ----------
    weight
        q or k projection [heads * head_dim, inputs] (or its bias).
    """
    heads = weight.shape[0] // head_dim
    return weight.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _load_folder(
    folder: Path, name: str, device: torch.device, dtype: torch.dtype, progress: bool
) -> Model:
    if not (folder / "config.json").exists():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _load_gguf(ggufs[0], name, device, dtype, progress)
        raise ArgumentError(
            "model",
            name,
            "the folder has no config.json; pass a Hugging Face folder or a GGUF file",
        )
    generation = folder / "generation_config.json"
    with _reading(folder, "config.json"):
        config = ModelConfig.from_hf(
            _json(folder / "config.json"), _json(generation) if generation.exists() else None
        )
    with _reading(folder, "model.safetensors.index.json"):
        files = _safetensors(folder)
    if (folder / "tokenizer.json").exists():
        with _reading(folder, "tokenizer.json"):
            tokenizer: Any = FileTokenizer.from_folder(folder, config.eos_ids)
        config = replace(config, eos_ids=tokenizer.eos_ids)
    else:
        warnings.warn(
            f"{folder} has no tokenizer.json: text is read as bytes, token ids work as they are",
            stacklevel=3,
        )
        tokenizer = ByteTokenizer(config.vocab_size, config.eos_ids)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        for file in files:
            with (
                _reading(folder, file.name),
                safe_open(file, framework="pt", device=str(device)) as f,
            ):
                for key in f.keys():  # noqa: SIM118 (not a dict)
                    yield key, f.get_tensor(key)

    with _reading(folder, "config.json"):
        decoder = Decoder(config, device, dtype)
    total = len(decoder.checkpoint_views())
    _fill(
        decoder,
        tqdm(tensors(), name, total, unit="tensor", leave=False, disable=not progress),
        folder,
    )
    return Model(decoder, tokenizer, config, name)


def _safetensors(folder: Path) -> list[Path]:
    """The weight files of a folder: all shards of the index, or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted({folder / shard for shard in _json(index)["weight_map"].values()})
    else:
        shards = [folder / "model.safetensors"]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ArgumentError(
            "model",
            str(folder),
            f"lacks {', '.join(missing)}; fetch it again, or save it with safe_serialization=True",
        )
    return shards


def _fill(decoder: Decoder, tensors: Any, source: Path) -> None:
    """Copy every tensor of a checkpoint to its place; each place must be filled, with its own
    shape."""
    views = decoder.checkpoint_views()
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in views):
            continue  # recomputed, and the tied copy
        view = views.pop(name, None)
        if view is None or view.shape != tensor.shape:
            expected = (
                "no such tensor is expected" if view is None else f"expected {tuple(view.shape)}"
            )
            raise ArgumentError(
                "model",
                str(source),
                f"tensor {name} {tuple(tensor.shape)}: {expected}; does config.json match it?",
            )
        view.copy_(tensor)
    if views:
        raise ArgumentError(
            "model", str(source), f"lacks {len(views)} tensors, such as {next(iter(views))}"
        )


@contextmanager
def _reading(source: Path, what: str) -> Iterator[None]:
    """A damaged file may fail in any way: the error says which file, and what to do."""
    try:
        yield
    except (Error, OSError, MemoryError, RuntimeError):  # no memory is no damage
        raise
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
        raise ArgumentError(
            "model", str(source), f"{what} cannot be understood ({reason}); fetch it again"
        ) from e


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ArgumentError("model", str(path), f"is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise ArgumentError(
            "model", str(path), f"holds a {type(value).__name__}, not an object; fetch it again"
        )
    return value


def _from_hub(name: str) -> Path:
    """Folder of a hub model: what is in the local hub cache, else downloaded."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as e:  # the hub client raises errors of several libraries
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise StateError(
            f"model {name!r} could not be fetched from the Hugging Face hub ({type(e).__name__}: {reason}); check the "
            "name and the network, run `hf auth login` for a gated model, or pass a local folder; "
            "'smollm2-135m' comes through pip and 'tiny' needs no file"
        ) from e
