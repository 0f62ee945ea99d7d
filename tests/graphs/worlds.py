"""Small steps to run under a runner: a layer over a paged pool with its plain counterpart, an
engine's decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minikv import LLM
from minikv.attention import AttentionBackend, LayerAttention
from minikv.engine.sampling import VARIANTS
from minikv.engine.step import (
    CompiledStep,
    ModelStep,
    Opaque,
    RecordedStep,
    decode_buffers,
)
from minikv.graphs import Buffer, CudaGraphRunner, GraphRunner, Padding
from minikv.memory import KVPool, PagedAllocator, RequestTable

HEADS, D = 2, 16


def double(inputs: dict[str, Tensor], variant: str) -> Tensor:
    """The simplest step with variants."""
    return inputs["x"] * 2 if variant == "greedy" else inputs["x"] + 1


def runner_of(
    step: Any, rows: int, sizes: list[int], kind: type[GraphRunner] = CudaGraphRunner, **options
) -> Any:
    """A runner over one buffer x [rows, 3]."""
    device = options.pop("device", "cpu")
    return kind(step, {"x": torch.zeros(rows, 3, device=device)}, sizes, progress=False, **options)


class PagedLayer:
    """One attention layer over a pool, run by a graph runner (on CUDA as captured, on the CPU
    through the tape)."""

    def __init__(
        self,
        sizes: list[int],
        page_size: int = 4,
        size: int = 64,
        window: int = -1,
        device: str = "cpu",
        backend: str = "triton",
        max_requests: int = 8,
        context: int = 32,
        padding_kv: float = 0.0,
        **options: Any,
    ) -> None:
        self.pool = KVPool(size, page_size, 1, HEADS, D, torch.float32, device)
        self.allocator = PagedAllocator(size, page_size, device)
        self.table = RequestTable(max_requests, context, device)
        self.attention = AttentionBackend(
            self.pool,
            self.table,
            page_size=page_size,
            q_heads=HEADS,
            layers=[LayerAttention(sliding_window=window)],
            backend=backend,
            max_requests=max_requests,
        )
        self.device = device
        self.opaque = Opaque(self.attention)
        buffers = decode_buffers(max_requests, torch.device(device))
        for name, value in {"q": 0.0, "k": padding_kv, "v": padding_kv}.items():
            buffers[name] = Buffer(
                torch.zeros(max_requests, HEADS, D, device=device), Padding.FILL, value
            )
        self.totals: list[int] = []
        self.runner = CudaGraphRunner(
            self.step, buffers, sizes, prepare=self.prepare, progress=False, **options
        )

    def prepare(self, host: dict[str, Tensor], size: int) -> None:
        self.totals.append(int(host["seq_lens"].sum()))
        if self.device == "cpu":
            return self.opaque.prepare(host)
        torch.cumsum(host["seq_lens"], 0, out=host["kv_indptr"][1:])
        return self.attention.plan(host["seq_lens"])

    def step(self, inputs: dict[str, Tensor], variant: str) -> Tensor:
        new = inputs["q"], inputs["k"], inputs["v"]
        if self.device == "cpu":  # one operation, which a tape can repeat
            return self.opaque.forward(0, *new, None)
        static = inputs["rows"], inputs["kv_indptr"], inputs["out_slots"]
        return self.attention.forward(0, *new, self.attention.prepare_static(*static))

    def fill(self, lens: list[int]) -> Tensor:
        """Requests of these lengths with random keys and values; their rows."""
        rows = self.table.alloc(len(lens))
        assert rows is not None
        for row, n in zip(rows, lens, strict=True):
            slots = self.allocator.alloc_extend(
                torch.tensor([0]), torch.tensor([n]), torch.tensor([-1], device=self.device), n
            )
            assert slots is not None
            self.table.write([row], [0], [n], slots)
            new = torch.randn(2, n, HEADS, D).to(self.device)
            self.pool.set_kv(0, slots, *new)
        return torch.tensor(rows)

    def batch(self, rows: Tensor, lens: Tensor) -> dict[str, Tensor]:
        """One new token each, after `lens` tokens."""
        table = self.table.table
        last = table[rows.to(table.device), (lens - 1).to(table.device)].long()
        slots = self.allocator.alloc_decode(lens + 1, last)
        assert slots is not None
        self.table.write(rows, lens, lens + 1, slots)
        q, k, v = torch.randn(3, len(rows), HEADS, D)
        return {
            "token_ids": torch.ones(len(rows), dtype=torch.int64),
            "positions": lens,
            "rows": rows,
            "seq_lens": lens + 1,
            "out_slots": slots,
            **{name: t.to(self.device) for name, t in {"q": q, "k": k, "v": v}.items()},
        }

    def want(self, batch: dict[str, Tensor], window: int = -1) -> Tensor:
        """Each request by itself, in float64."""
        outs = []
        for i, (row, n) in enumerate(
            zip(batch["rows"].tolist(), batch["seq_lens"].tolist(), strict=True)
        ):
            slots = self.table.table[row, max(0, n - 1 - window if window >= 0 else 0) : n].long()
            k, v = (t[slots].double() for t in (self.pool.k(0), self.pool.v(0)))
            weights = torch.softmax(
                torch.einsum("hd,nhd->hn", batch["q"][i].double(), k) * D**-0.5, -1
            )
            outs.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(outs).float()


class TapedStep(CompiledStep):
    """The engine's decode step as a tape can record it: attention is one operation, sampling is its
    own many."""

    choose = ModelStep.choose


def give_graphs(llm: LLM, sizes: list[int], device: str = "cpu", **options: Any) -> CudaGraphRunner:
    """Let an engine decode through a CUDA graph runner of these sizes; on the CPU through tapes."""
    step = (
        TapedStep(llm.decoder, llm.attention)
        if device == "cpu"
        else RecordedStep(llm.decoder, llm.attention)
    )
    rows = llm.scheduler.max_requests
    llm.loop.runner = CudaGraphRunner(
        step,
        decode_buffers(rows, torch.device(device), llm.config.vocab_size),
        sizes,
        variants=VARIANTS,
        later=VARIANTS[2:],
        prepare=step.prepare,
        eager=step.run,
        watch=step.watched,
        debug=True,
        progress=False,
        **options,
    )
    return llm.runner
