"""Extend attention on a GPU beside its matrix rate, PyTorch's own kernels and, where installed,
FlashInfer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.measure.limits import matmul_rate
from minikv.measure.table import table
from minikv.measure.timing import measure_graph

L2_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """One measured batch of equal requests; `target` in TFLOP/s, causal operations only, on an
    H200."""

    q_heads: int
    kv_heads: int
    d: int
    batch: int
    prefix: int
    new: int
    target: float
    d_v: int = 0
    flex: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions of the scores and values that a causal query sees."""
        seen = self.new * self.prefix + self.new * (self.new + 1) / 2
        return 2.0 * self.batch * self.q_heads * seen * (self.d + (self.d_v or self.d))


GQA = [
    *((1, 0, 4096, 470), (8, 0, 4096, 490), (1, 4096, 512, 420), (8, 4096, 512, 450)),
    *((1, 16384, 128, 400), (8, 16384, 128, 460), (32, 512, 64, 265)),
]
ROWS = [
    *(
        Row(32, 8, 128, b, prefix, new, target, flex=b == 8 and prefix == 0)
        for b, prefix, new, target in GQA
    ),
    Row(16, 8, 128, 8, 0, 4096, 490),
    Row(9, 3, 64, 8, 0, 4096, 420),
    Row(32, 32, 128, 8, 4096, 512, 440),
    Row(128, 128, 192, 1, 0, 4096, 350, d_v=128),
]


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Time extend attention as graphs run it: rotated inputs beyond the L2 cache, captured,
    replayed, medians.

    Each result is first compared with float32. Peers read contiguous keys (SDPA with flash and
    cuDNN, compiled flex_attention), which is a bound rather than a peer; FlashInfer reads the same
    pages.

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer samples, no compiled flex_attention, and every third row.
    device
        Only CUDA is measured.

    Returns
    -------
    dict
        ``rows`` and ``matmul_rate`` in FLOP per second.
    """
    if (
        torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device).type
        != "cuda"
    ):
        print("extend attention is measured on CUDA devices only")
        return {"rows": []}
    limit, rows = matmul_rate("cuda", torch.bfloat16), []
    for row in ROWS[:: 3 if quick else 1]:
        rows.append(_measure(row, limit, quick))
        torch.cuda.empty_cache()
    print(
        f"extend attention, bf16, page size 16, causal TFLOP/s; matrix product {limit / 1e12:,.0f} "
        "TFLOP/s"
    )
    print(table(rows))
    return {"rows": rows, "matmul_rate": limit}


def _measure(row: Row, limit: float, quick: bool) -> dict[str, Any]:
    inputs, samples = _Inputs(row), 5 if quick else 10
    inputs.check()

    def rate(call: Callable[[int], Any]) -> float:
        time = measure_graph([partial(call, i) for i in range(inputs.calls)], samples=samples)
        return row.flops / time.median / 1e12

    ours = rate(inputs.two_stage)
    found: dict[str, Any] = {
        "heads": f"{row.q_heads}/{row.kv_heads}/{row.d}",
        "batch": row.batch,
        "prefix": row.prefix,
        "new": row.new,
        "two-stage": ours,
        "us": row.flops / ours / 1e6,
        "of matmul": ours * 1e12 / limit,
        "target": row.target,
        "ours / target": ours / row.target,
        "unified": rate(inputs.unified),
    }
    found["unified / two-stage"] = found["unified"] / ours
    peers: dict[str, Callable[[], Callable[[int], Any]]] = {
        "flash": partial(inputs.sdpa, "FLASH_ATTENTION"),
        "cudnn": partial(inputs.sdpa, "CUDNN_ATTENTION"),
        "flex": partial(inputs.flex, quick),
        "flashinfer": inputs.flashinfer,
    }
    for name, prepare in peers.items():
        try:
            found[name] = rate(prepare())
        except (
            NotImplementedError,
            ImportError,
            RuntimeError,
            ValueError,
        ):  # not installed, or refuses the shape
            torch.cuda.synchronize()
            found[name] = None
    timed = [found[name] for name in peers if found[name] is not None]
    found["ours / best peer"] = ours / max(timed) if timed else None
    return found


class _Inputs:
    """Sets of inputs, together larger than the L2 cache: new tokens, and a pool with shuffled pages
    that holds all."""

    PAGE = 16

    def __init__(self, row: Row) -> None:
        self.row, d_v = row, row.d_v or row.d
        self.total = row.prefix + row.new
        tokens, listed, device = row.batch * row.new, row.batch * self.total, torch.device("cuda")
        set_bytes = 2 * (
            tokens * row.q_heads * (row.d + d_v) + listed * row.kv_heads * (row.d + d_v)
        )
        self.sets = max(2, min(8, 2 * L2_BYTES // set_bytes + 1))
        self.calls = self.sets * max(1, round(4 / self.sets))
        like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.q = torch.randn(self.sets, tokens, row.q_heads, row.d, **like)
        self.k = torch.randn(self.sets, listed, row.kv_heads, row.d, **like)  # a pool per set
        self.v = torch.randn(self.sets, listed, row.kv_heads, d_v, **like)
        pages = torch.stack(
            [torch.randperm(listed // self.PAGE, device=device) for _ in range(self.sets)]
        ).int()
        self.pages = pages.view(self.sets, row.batch, -1)
        slots = self.pages[..., None] * self.PAGE + torch.arange(
            self.PAGE, device=device, dtype=torch.int32
        )
        self.slots = slots.view(self.sets, row.batch, self.total)
        fresh = self.slots[:, :, row.prefix :].flatten(1).long()
        self.new_k, self.new_v = (
            torch.stack([x[s][fresh[s]] for s in range(self.sets)]) for x in (self.k, self.v)
        )
        counting = torch.arange(row.batch + 1, device=device, dtype=torch.int32)
        self.qo, self.prefix, self.both = (
            counting * row.new,
            counting * row.prefix,
            counting * self.total,
        )
        self.prefix_lens = torch.full((row.batch,), row.prefix, device=device, dtype=torch.int32)
        self.prefix_slots = self.slots[:, :, : row.prefix].flatten(1).contiguous()
        self.out = torch.empty(tokens, row.q_heads, d_v, **like)

    def two_stage(self, i: int) -> Any:
        from minikv.attention import extend_attention

        s = i % self.sets
        tensors = (
            self.q[s],
            self.new_k[s],
            self.new_v[s],
            self.k[s],
            self.v[s],
            self.qo,
            self.prefix,
        )
        settings = {"page_size": self.PAGE, "max_extend_len": self.row.new, "out": self.out}
        return extend_attention(*tensors, self.prefix_slots[s], **settings)

    def unified(self, i: int) -> Any:
        from minikv.attention import extend_attention_unified

        s = i % self.sets
        tensors = (
            self.q[s],
            self.k[s],
            self.v[s],
            self.qo,
            self.both,
            self.slots[s].flatten(),
            self.prefix_lens,
        )
        settings = {"page_size": self.PAGE, "max_extend_len": self.row.new, "out": self.out}
        return extend_attention_unified(*tensors, **settings)

    def check(self) -> None:
        """Both kernels on the last set, first and last request, first and last 64 queries, against
        float32."""
        s, row = self.sets - 1, self.row
        rows = torch.cat(
            [torch.arange(min(64, row.new)), torch.arange(max(0, row.new - 64), row.new)]
        ).cuda()
        for call in (self.two_stage, self.unified):
            self.out.fill_(torch.nan)
            call(s)
            assert not self.out.isnan().any(), f"{row}: unwritten results"
            for r in {0, row.batch - 1}:
                k, v = (x[s][self.slots[s, r].long()].float() for x in (self.k, self.v))
                q = self.q[s, r * row.new + rows].float().view(len(rows), row.kv_heads, -1, row.d)
                scores = torch.einsum("qhgd,khd->hgqk", q, k) * row.d**-0.5
                hidden = torch.arange(self.total, device="cuda") > (row.prefix + rows)[:, None]
                weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
                want = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
                error = float((self.out[r * row.new + rows].float() - want).abs().max())
                assert error <= 1e-2 * max(1.0, float(want.abs().max())), (
                    f"{row}: request {r} is off by {error}"
                )

    def _contiguous(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, tokens, d], keys in the pool's order: no pages (values may differ, the
        work does not)."""
        s, row = i % self.sets, self.row
        q = self.q[s].view(row.batch, row.new, row.q_heads, row.d).transpose(1, 2)
        k, v = (
            x[s].view(row.batch, self.total, row.kv_heads, -1).transpose(1, 2)
            for x in (self.k, self.v)
        )
        return q, k, v

    def sdpa(self, backend: str) -> Callable[[int], Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        row = self.row
        bias = causal_lower_right(row.new, self.total) if row.prefix else None

        def call(i: int) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                settings = {"is_causal": bias is None, "enable_gqa": row.q_heads != row.kv_heads}
                return F.scaled_dot_product_attention(
                    *self._contiguous(i), attn_mask=bias, **settings
                )

        return call

    def flex(self, quick: bool) -> Callable[[int], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if quick or not self.row.flex:
            raise NotImplementedError
        row = self.row
        mask = create_block_mask(
            lambda b, h, q, k: k <= q + row.prefix, None, None, row.new, self.total, device="cuda"
        )  # fmt: skip
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda i: compiled(
            *self._contiguous(i), block_mask=mask, enable_gqa=row.q_heads != row.kv_heads
        )

    def flashinfer(self) -> Callable[[int], Any]:
        import flashinfer  # type: ignore[import-not-found]

        row = self.row
        if row.d_v:
            raise NotImplementedError
        pages = torch.arange(row.batch + 1, device="cuda", dtype=torch.int32) * (
            self.total // self.PAGE
        )
        last = torch.full((row.batch,), self.PAGE, device="cuda", dtype=torch.int32)
        wrappers = []
        for s in range(self.sets):
            scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
            shape = (row.q_heads, row.kv_heads, row.d, self.PAGE)
            settings = {"causal": True, "q_data_type": torch.bfloat16}
            wrapper.plan(self.qo, pages, self.pages[s].flatten(), last, *shape, **settings)
            wrappers.append(wrapper)
        caches = [
            tuple(x[s].view(-1, self.PAGE, row.kv_heads, row.d) for x in (self.k, self.v))
            for s in range(self.sets)
        ]
        return lambda i: wrappers[i % self.sets].run(self.q[i % self.sets], caches[i % self.sets])
