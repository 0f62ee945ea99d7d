"""Decode attention on a GPU beside its copy bandwidth, PyTorch's own kernels and, where installed,
FlashInfer.

Extend attention is measured by ``bench_extend``, whose tables follow these.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.measure.limits import copy_bandwidth
from minikv.measure.table import table
from minikv.measure.timing import measure_graph

L2_BYTES = 64 << 20
UNEVEN = 0  # stands for lengths drawn log-uniformly from 128..8192


@dataclass(frozen=True)
class Row:
    """One measured decode batch; `target` in microseconds, on an H200."""

    q_heads: int
    kv_heads: int
    d: int
    batch: int
    context: int
    target: float
    page: int = 16
    d_v: int | None = None  # of MLA: the values are the first columns of the keys' rows
    splits: int | None = None
    flex: bool = False

    def lengths(self) -> Tensor:
        """int64 [batch] on the CPU."""
        if self.context != UNEVEN:
            return torch.full((self.batch,), self.context)
        gen = torch.Generator().manual_seed(0)
        return (128 * 64 ** torch.rand(self.batch, generator=gen)).long()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 2 * self.kv_heads * (self.d if self.d_v else 2 * self.d)


GQA = [
    *(
        (1, 512, 6.5),
        (8, 512, 10.5),
        (64, 512, 38),
        (256, 512, 131),
        (1, 4096, 12),
        (8, 4096, 39),
        (64, 4096, 246),
    ),
    *((256, 4096, 950), (1, 32768, 40), (8, 32768, 248), (64, UNEVEN, 145), (256, UNEVEN, 425)),
]
ROWS = [
    *(
        Row(32, 8, 128, batch, n, target, flex=(batch, n) in ((8, 4096), (64, 4096)))
        for batch, n, target in GQA
    ),
    Row(32, 8, 128, 8, 4096, 41, page=1),
    Row(32, 8, 128, 64, 4096, 258, page=1),
    Row(32, 8, 128, 8, 4096, 39, splits=8),
    Row(16, 8, 128, 64, 4096, 246),
    *(Row(9, 3, 64, batch, 4096, target) for batch, target in ((1, 7), (64, 56), (256, 190))),
    *(Row(32, 32, 128, batch, 4096, target) for batch, target in ((8, 127), (64, 950))),
    *(
        Row(128, 1, 576, b, n, target, d_v=512)
        for b, n, target in ((64, 4096, 290), (8, 4096, 51), (8, 32768, 296))
    ),
]


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Time decode attention as graphs run it: rotated inputs beyond the L2 cache, captured,
    replayed, medians.

    Each result is first compared with float32. ``us`` of peers: SDPA (flash and cuDNN) and compiled
    flex_attention read contiguous keys, which is a bound rather than a peer; FlashInfer reads the
    same pages.

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer samples, no compiled flex_attention, and every third row.
    device
        Only CUDA is measured here; ``bench_attention_cpu`` measures the CPU.

    Returns
    -------
    dict
        ``rows`` (decode), ``extend`` (what ``bench_extend`` returned) and ``copy_bandwidth`` in
        bytes per second.
    """
    if (
        torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device).type
        != "cuda"
    ):
        print("attention measures CUDA devices; see attention_cpu")
        return {"rows": []}
    limit, rows = copy_bandwidth("cuda"), []
    for row in ROWS[:: 3 if quick else 1]:
        rows.append(_measure(row, limit, quick))
        torch.cuda.empty_cache()
    print(f"decode attention, bf16; copy bandwidth {limit / 1e9:,.0f} GB/s, read and written")
    print(table(rows))
    found: dict[str, Any] = {"rows": rows, "copy_bandwidth": limit}
    if importlib.util.find_spec("minikv.measure.bench_extend"):
        extend = importlib.import_module("minikv.measure.bench_extend")
        found["extend"] = extend.run(out_dir=out_dir, quick=quick, device=device)
    return found


def _measure(row: Row, limit: float, quick: bool) -> dict[str, Any]:
    inputs = _Inputs(row)
    inputs.check()
    samples = 10 if quick else 20
    time = measure_graph([partial(inputs.ours, i) for i in range(inputs.calls)], samples=samples)
    moved = inputs.total * row.row_bytes
    found: dict[str, Any] = {
        "heads": f"{row.q_heads}/{row.kv_heads}/{row.d}",
        "batch": row.batch,
        "context": row.context or "128..8192",
        "page": row.page,
        "splits": row.splits or "auto",
        "us": time.us,
        "spread": time.spread,
        "GB/s": moved / time.median / 1e9,
        "of copy": moved / time.median / limit,
        "target us": row.target,
        "us / target": time.us / row.target,
    }
    peers: dict[str, Callable[[], Callable[[int], Any]]] = {
        "flash": partial(inputs.sdpa, "FLASH_ATTENTION"),
        "cudnn": partial(inputs.sdpa, "CUDNN_ATTENTION"),
        "flex": partial(inputs.flex, quick),
        "flashinfer": inputs.flashinfer,
    }
    for name, prepare in peers.items():
        found[name + " us"] = _peer(prepare, inputs.calls, samples)
    timed = [found[f"{name} us"] for name in peers if found[f"{name} us"] is not None]
    found["best peer / ours"] = min(timed) / time.us if timed else None
    return found


def _peer(prepare: Callable[[], Callable[[int], Any]], calls: int, samples: int) -> float | None:
    """Microseconds of a peer; None where it does not apply, is not installed or refuses the
    shape."""
    try:
        call = prepare()
        return measure_graph([partial(call, i) for i in range(calls)], samples=samples).us
    except (NotImplementedError, ImportError, RuntimeError, ValueError):
        torch.cuda.synchronize()
        return None


class _Inputs:
    """Sets of inputs over one pool with shuffled pages, together larger than the L2 cache."""

    def __init__(self, row: Row) -> None:
        from minikv.attention import AttentionPlan

        self.row, self.lengths = row, row.lengths()
        self.total = int(self.lengths.sum())
        pages = -(-self.lengths // row.page)
        per_set = int(pages.sum())
        self.sets = max(2, min(64, 4 * L2_BYTES // (self.total * row.row_bytes) + 1))
        self.calls = max(self.sets, 8) if self.total * row.row_bytes > L2_BYTES else 64
        slots = per_set * self.sets * row.page
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.k = torch.randn(slots, row.kv_heads, row.d, **like)
        self.v = (
            self.k[..., : row.d_v] if row.d_v else torch.randn(slots, row.kv_heads, row.d, **like)
        )
        self.q = torch.randn(self.sets, row.batch, row.q_heads, row.d, **like)
        self.pages = (
            torch.randperm(per_set * self.sets, device="cuda").view(self.sets, per_set).int()
        )
        place = torch.cat(
            [torch.arange(int(p) * row.page) < n for p, n in zip(pages, self.lengths, strict=True)]
        )
        slot = self.pages[:, :, None] * row.page + torch.arange(
            row.page, device="cuda", dtype=torch.int32
        )
        self.indices = slot.view(self.sets, -1)[:, place.cuda()]
        ends = torch.zeros(row.batch + 1, dtype=torch.int32)
        ends[1:] = self.lengths.cumsum(0)
        self.indptr = ends.cuda()
        self.plan = AttentionPlan(row.batch, row.q_heads, self.k, self.v, num_kv_splits=row.splits)
        self.plan.update(self.lengths)
        self.out = torch.empty(row.batch, row.q_heads, row.d_v or row.d, **like)

    def ours(self, i: int) -> Tensor:
        from minikv.attention import decode_attention

        s = i % self.sets
        settings = {"page_size": self.row.page, "plan": self.plan, "out": self.out}
        got = decode_attention(self.q[s], self.k, self.v, self.indptr, self.indices[s], **settings)
        assert isinstance(got, Tensor)
        return got

    def check(self) -> None:
        """Every request of the last set against float32; outputs poisoned first."""
        self.out.fill_(torch.nan)
        got, s, ends = self.ours(self.sets - 1).float(), self.sets - 1, self.indptr.tolist()
        group = self.row.q_heads // self.row.kv_heads
        for r in range(self.row.batch):
            slots = self.indices[s, ends[r] : ends[r + 1]].long()
            k, v = self.k[slots].float(), self.v[slots].float()
            q = self.q[s, r].float().view(self.row.kv_heads, group, -1)
            weights = torch.einsum("hgd,thd->hgt", q, k).mul(self.row.d**-0.5).softmax(-1)
            want = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1)
            error = float((got[r] - want).abs().max())
            assert error <= 1e-2 * max(1.0, float(want.abs().max())), (
                f"{self.row}: request {r} is off by {error}"
            )

    def _contiguous(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pool seen as [batch, kv_heads, context, d], queries of a group as rows: no pages, no
        repeated heads."""
        if self.row.d_v or self.row.context == UNEVEN or self.row.splits:
            raise NotImplementedError
        rows, s = self.row.batch * self.row.context, i % self.sets
        shape = (self.row.batch, self.row.context, self.row.kv_heads, self.row.d)
        k, v = (x[s * rows : (s + 1) * rows].view(shape).transpose(1, 2) for x in (self.k, self.v))
        return self.q[s].view(self.row.batch, self.row.kv_heads, -1, self.row.d), k, v

    def sdpa(self, backend: str) -> Callable[[int], Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(i: int) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(*self._contiguous(i))

        return call

    def flex(self, quick: bool) -> Callable[[int], Any]:
        from torch.nn.attention.flex_attention import flex_attention

        if quick or not self.row.flex:
            raise NotImplementedError
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda i: compiled(*self._contiguous(i))

    def flashinfer(self) -> Callable[[int], Any]:
        import flashinfer  # type: ignore[import-not-found]

        if self.row.d_v or self.row.splits:
            raise NotImplementedError
        page = self.row.page
        per_request = -(-self.lengths // page)
        starts = torch.zeros(self.row.batch + 1, dtype=torch.int32)
        starts[1:] = per_request.cumsum(0)
        last = (self.lengths - (per_request - 1) * page).int()
        shape = (self.row.q_heads, self.row.kv_heads, self.row.d, page)
        cache = tuple(x.view(-1, page, self.row.kv_heads, self.row.d) for x in (self.k, self.v))
        wrappers = []
        for s in range(self.sets):
            scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                scratch, "NHD", use_tensor_cores=True
            )
            wrapper.plan(
                starts.cuda(), self.pages[s], last.cuda(), *shape, q_data_type=torch.bfloat16
            )
            wrappers.append(wrapper)
        return lambda i: wrappers[i % self.sets].run(self.q[i % self.sets], cache)
