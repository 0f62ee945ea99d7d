"""Folders as the Hugging Face hub lays them out: ``config.json``, a tokenizer, and weights in one
safetensors file or in shards that an index names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minikv.errors import ArgumentError
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.files.reading import read_json, reading
from minikv.models.files.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

INDEX = "model.safetensors.index.json"


def open_folder(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, Tokenizer, Iterator[tuple[str, Tensor]]]:
    """Read all of a folder but its weights.

    Parameters
    ----------
    folder
        It has a ``config.json``; without a ``tokenizer.json`` text is read as bytes.
    device, dtype
        Where the decoder's weights live, and as what.

    Returns
    -------
    decoder, tokenizer, tensors
        A decoder without weights, and the names and values of all weights, which are read one by
        one.

    Raises
    ------
    ArgumentError
        For a file that is missing or damaged, or a shape that minikv does not have.
    """
    with reading(folder, "config.json"):
        generation = read_json(folder / "generation_config.json")
        config = ModelConfig.from_hf(read_json(folder / "config.json"), generation)
    with reading(folder, INDEX):
        shards = _shards(folder)
    tokenizer: Tokenizer = ByteTokenizer(config.vocab_size, config.eos_ids)
    if (folder / "tokenizer.json").exists():
        with reading(folder, "tokenizer.json"):
            tokenizer = FileTokenizer.from_folder(folder, config.eos_ids)
        config = replace(config, eos_ids=tokenizer.eos_ids)
    else:
        warnings.warn(
            f"{folder} has no tokenizer.json: text is read as bytes, token ids work as they are",
            stacklevel=3,
        )
    with reading(folder, "config.json"):
        return Decoder(config, device, dtype), tokenizer, _tensors(folder, shards, device)


def _shards(folder: Path) -> list[Path]:
    """The weight files of a folder: all shards of the index, or the single file."""
    shards = [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        shards = sorted(
            {folder / name for name in read_json(folder / INDEX)["weight_map"].values()}
        )
    missing = ", ".join(shard.name for shard in shards if not shard.exists())
    if missing:
        raise ArgumentError(
            "model",
            str(folder),
            f"lacks {missing}; fetch it again, or save it with safe_serialization=True",
        )
    return shards


def _tensors(
    folder: Path, shards: list[Path], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for shard in shards:
        with (
            reading(folder, shard.name),
            safe_open(shard, framework="pt", device=str(device)) as file,
        ):
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
