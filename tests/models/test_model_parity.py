"""Logits equal transformers' on small random checkpoints that are written here with
``save_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_standins import DenseAttention, full_logits

from minikv.models import load

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MLA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 3,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-tied-biased": ("Llama", {**SMALL, "tie_word_embeddings": True, "attention_bias": True}),
    "llama-wide-heads": ("Llama", {**SMALL, "head_dim": 24}),
    "llama3-rope": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "linear-rope": (
        "Llama",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "yarn-rope": ("Llama", {**SMALL, "rope_parameters": YARN}),
    "yarn-rope-untruncated": (
        "Llama",
        {**SMALL, "rope_parameters": {**YARN, "truncate": False, "beta_fast": 20.0}},
    ),
    "qwen2": ("Qwen2", SMALL),
    "qwen2-window": (
        "Qwen2",
        {**SMALL, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 32}),
    "mistral-window": ("Mistral", {**SMALL, "sliding_window": 5}),
    "mla-lite": ("DeepseekV2", {**MLA, "q_lora_rank": None}),
    "mla-q-lora-yarn": (
        "DeepseekV2",
        {
            **MLA,
            "q_lora_rank": 20,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
}


def save(name: str, folder: Path, **options: Any) -> Any:
    """Write the checkpoint of a case, all its tensors random; returns transformers' model of it."""
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.filterwarnings("ignore:.*tokenizer.json")
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    ours = load(tmp_path, device="cpu", dtype="float32", progress=False)
    ids = torch.randint(3, 300, (40,))
    with torch.inference_mode():
        want = theirs(ids[None], attention_mask=torch.ones(1, 40)).logits[0]
    torch.testing.assert_close(full_logits(ours.decoder, ids.tolist()), want, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*tokenizer.json")
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "mla-lite"])
def test_chunks_and_decode_equal_one_pass(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    decoder = load(tmp_path, device="cpu", dtype="float32", progress=False).decoder
    a, b = torch.randint(3, 300, (23,)), torch.randint(3, 300, (17,))
    attention, rows = DenseAttention(), []
    # Two requests of unequal lengths, laid end to end: a chunk each, a chunk of one only, then
    # decode steps together.
    for spans in (
        [(0, 9), (1, 14)],
        [(0, 11)],
        [(0, 1), (1, 1)],
        [(0, 1), (1, 1)],
        [(0, 1), (1, 1)],
    ):
        done = [
            len(attention.history[0, r][0]) if (0, r) in attention.history else 0 for r in (0, 1)
        ]
        pieces = [torch.arange(done[r], done[r] + n) for r, n in spans]
        ids = torch.cat([(a, b)[r][p] for (r, _), p in zip(spans, pieces, strict=True)])
        last = torch.tensor([n for _, n in spans]).cumsum(0) - 1
        given = attention.begin(*spans), decoder.attention_layers
        rows.append(decoder(ids, torch.cat(pieces), *given, logits_at=last))
    close = {"rtol": 0, "atol": 2e-5}
    torch.testing.assert_close(rows[-1][0], full_logits(decoder, a.tolist())[-1], **close)
    torch.testing.assert_close(rows[-1][1], full_logits(decoder, b.tolist())[-1], **close)
    torch.testing.assert_close(rows[1][0], full_logits(decoder, a.tolist())[19], **close)


@pytest.mark.filterwarnings("ignore:.*tokenizer.json")
def test_shards_and_dtypes(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "one")
    whole = load(tmp_path / "one", device="cpu", progress=False)
    sharded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    sharded.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    many = load(tmp_path / "many", device="cpu", progress=False)
    for name, weight in whole.decoder.state_dict().items():
        assert torch.equal(weight, many.decoder.state_dict()[name]), name
    sharded.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    low = load(tmp_path / "bf16", device="cpu", dtype="bf16", progress=False)
    assert low.config.dtype == torch.bfloat16
    assert {p.dtype for p in low.decoder.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        ids = torch.arange(3, 33)
        want = sharded(ids[None]).logits[0].float()
    got = full_logits(low.decoder, ids.tolist()).float()
    assert (got - want).abs().max() <= 0.05 * want.abs().max()


def test_gpt_oss_attention_with_sinks_and_window(tmp_path: Path) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    from minikv.models.config import ModelConfig
    from minikv.models.layers import SelfAttention, StepContext
    from minikv.models.rope import Rotary

    yarn = {**YARN, "truncate": False}
    theirs_config = transformers.GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=6,
        rope_parameters=dict(yarn),
        attn_implementation="eager",
    )
    ours_config = ModelConfig(
        *("llama", 2, 64, 96, 4, 2, 32, 300, 256),
        rope_scaling=yarn,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        sliding_window=(5, -1),
    )
    x, positions = torch.randn(20, 64), torch.arange(20)
    gap = positions[:, None] - positions[None]
    for layer in (0, 1):
        theirs = GptOssAttention(theirs_config, layer)
        with torch.no_grad():
            for weight in theirs.parameters():
                weight.copy_(torch.randn_like(weight) * 0.2)
        ours = SelfAttention(ours_config, layer, device="cpu", dtype=torch.float32)
        given = theirs.state_dict()
        ours.load_state_dict(
            {name: given[name] for name in ("sinks", "o_proj.weight", "o_proj.bias")}
            | {
                f"qkv_proj.{x}": torch.cat([given[f"{p}_proj.{x}"] for p in "qkv"])
                for x in ("weight", "bias")
            }
        )
        hidden = (gap < 0) | ((gap >= 6) if layer == 0 else (gap < 0))
        mask = torch.zeros(20, 20).masked_fill(hidden, -torch.inf)[None, None]
        angles = GptOssRotaryEmbedding(theirs_config)(x[None], positions[None])
        with torch.no_grad():
            want = theirs(x[None], angles, mask)[0][0]
        cos, sin = Rotary(ours_config, torch.device("cpu"))(positions, torch.float32)
        dense = DenseAttention().begin((0, 20))
        got = ours(x, StepContext(cos, sin, dense, {ours.layer: ours.options}))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
