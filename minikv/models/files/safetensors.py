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
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
    if config.tie_embeddings:
        cpu = torch.device("cpu")
        heads = [head for _, head in _tensors(folder, shards, cpu, HEAD)]
        rows = _tensors(folder, shards, cpu, EMBEDDING) if heads else ()
        if any(not torch.equal(heads[0], row.to(heads[0].dtype)) for _, row in rows):
            warnings.warn(
                f"{folder}: {HEAD} differs from the embedding, so it is used, although "
                "config.json ties the two (tie_word_embeddings)",
                stacklevel=3,
            )
            config = replace(config, tie_embeddings=False)
    with reading(folder, "config.json"):
        return Decoder(config, device, dtype), tokenizer, _tensors(folder, shards, device)


def _shards(folder: Path) -> dict[str, list[str]]:
    """The weight files of a folder, each with the tensors that the index takes from it: all shards
    of the index, or the single file, of which all is taken (an empty list)."""
    shards: dict[str, list[str]] = {}
    if not (folder / INDEX).exists():
        shards["model.safetensors"] = []
    else:
        for name, shard in read_json(folder / INDEX)["weight_map"].items():
            if ".." in Path(shard).parts or Path(shard).is_absolute():
                remedy = f"its {INDEX} names {shard!r}, outside of the folder; fetch it again"
                raise ArgumentError("model", str(folder), remedy)
            shards.setdefault(shard, []).append(name)
    missing = ", ".join(sorted(shard for shard in shards if not (folder / shard).exists()))
    if missing:
        raise ArgumentError(
            "model",
            str(folder),
            f"lacks {missing}; fetch it again, or save it with safe_serialization=True",
        )
    return shards


def _tensors(
    folder: Path,
    shards: dict[str, list[str]],
    device: torch.device,
    only: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for shard, listed in shards.items():
        with (
            reading(folder, shard),
            safe_open(folder / shard, framework="pt", device=str(device)) as file,
        ):
            for name in listed or file.keys():
                if only in (None, name):
                    yield name, file.get_tensor(name)
