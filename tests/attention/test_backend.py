"""The attention backend: what it writes, what it attends to, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Way, assert_close, random_mask
from torch import Tensor

from minikv.attention import AttentionBackend, LayerAttention, StepInputs, reference_attention
from minikv.errors import ArgumentError
from minikv.memory import KVPool, MLAPool, PagedAllocator, RequestTable

PAGE = 4


class Engine:
    """Just enough of an engine: requests grow in pages, and every K and V is remembered to check
    against."""

    def __init__(
        self, way: Any, layers: list[LayerAttention], latent: bool = False, **options: Any
    ) -> None:
        self.device, self.layers, n = way.device, layers, len(layers)
        self.q_heads, self.kv_heads, self.d = (3, 1, 24) if latent else (4, 2, 16)
        self.d_v = 16
        if latent:
            self.pool: Any = MLAPool(64, PAGE, n, 16, 8, torch.float32, self.device)
        else:
            self.pool = KVPool(64, PAGE, n, 2, 16, torch.float32, self.device)
        for layer in range(n):  # unwritten slots must never matter
            self.pool.k(layer).fill_(torch.nan)
            self.pool.v(layer).fill_(torch.nan)
        self.allocator, self.table = (
            PagedAllocator(64, PAGE, self.device),
            RequestTable(4, 32, self.device),
        )
        self.attention = AttentionBackend(
            self.pool,
            self.table,
            page_size=PAGE,
            q_heads=self.q_heads,
            layers=layers,
            backend=way.backend,
            max_requests=4,
            **options,
        )
        self.rows, self.lens = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)

    def add(self, requests: int) -> None:
        rows = self.table.alloc(requests)
        assert rows is not None
        self.rows = torch.cat((self.rows, torch.tensor(rows)))
        self.lens = torch.cat((self.lens, torch.zeros(requests, dtype=torch.int64)))

    def step(self, new: list[int], decode: bool = False, **masks: Tensor) -> None:
        """Append `new[i]` tokens to request i and check every layer's output."""
        before, self.lens = self.lens, self.lens + torch.tensor(new)
        last = [
            int(self.table.table[r, n - 1]) if n else -1
            for r, n in zip(self.rows, before, strict=True)
        ]
        last_loc = torch.tensor(last, device=self.device)
        slots = self.allocator.alloc_extend(before, self.lens, last_loc, sum(new))
        assert slots is not None
        self.table.write(self.rows, before, self.lens, slots)
        step: Any = StepInputs(self.rows, before, self.lens, slots, decode)
        if masks:
            step = SimpleNamespace(**step._asdict(), new_lens=step.new_lens, **masks)
        self.metadata = self.attention.prepare(step)
        for layer, options in enumerate(self.layers):
            q = torch.randn(sum(new), self.q_heads, self.d).to(self.device)
            k = torch.randn(sum(new), self.kv_heads, self.d).to(self.device)
            v = (
                k[..., : self.d_v]
                if self.d_v != self.d
                else torch.randn(sum(new), self.kv_heads, self.d).to(self.device)
            )
            got = self.attention.forward(layer, q, k, v, self.metadata)
            assert torch.equal(self.pool.k(layer)[slots], k)
            assert torch.equal(self.pool.v(layer)[slots], v)
            assert_close(got, self.want(layer, q, before, options, **masks))

    def want(
        self, layer: int, q: Tensor, before: Tensor, options: LayerAttention, **masks: Tensor
    ) -> Tensor:
        def indptr(lens: Tensor) -> Tensor:
            return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(self.device)

        slots = torch.cat(
            [
                self.table.table[r, :n]
                for r, n in zip(self.rows.tolist(), self.lens.tolist(), strict=True)
            ]
        )
        return reference_attention(
            q,
            self.pool.k(layer),
            self.pool.v(layer),
            indptr(self.lens),
            slots,
            qo_indptr=indptr(self.lens - before),
            prefix_lens=before.to(self.device),
            **vars(options),
            **masks,
        )[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_may_bring_a_mask(way, deterministic):
    engine = Engine(way, [LayerAttention()], deterministic=deterministic)
    engine.add(2)
    engine.step([5, 3])
    masks = {name: mask.to(way.device) for name, mask in random_mask([5, 3], [4, 2]).items()}
    engine.step([4, 2], **masks)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_life_of_chunks_and_decode_steps(way, deterministic):
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], device=way.device)
    engine = Engine(
        way,
        [LayerAttention(), LayerAttention(sliding_window=2, sinks=sinks)],
        deterministic=deterministic,
    )
    engine.add(2)
    engine.step([6, 3])
    engine.step([1, 1], decode=True)
    engine.add(1)
    engine.step([0, 1, 5])  # nothing, one, a whole prompt
    engine.step([1, 1, 1], decode=True)


def test_latent_pool(way):
    engine = Engine(way, [LayerAttention(sm_scale=0.3)], latent=True)
    engine.add(2)
    engine.step([5, 2])
    engine.step([2, 1])
    engine.step([1, 1], decode=True)


def test_inside_and_outside_inference_mode(way):
    engine = Engine(way, [LayerAttention()])
    engine.add(1)
    with torch.inference_mode():
        engine.step([3])
        engine.step([1], decode=True)
    engine.step([1], decode=True)


def test_padded_rows_of_a_graph(way):
    engine = Engine(way, [LayerAttention()])
    engine.add(2)
    engine.step([5, 3])
    rows, lens = (
        torch.cat((engine.rows, torch.zeros(2, dtype=torch.int64))),
        torch.tensor([5, 3, 1, 1]),
    )
    slots = torch.tensor(
        [*(int(engine.table.table[r, n - 1]) for r, n in zip([1, 2], [5, 3], strict=True)), 0, 0]
    )
    step = StepInputs(rows, lens - 1, lens, slots.to(way.device), decode=True)
    metadata = engine.attention.prepare(step)
    q, k = (
        torch.randn(4, 4, 16).to(way.device),
        torch.full((4, 2, 16), torch.nan, device=way.device),
    )
    k[:2] = 1.0
    got = engine.attention.forward(0, q, k, k, metadata)
    assert got[:2].isfinite().all()


def test_on_the_cpu_padding_is_worked_out_once_per_step_and_kind_of_layer(monkeypatch):
    from minikv.attention import cpu

    calls, plan = [], cpu.plan
    monkeypatch.setattr(cpu, "plan", lambda *a, **k: calls.append(1) or plan(*a, **k))
    engine = Engine(Way("torch", "cpu"), [LayerAttention(), LayerAttention(sliding_window=3)] * 3)
    engine.add(1)
    engine.step([4])
    assert len(calls) == 2
    engine.step([1], decode=True)
    assert len(calls) == 4


def test_misuse_is_named(way):
    engine = Engine(way, [LayerAttention()])
    q, k = torch.zeros(2, 4, 16, device=way.device), torch.zeros(2, 2, 16, device=way.device)
    engine.add(1)
    slots = torch.tensor([4, 5], device=way.device)
    step = StepInputs(engine.rows, engine.lens, engine.lens + 3, slots)
    with pytest.raises(ArgumentError, match=r"out_slots.*must be \[3\]"):
        engine.attention.prepare(step)
    engine.step([3])
    with pytest.raises(ArgumentError, match="prepared for 3 tokens"):
        engine.attention.forward(0, q, k, k, engine.metadata)
    engine = Engine(way, [LayerAttention(sinks=torch.zeros(3, device=way.device))])
    engine.add(1)
    with pytest.raises(ArgumentError, match="sinks"):
        engine.step([3])
