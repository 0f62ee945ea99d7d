"""Exercises of notebook 02: what one token costs, and how many requests fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.engine import Case, Exercise

# Published shapes: layers, KV heads and head size, or for MLA the latent's width and the rotary
# part; bytes per number.
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M fp32": {"layers": 30, "kv_heads": 3, "head_dim": 64, "bytes": 4},
    "Llama-3-8B bf16": {"layers": 32, "kv_heads": 8, "head_dim": 128, "bytes": 2},
    "Llama-3-70B bf16": {"layers": 80, "kv_heads": 8, "head_dim": 128, "bytes": 2},
    "Llama-3-70B fp8": {"layers": 80, "kv_heads": 8, "head_dim": 128, "bytes": 1},
    "Qwen3-0.6B bf16": {"layers": 28, "kv_heads": 8, "head_dim": 128, "bytes": 2},
    "DeepSeek-V3 MLA bf16": {"layers": 61, "kv_lora_rank": 512, "rope_dim": 64, "bytes": 2},
}


def _kv_oracle(shape: dict[str, Any], tokens: int) -> int:
    """Count the numbers that one token leaves in one layer, as an array would hold them."""
    if "kv_lora_rank" in shape:
        row = np.zeros((1, shape["kv_lora_rank"] + shape["rope_dim"])).size
    else:
        row = np.zeros((2, shape["kv_heads"], shape["head_dim"])).size
    return sum(row * shape["bytes"] for _ in range(shape["layers"])) * tokens


def _kv_grid() -> Iterator[Case]:
    for name, shape in SHAPES.items():
        for tokens in (0, 1, 4096):
            yield Case((shape, tokens), f"{name}, {tokens} tokens")


def _shape_random(rng: np.random.Generator) -> dict[str, Any]:
    if rng.random() < 0.3:
        shape = {"kv_lora_rank": int(rng.choice([256, 512])), "rope_dim": int(rng.choice([32, 64]))}
    else:
        shape = {
            "kv_heads": int(rng.choice([1, 2, 3, 8, 32])),
            "head_dim": int(rng.choice([64, 80, 128])),
        }
    return {"layers": int(rng.integers(1, 81)), **shape, "bytes": int(rng.choice([1, 2, 4]))}


KV_BYTES = Exercise(
    id="02-kv-bytes",
    title="kv_bytes for six published shapes",
    statement=(
        "How many bytes of KV cache do `tokens` tokens take? `shape` has `layers`, `bytes` (per number), and either `kv_heads` "
        "and `head_dim` (K and V, one vector per KV head) or, for MLA, `kv_lora_rank` and `rope_dim` (one latent row, from "
        "which both K and V are read). Llama-3-8B in bf16: 32 layers · 2 · 8 heads · 128 · 2 bytes = 131,072 bytes a token."
    ),
    signature="def kv_bytes(shape: dict[str, int], tokens: int) -> int",
    worked=Case((SHAPES["Llama-3-8B bf16"], 1), "the worked case"),
    grid=_kv_grid,
    random=lambda rng: Case((_shape_random(rng), int(rng.integers(0, 100_000)))),
    oracle=_kv_oracle,
    hints=(
        "How many numbers does one token leave in one layer?",
        "MHA and GQA: K and V, each kv_heads * head_dim. Query heads play no part.",
        "MLA: one row of kv_lora_rank + rope_dim, not two.",
    ),
)


def _batch_oracle(memory: int, weights: int, token_bytes: int, tokens: int, page_size: int) -> int:
    """Admit requests one at a time until the next one does not fit; page 0 is kept for padding."""
    pages = (memory - weights) // (token_bytes * page_size) - 1 if memory > weights else 0
    each, batch = len(range(0, tokens, page_size)), 0
    while pages >= each:
        pages, batch = pages - each, batch + 1
    return batch


def _batch_grid() -> Iterator[Case]:
    yield Case((100, 200, 1, 4, 4), "the weights alone do not fit")
    yield Case((204, 200, 1, 4, 4), "room for one page, and that one is reserved")
    yield Case((208, 200, 1, 4, 4), "room for two pages: one request")
    yield Case((1000, 200, 2, 5, 4), "five tokens take two pages of four")
    yield Case((1000, 200, 2, 4, 1), "page size 1")
    yield Case((24 * 10**9, 16 * 10**9, 131_072, 4096, 16), "Llama-3-8B on a 24 GB card")


LARGEST_BATCH = Exercise(
    id="02-largest-batch",
    title="The largest batch in a budget",
    statement=(
        "`memory` bytes hold the weights and a pool of whole pages, one of which (page 0) is reserved for padding. Each request "
        "needs `tokens` tokens, in whole pages. How many requests fit at once? 1,000 bytes, weights 200, 2 bytes a token, "
        "5 tokens each, pages of 4: 100 pages, 99 usable, 2 per request, so 49."
    ),
    signature="def largest_batch(memory: int, weights: int, token_bytes: int, tokens: int, page_size: int) -> int",
    worked=Case((1000, 200, 2, 5, 4), "the worked case"),
    grid=_batch_grid,
    random=lambda rng: Case(
        (
            int(rng.integers(0, 20_000)),
            int(rng.integers(0, 10_000)),
            int(rng.choice([1, 2, 8])),
            int(rng.integers(1, 100)),
            int(rng.choice([1, 4, 16])),
        )
    ),
    oracle=_batch_oracle,
    hints=(
        "How many pages fit beside the weights?",
        "One of the pages is reserved, and a request rounds up to whole pages.",
        "max(0, (memory - weights) // (token_bytes * page_size) - 1) // ceil(tokens / page_size).",
    ),
)

EXERCISES = [KV_BYTES, LARGEST_BATCH]
