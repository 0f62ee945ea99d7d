"""GGUF files: the header is read here (2 s faster than by the ``gguf`` package), tensors are
dequantised by that package.

Layout (version 2 and 3, little endian): magic, version, tensor count, key count; the keys, each a
name, a type and a value; one record per tensor, its name, sizes (fastest first), type and offset;
padding; the tensors' bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ArgumentError
from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.files.reading import reading
from minikv.models.files.tokenizer import FileTokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys of a ``config.json``, and what a GGUF file calls them, after the name of the architecture.
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rotary_dim": "rope.dimension_count",
}
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
# Tensors of a layer, ``blk.3.attn_q.weight``, and the others; and what a Hugging Face checkpoint
# calls them.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# What the tokenizer's keys hold, where a file has them; of lists, what their entries are.
TEXTS = (
    "general.architecture",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)
LISTS = {"tokens": str, "merges": str, "token_type": int}
TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
ENDS_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
FACTORS = "rope_freqs.weight"  # llama3 scaling, where a file has it: one divisor per frequency

_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # value types
_STRING, _ARRAY = 8, 9  # value types with a length in front


def open_gguf(
    path: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, FileTokenizer, Iterator[tuple[str, Tensor]]]:
    """Read all of a GGUF file but its weights, as ``open_folder`` does of a folder."""
    file = GGUFFile.whole(path)
    with reading(path, "its header"):
        config = read_config(file)
        tokenizer = FileTokenizer.from_gguf(file.metadata, config.eos_ids)
        return Decoder(config, device, dtype), tokenizer, _tensors(file, config)


def read_config(file: GGUFFile) -> ModelConfig:
    """Translate GGUF metadata (keys such as ``llama.block_count``) and read it like a
    ``config.json``.

    Texts that are known to end a turn stop the output, too: files exist whose end token is the end
    of a document.

    Raises
    ------
    ArgumentError
        For an architecture or a feature that minikv does not read from GGUF, and for metadata that
        is missing or damaged, under the file's own key.
    """
    metadata = file.metadata
    _check_words(metadata)
    kind = metadata.get("general.architecture", "")
    if kind not in ARCHITECTURES or metadata.get(f"{kind}.expert_count"):
        raise ArgumentError(
            "general.architecture",
            kind,
            f"minikv reads GGUF of {', '.join(ARCHITECTURES)}, dense only",
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    stops = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    stops |= {tokens.index(text) for text in ENDS_OF_TURN if text in tokens}
    given = {name.removeprefix(f"{kind}."): value for name, value in metadata.items()}
    config = {
        "model_type": kind,
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in file.records,
        "eos_token_id": list(stops - {None}),
        **{key: given[name] for key, name in KEYS.items() if name in given},
    }
    if FACTORS in file.records:
        config["rope_scaling"] = {"rope_type": "factors", "factors": file.read(FACTORS).tolist()}
    elif given.get("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {key: given.get(name) for key, name in SCALING.items()}
    names = {key: f"{kind}.{name}" for key, name in {**KEYS, **SCALING}.items()}
    names["kv_heads"] = names["num_key_value_heads"]
    for key in NEEDED:
        if key not in config:
            raise ArgumentError(names[key], None, "the file lacks this key; fetch it again")
    try:
        return ModelConfig.from_hf(config)
    except ArgumentError as e:
        raise ArgumentError(names.get(e.argument, e.argument), e.value, e.remedy) from None


def _check_words(metadata: dict[str, Any]) -> None:
    """Refuse metadata of a tokenizer that is not what it should be."""

    def check(key: str, fits: bool, what: str) -> None:
        if not fits:
            raise ArgumentError(key, metadata.get(key), f"must be {what}; fetch the file again")

    for key in TEXTS:
        check(key, isinstance(metadata.get(key, ""), str), "a text")
    for name, form in LISTS.items():
        key = f"tokenizer.ggml.{name}"
        entries = metadata.get(key, [])
        fits = isinstance(entries, list) and all(isinstance(entry, form) for entry in entries)
        check(key, fits, f"a list of {form.__name__}")
    count = len(metadata.get("tokenizer.ggml.tokens", []))
    check("tokenizer.ggml.tokens", count > 0, "the texts of all tokens")
    types = metadata.get("tokenizer.ggml.token_type", [])
    check("tokenizer.ggml.token_type", len(types) == count, f"one type for each of {count} tokens")
    key = "tokenizer.ggml.add_bos_token"
    check(key, isinstance(metadata.get(key, True), bool), "true or false")
    for name in TOKEN_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        number = metadata.get(key, 0)
        check(key, isinstance(number, int) and 0 <= number < count, f"an id below {count}")


def _tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """All weights under the names of a Hugging Face checkpoint."""
    for name in file.records:
        if name == FACTORS:
            continue
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix("blk.").partition(".")
        place = TENSORS.get(stem, stem)
        if part:
            place = f"model.layers.{layer}.{LAYER_TENSORS.get(part, part)}"
        tensor = file.read(name)
        whole = tensor.shape[0] % config.head_dim == 0  # else the sizes are damaged
        if config.architecture == "llama" and part in ("attn_q", "attn_k") and whole:
            tensor = unpermute(tensor, config.head_dim)
        yield f"{place}.{kind}", tensor


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


class GGUFFile:
    """The metadata of a GGUF file, and its tensors one by one.

    Parameters
    ----------
    path
        A ``.gguf`` file, mapped into memory, not read as a whole.

    Attributes
    ----------
    metadata
        Values of the header's keys.
    records
        Shape, type and bytes (with what lies behind them) of each tensor, by its name.

    Raises
    ------
    ArgumentError
        When the file is not GGUF, or ends early.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.records: dict[str, tuple[tuple[int, ...], int, np.ndarray]] = {}
        try:
            data = np.memmap(self.path, np.uint8, mode="c").view(np.ndarray)
            self._header(_Cursor(data.data), data)
        except (struct.error, ValueError, KeyError) as e:
            raise ArgumentError(
                "model", str(path), f"is not a complete GGUF file ({e}); fetch it again"
            ) from e

    @classmethod
    def whole(cls, path: Path) -> GGUFFile:
        """The file, or where it is one of several parts all of them as one: the metadata of the
        first, the tensors of all.

        Raises
        ------
        ArgumentError
            When parts are missing.
        """
        first = cls(path)
        count = first.metadata.get("split.count", 1)
        if count == 1:
            return first
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        parts = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
        missing = ", ".join(part.name for part in parts if not part.is_file())
        if path not in parts:
            missing = f"-0000N-of-{count:05d} in its name"
        if missing:
            remedy = f"is one of {count} parts and lacks {missing}; fetch all parts into a folder"
            raise ArgumentError("model", str(path), remedy)
        first, *others = map(cls, parts)
        for other in others:
            first.records |= other.records
        expected = first.metadata.get("split.tensors.count", len(first.records))
        if len(first.records) != expected:
            remedy = (
                f"its parts hold {len(first.records)} tensors, not {expected}; fetch them again"
            )
            raise ArgumentError("model", str(path), remedy)
        return first

    def _header(self, cursor: _Cursor, data: np.ndarray) -> None:
        if bytes(cursor.view[:4]) != b"GGUF":
            raise ValueError("the magic number is missing")
        _, version, tensors, keys = cursor.numbers("IIQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        for _ in range(keys):
            name = cursor.text()
            try:
                self.metadata[name] = cursor.value(*cursor.numbers("I"))
            except (struct.error, ValueError, KeyError) as e:
                raise ValueError(f"key {name}: {type(e).__name__}: {e}") from e
        records = {}
        for _ in range(tensors):
            name = cursor.text()
            (dims,) = cursor.numbers("I")
            *sizes, kind, offset = cursor.numbers(f"{dims}QIQ")
            records[name] = tuple(sizes[::-1]), kind, offset
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"key general.alignment: {align!r} is no number of bytes")
        start = -(-cursor.at // align) * align
        for name, (sizes, kind, offset) in records.items():
            self.records[name] = sizes, kind, data[start + offset :]

    def read(self, name: str) -> Tensor:
        """One tensor, fp32 on the CPU, dequantised if need be."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        shape, number, data = self.records[name]
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * block_bytes
            raw = data[:size]
            if len(raw) < size:
                raise ValueError("the file ends inside tensor data")
            value = dequantize(raw.reshape(-1, shape[-1] // block * block_bytes), kind)
        except (NotImplementedError, ValueError) as e:
            raise ArgumentError(
                "model",
                str(self.path),
                f"tensor {name} cannot be read ({e}); fetch the file again, or one of another type",
            ) from e
        return torch.from_numpy(np.asarray(value, dtype=np.float32)).view(shape)


class _Cursor:
    """Reads the values of a header one after another."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """The next numbers, by their letters in :mod:`struct`."""
        values = struct.unpack_from(f"<{codes}", self.view, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return values

    def text(self) -> str:
        (size,) = self.numbers("Q")
        return self.numbers(f"{size}s")[0].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        inner, count = self.numbers("IQ")
        if inner in _SCALARS:
            return list(self.numbers(f"{count}{_SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]
