"""The same weights and, within rounding, the same logits on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch
from model_standins import DenseAttention, full_logits

from minikv.models import Decoder, load

pytestmark = pytest.mark.gpu


def gpu_logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    tokens, positions = torch.tensor(ids, device="cuda"), torch.arange(len(ids), device="cuda")
    dense = DenseAttention().begin((0, len(ids)))
    return decoder(tokens, positions, dense, decoder.attention_layers).cpu()


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_fp32_logits_equal_the_cpus(name: str, request: pytest.FixtureRequest) -> None:
    if name != "tiny":
        request.getfixturevalue("model_file")
    on_cpu = load(name, device="cpu", dtype="float32", progress=False)
    on_gpu = load(name, device="cuda", dtype="float32", progress=False)
    for key, weight in on_gpu.decoder.state_dict().items():
        assert weight.is_cuda
        assert torch.equal(weight.cpu(), on_cpu.decoder.state_dict()[key]), key
    ids = on_cpu.tokenizer.encode("The cache holds pages, and the tree shares prefixes.")
    torch.testing.assert_close(
        gpu_logits(on_gpu.decoder, ids), full_logits(on_cpu.decoder, ids), rtol=0, atol=2e-4
    )


def test_a_published_shape_is_drawn_on_the_gpu() -> None:
    first, again = (load("random:qwen3-0.6b", seed=1, progress=False).decoder for _ in range(2))
    assert {p.dtype for p in first.parameters()} <= {torch.bfloat16, torch.float16}
    assert torch.equal(first.embed_tokens.weight, again.embed_tokens.weight)
    assert gpu_logits(first, [1, 2, 3]).isfinite().all()
