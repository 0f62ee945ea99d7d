"""Decoders over the real paged pool and attention backend, against the dense stand-in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_standins import full_logits

from minikv.attention import StepInputs
from minikv.attention.backend import AttentionBackend
from minikv.memory import KVPool, MLAPool, PagedAllocator, RequestTable
from minikv.models import Decoder, ModelConfig, random_model
from minikv.models.files.shapes import SHAPES, TINY

CONFIGS = {
    "tiny": TINY,
    "window-and-sinks": replace(TINY, sliding_window=(6, -1, 9), sinks=True, qk_norm=True),
    "mla": SHAPES["mla-tiny"],
}


class Paged:
    """Two requests over one pool, driven as the engine does it, without the engine."""

    def __init__(self, decoder: Decoder, config: ModelConfig, page_size: int) -> None:
        self.decoder, size = decoder, 128
        self.allocator, self.table = PagedAllocator(size, page_size), RequestTable(4, 128)
        if config.mla:
            shape = config.num_layers, config.mla.kv_lora_rank, config.mla.rope_dim
            pool: KVPool | MLAPool = MLAPool(size, page_size, *shape, torch.float32, "cpu")
        else:
            shape = config.num_layers, config.kv_heads, config.head_dim
            pool = KVPool(size, page_size, *shape, torch.float32, "cpu")
        self.attention = AttentionBackend(
            pool,
            self.table,
            page_size=page_size,
            q_heads=config.q_heads,
            layers=decoder.attention_layers,
        )
        rows = self.table.alloc(2)
        assert rows
        self.rows, self.lens = torch.tensor(rows), torch.zeros(2, dtype=torch.int64)

    def extend(self, *pieces: list[int]) -> torch.Tensor:
        old, new = self.lens, self.lens + torch.tensor([len(p) for p in pieces])
        last = torch.tensor(
            [
                int(self.table.table[r, n - 1]) if n else -1
                for r, n in zip(self.rows, old, strict=True)
            ]
        )
        slots = self.allocator.alloc_extend(old, new, last, int((new - old).sum()))
        assert slots is not None
        at = 0
        for row, a, b in zip(self.rows, old.tolist(), new.tolist(), strict=True):
            self.table.table[row, a:b] = slots[at : at + b - a].int()
            at += b - a
        metadata = self.attention.prepare(StepInputs(self.rows, old, new, slots))
        self.lens = new
        positions = torch.cat(
            [torch.arange(a, b) for a, b in zip(old.tolist(), new.tolist(), strict=True)]
        )
        ends = (new - old).cumsum(0) - 1
        return self.decoder(
            torch.tensor([i for p in pieces for i in p]),
            positions,
            self.attention,
            metadata,
            logits_at=ends,
        )

    def decode(self, a: int, b: int) -> torch.Tensor:
        last = torch.stack(
            [self.table.table[r, n - 1] for r, n in zip(self.rows, self.lens, strict=True)]
        ).long()
        self.lens = self.lens + 1
        slots = self.allocator.alloc_decode(self.lens, last)
        assert slots is not None
        self.table.table[self.rows, self.lens - 1] = slots.int()
        step = StepInputs(self.rows, self.lens - 1, self.lens, slots, decode=True)
        metadata = self.attention.prepare(step)
        return self.decoder(torch.tensor([a, b]), self.lens - 1, self.attention, metadata)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_paged_logits_equal_dense_ones(name: str, page_size: int) -> None:
    decoder = random_model(CONFIGS[name], seed=2)
    a, b = torch.randint(0, 256, (31,)).tolist(), torch.randint(0, 256, (24,)).tolist()
    run = Paged(decoder, CONFIGS[name], page_size)
    run.extend(a[:19], b[:5])
    run.extend(a[19:28], b[5:21])
    for i in range(3):
        got = run.decode(a[28 + i], b[21 + i])
    want = torch.stack([full_logits(decoder, a)[-1], full_logits(decoder, b)[-1]])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
