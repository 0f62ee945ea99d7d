"""What users found in GGUF files, each under its number."""

from __future__ import annotations

import contextlib
import random
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoints import VOCAB
from gguf_checkpoints import changed, in_parts, plain_file
from small_folder import logits, read, their_logits
from tokenizer_kinds import size_of, special_tokens

from minikv.errors import ArgumentError

pytest.importorskip("transformers")

IDS = {f"tokenizer.ggml.{name}_token_id": None for name in ("eos", "eot", "eom")}


def test_n03_a_gguf_file_in_parts_is_whole_or_refused(tmp_path: Path) -> None:
    parts, twin = in_parts(tmp_path)
    want = their_logits(twin)
    for given in (*parts, parts[0].parent):
        assert float((logits(read(given)) - want).abs().max()) <= 1e-4
    parts[-1].rename(tmp_path / "elsewhere.gguf")
    for given in (*parts[:-1], parts[0].parent):
        with pytest.raises(ArgumentError, match=rf"{len(parts)} parts.*lacks {parts[-1].name}"):
            read(given)
    with pytest.raises(ArgumentError, match=rf"{len(parts)} parts.*in its name"):
        read(tmp_path / "elsewhere.gguf")
    parts[1].write_bytes(parts[0].read_bytes())
    (tmp_path / "elsewhere.gguf").rename(parts[-1])
    with pytest.raises(ArgumentError, match="parts hold"):
        read(parts[0])


@pytest.mark.parametrize(("kind", "text"), [("llama3", "<|eot_id|>"), ("smollm", "<|im_end|>")])
def test_n07_known_ends_of_turns_stop_a_gguf_chat(kind: str, text: str, tmp_path: Path) -> None:
    source, base = plain_file(tmp_path, kind), size_of(kind)
    end = special_tokens(kind).index(text) + base
    eos = {"tokenizer.ggml.eos_token_id": base}
    path = changed(source, tmp_path / "a.gguf", **IDS | eos)
    assert read(path).config.eos_ids == {base, end}
    path = changed(source, tmp_path / "b.gguf", **IDS | {"tokenizer.ggml.eom_token_id": base + 3})
    assert read(path).tokenizer.eos_ids == {base + 3, end}


@pytest.mark.parametrize(
    ("kind", "rule", "starts"),
    [
        ("llama3", "llama-bpe", True),
        ("llama3", "llama3", True),
        ("llama3", "llama-v3", True),
        ("llama3", "gpt-2", False),
        ("qwen2", "qwen2", False),
        ("smollm", "smollm", False),
    ],
)
def test_n08_the_rule_of_a_gguf_file_decides_on_the_start_token(
    kind: str, rule: str, starts: bool, tmp_path: Path
) -> None:
    source = plain_file(tmp_path, kind)
    key = "tokenizer.ggml.add_bos_token"
    for explicit in (None, True, False):
        keys = {"tokenizer.ggml.pre": rule, key: explicit}
        path = changed(source, tmp_path / f"{explicit}.gguf", **keys)
        first = read(path).tokenizer.encode("hello")[0]
        wanted = starts if explicit is None else explicit
        assert (first == size_of(kind)) == wanted


def test_n11_a_gguf_file_that_rotates_part_of_a_head_is_refused(tmp_path: Path) -> None:
    source = plain_file(tmp_path, "smollm")
    path = changed(source, tmp_path / "a.gguf", **{"llama.rope.dimension_count": 4})
    with pytest.raises(ArgumentError, match=r"llama\.rope\.dimension_count=4: .*whole heads"):
        read(path)


MALFORMED: list[tuple[str, Any]] = [
    ("llama.block_count", "2"),
    ("llama.block_count", None),
    ("llama.embedding_length", 0),
    ("llama.feed_forward_length", [48, 48]),
    ("llama.attention.head_count", None),
    ("llama.attention.head_count_kv", 3),
    ("llama.attention.head_count_kv", [2, 2]),
    ("llama.attention.layer_norm_rms_epsilon", "small"),
    ("llama.context_length", -1),
    ("llama.context_length", None),
    ("llama.rope.freq_base", "10000"),
    ("llama.rope.dimension_count", [4]),
    ("llama.rope.scaling.type", "longrope"),
    ("general.alignment", 0),
    ("general.alignment", "32"),
    ("tokenizer.ggml.model", 5),
    ("tokenizer.ggml.model", "llama"),
    ("tokenizer.ggml.pre", "tekken"),
    ("tokenizer.ggml.pre", 5),
    ("tokenizer.ggml.tokens", None),
    ("tokenizer.ggml.tokens", "abc"),
    ("tokenizer.ggml.tokens", [1, 2]),
    ("tokenizer.ggml.tokens", ["a", "b"]),
    ("tokenizer.ggml.token_type", None),
    ("tokenizer.ggml.token_type", [1] * (VOCAB - 1)),
    ("tokenizer.ggml.token_type", ["1"] * VOCAB),
    ("tokenizer.ggml.merges", ["ab"]),
    ("tokenizer.ggml.merges", ["nope nope"]),
    ("tokenizer.ggml.merges", [1]),
    ("tokenizer.ggml.eos_token_id", VOCAB),
    ("tokenizer.ggml.eos_token_id", -1),
    ("tokenizer.ggml.bos_token_id", "<s>"),
    ("tokenizer.ggml.add_bos_token", "yes"),
    ("tokenizer.chat_template", 5),
]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the default positions, which the tests damage."""
    folder = tmp_path_factory.mktemp("gguf")
    source = plain_file(folder, "smollm")
    path = changed(source, folder / "plain.gguf", **{"llama.rope.scaling.type": None})
    reader = gguf.GGUFReader(path)
    assert "rope_freqs.weight" not in [tensor.name for tensor in reader.tensors]
    return path


@pytest.mark.parametrize(("key", "value"), MALFORMED)
def test_n14_malformed_metadata_is_refused_under_its_key(
    key: str, value: Any, smollm: Path, tmp_path: Path
) -> None:
    path = changed(smollm, tmp_path / "a.gguf", **{key: value})
    expected = key if (key, value) != ("tokenizer.ggml.tokens", ["a", "b"]) else "tokenizer.ggml"
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        read(path)


def test_n14_a_value_of_an_unknown_type_names_its_key(smollm: Path, tmp_path: Path) -> None:
    raw = bytearray(smollm.read_bytes())
    for key in (b"llama.context_length", b"tokenizer.ggml.tokens"):
        damaged = bytearray(raw)
        at = damaged.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
        damaged[at : at + 4] = struct.pack("<I", 99)
        (tmp_path / "a.gguf").write_bytes(damaged)
        with pytest.raises(ArgumentError, match=f"key {key.decode()}"):
            read(tmp_path / "a.gguf")


def test_n14_damaged_sizes_of_a_tensor_name_it(smollm: Path, tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    damaged = bytearray(smollm.read_bytes())
    rows = damaged.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8
    damaged[rows : rows + 8] = struct.pack("<Q", 7)
    (tmp_path / "a.gguf").write_bytes(damaged)
    with pytest.raises(
        ArgumentError, match=r"tensor model\.layers\.0\.self_attn\.q_proj.*expected"
    ):
        read(tmp_path / "a.gguf")


def test_n14_damaged_bytes_never_escape_as_other_errors(smollm: Path, tmp_path: Path) -> None:
    raw, rng = smollm.read_bytes(), random.Random(0)
    header = raw.index(b"blk.0.attn_norm.weight")
    for _ in range(60):
        damaged = bytearray(raw)
        for _ in range(3):
            damaged[rng.randrange(header)] = rng.randrange(256)
        (tmp_path / "a.gguf").write_bytes(damaged)
        with contextlib.suppress(ArgumentError):
            read(tmp_path / "a.gguf")
