"""GGUF files written with the ``gguf`` package's own writer, read back by ours."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_standins import full_logits

from minikv.errors import ArgumentError
from minikv.models import load, random_model
from minikv.models.config import ModelConfig
from minikv.models.files.gguf import GGUFFile, unpermute
from minikv.models.rope import inverse_frequencies

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write(path: Path, architecture: str, *, rope_factors: bool = False, **metadata) -> ModelConfig:
    """A small random model as a GGUF file; q and k in the file's own row order where the format has
    one."""
    config = ModelConfig(
        *(architecture, 2, 64, 96, 4, 2, 16, 300, 256),
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2",
        eos_ids=frozenset([2]),
        rope_theta=5e5,
        rms_eps=float(np.float32(1e-6)),  # as the file stores it
    )
    decoder = random_model(config)
    out = gguf.GGUFWriter(str(path), architecture)
    out.add_block_count(2)
    out.add_context_length(256)
    out.add_embedding_length(64)
    out.add_feed_forward_length(96)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_key_length(16)
    out.add_rope_freq_base(5e5)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(metadata.pop("pre", "qwen2"))
    out.add_token_list([chr(256 + i) if i > 2 else f"<{i}>" for i in range(300)])
    out.add_token_types([3] * 3 + [1] * 297)
    out.add_token_merges([])
    out.add_eos_token_id(2)
    for key, value in metadata.items():
        out.add_float32(f"{architecture}.{key}", value)
    if rope_factors:
        out.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
    for name, view in decoder.checkpoint_views().items():
        stem, kind = name.rsplit(".", 1)
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        label = f"blk.{layer}.{NAMES[part]}" if stem.startswith("model.layers.") else NAMES[stem]
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            view = view.view(-1, 2, 8, 64).transpose(1, 2).reshape(view.shape)
        out.add_tensor(f"{label}.{kind}", view.numpy().copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return config


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_file_gives_back_the_model(architecture: str, tmp_path: Path) -> None:
    config = write(tmp_path / "m.gguf", architecture)
    model = load(tmp_path / "m.gguf", device="cpu", dtype="float32", progress=False)
    assert model.config == config
    want = full_logits(random_model(config), [5, 6, 7])
    assert torch.equal(full_logits(model.decoder, [5, 6, 7]), want)
    assert model.tokenizer.encode("<2>") == [2]
    assert (
        load(tmp_path, device="cpu", progress=False).config == config
    )  # a folder with one GGUF file


def test_llama3_frequencies_come_from_the_file(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.gguf", "llama", pre="llama-bpe")
    write(tmp_path / "m.gguf", "llama", rope_factors=True, pre="llama-bpe")
    model = load(tmp_path / "m.gguf", device="cpu", progress=False)
    ratio = inverse_frequencies(plain)[0] / inverse_frequencies(model.config)[0]
    torch.testing.assert_close(ratio, torch.linspace(1, 8, 8))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ArgumentError, match="magic number is missing"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ArgumentError, match="not a complete GGUF"):
        load(path)
    write(path, "qwen3")
    whole = path.read_bytes()
    for cut in (10, 500, 3000):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArgumentError, match="not a complete GGUF"):
            load(path)
    path.write_bytes(whole[:-5000])
    with pytest.raises(ArgumentError, match="ends inside tensor"):
        load(path, progress=False)
    write(path, "qwen2", pre="tekken")
    with pytest.raises(ArgumentError, match="gpt2/tekken"):
        load(path)
    write(path, "qwen2", **{"expert_count": 8.0})
    with pytest.raises(ArgumentError, match="dense only"):
        load(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_stored_types(kind: str, tmp_path: Path) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    out = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    packed = gguf.quants.quantize(values, qtype)
    out.add_tensor("w", packed, raw_dtype=qtype if packed.dtype == np.uint8 else None)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    got = GGUFFile(tmp_path / "m.gguf").read("w")
    assert got.shape == (6, 64)
    assert got.dtype == torch.float32
    step = {"F32": 0, "F16": 2e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 0.4, "Q4_1": 0.3}[kind]
    assert float((got - torch.from_numpy(values)).abs().max()) <= step


def test_q4_1_by_hand(tmp_path: Path) -> None:
    """A block of 32: fp16 scale d and minimum m, 16 bytes; low nibbles are the first half, value =
    d * q + m."""
    block = np.frombuffer(np.array([0.5, -1.0], np.float16).tobytes() + bytes(range(16)), np.uint8)
    out = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    out.add_tensor("w", block[None], raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    want = [0.5 * q - 1.0 for q in [*range(16), *([0] * 16)]]
    assert GGUFFile(tmp_path / "m.gguf").read("w").tolist() == [want]


def test_unpermute_by_hand() -> None:
    rows = torch.arange(8.0)[
        :, None
    ]  # two heads of four rows: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3)
    assert unpermute(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2"])
def test_texts_are_cut_as_in_transformers(rule: str, tmp_path: Path) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    split = Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[rule]), "isolated")
    theirs = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    write(tmp_path / "m.gguf", "qwen2", pre=rule)
    ours = load(tmp_path / "m.gguf", device="cpu", progress=False).tokenizer
    for text in (
        "I'LL it's 12345 x_y",
        "  two\n\n1.  a\r\n b",
        "你好, héllo🙂!!\n",
        "tabs\t\t\tand   ",
        "١٢٣٤ ½ e\u0301",
    ):
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
