"""``load``: from a name, a folder, a file or a hub id to a decoder with its tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minikv.device import default_dtype, pick_device
from minikv.errors import ArgumentError, StateError
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.files.download import model_path
from minikv.models.files.gguf import open_gguf
from minikv.models.files.safetensors import open_folder
from minikv.models.files.shapes import random_model, shape
from minikv.models.files.tokenizer import ByteTokenizer, Tokenizer

PRESETS = ("smollm2-135m", "tiny")
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


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
    if not isinstance(model, (str, os.PathLike)):
        raise ArgumentError(
            "model", model, f"must be a text or a path, such as {PRESETS[0]!r}, a folder or a file"
        )
    name, where = os.fsdecode(model), pick_device(device)
    kind = pick_dtype("dtype", dtype, where)
    if name == "tiny" or name.startswith("random:"):
        config = shape(name.removeprefix("random:"))
        draw_on = "cpu" if name == "tiny" else None
        decoder = random_model(config, seed, where, kind, draw_on)
        tokenizer = ByteTokenizer(config.vocab_size, config.eos_ids or {256})
        return Model(decoder, tokenizer, config, name)
    path = _find(name, progress)
    if path.is_file():
        decoder, tokenizer, tensors = open_gguf(path, where, kind)
    else:
        decoder, tokenizer, tensors = open_folder(path, where, kind)
    total = len(decoder.checkpoint_views())
    bar = tqdm(tensors, name, total, unit="tensor", leave=False, disable=not progress)
    fill(decoder, bar, path)
    return Model(decoder, tokenizer, decoder.config, name)


def _find(name: str, progress: bool) -> Path:
    """The Hugging Face folder or GGUF file that a name means, fetched if need be."""
    if name == "smollm2-135m":
        return model_path(progress=progress)
    path = Path(os.path.expanduser(name))  # leaves a user that does not exist as it is
    if path.is_file():
        return path
    if name and path.is_dir():
        if (path / "config.json").exists():
            return path
        files = sorted(path.glob("*.gguf"))  # one file, or the parts of one
        if len({re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in files}) == 1:
            return files[0]
        raise ArgumentError(
            "model",
            name,
            "the folder has no config.json; pass a Hugging Face folder or a GGUF file",
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _from_hub(name)
    what = "not a model minikv knows"
    if len(path.parts) > 1 or path.suffix == ".gguf":
        what = "no such file or folder"
    known = f"{', '.join(map(repr, PRESETS))}, a folder, a GGUF file, or a hub id 'owner/name'"
    raise ArgumentError("model", name, f"{what}; use {known}")


def fill(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]], source: Path) -> None:
    """Copy every tensor of a checkpoint to its place.

    Raises
    ------
    ArgumentError
        When a place stays empty, or a tensor has no place or not the shape of its place.
    """
    places = decoder.checkpoint_views()
    for name, tensor in tensors:
        if name.endswith("inv_freq") or (name == "lm_head.weight" and name not in places):
            continue  # it follows from the shape, or is a copy of the embedding
        place = places.pop(name, None)
        if place is None or place.shape != tensor.shape:
            expected = "no such tensor is expected"
            if place is not None:
                expected = f"expected {tuple(place.shape)}"
            raise ArgumentError(
                "model",
                str(source),
                f"tensor {name} {tuple(tensor.shape)}: {expected}; does config.json match it?",
            )
        place.copy_(tensor)
    if places:
        raise ArgumentError(
            "model", str(source), f"lacks {len(places)} tensors, such as {next(iter(places))}"
        )


def _from_hub(name: str) -> Path:
    """Folder of a hub model: what is in the local hub cache, else downloaded."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as e:  # the hub client raises errors of several libraries
        reason = (str(e).strip() or "no reason given").splitlines()[0]
        raise StateError(
            f"model {name!r} could not be fetched from the Hugging Face hub "
            f"({type(e).__name__}: {reason}); check the name and the network, "
            "run `hf auth login` for a gated model, or pass a local folder; "
            "'smollm2-135m' comes through pip and 'tiny' needs no file"
        ) from e


def pick_dtype(
    argument: str, value: Any, device: torch.device, names: dict[str, torch.dtype] = DTYPES
) -> torch.dtype:
    """``"auto"``, a name or a torch dtype as a torch dtype."""
    if isinstance(value, str) and value == "auto":
        return default_dtype(device)
    for name, dtype in names.items():
        if value in (name, dtype):
            return dtype
    raise ArgumentError(argument, value, f"use 'auto', {', '.join(map(repr, names))}")
