"""Decode attention on the CPU over paged keys: ours, gathering per request before SDPA, and SDPA
without paging."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Q_HEADS, KV_HEADS, D, PAGE = 9, 3, 64, 16  # SmolLM2-135M
BATCHES = {
    "1 x 128": [128],
    "1 x 2048": [2048],
    "8 x 128": [128] * 8,
    "8 x 2048": [2048] * 8,
    "8, 64..4096": [64, 96, 200, 333, 700, 1500, 2500, 4096],
}


def run(
    out_dir: str | Path | None = None, quick: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Time one layer's decode attention, fp32, SmolLM2 heads, shuffled pages of 16, inputs rotated.

    The ways take turns and the best of each is reported, so that foreign load on the machine hits
    all alike.

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer repeats.
    device
        Only "cpu" is measured here.

    Returns
    -------
    dict
        ``rows``: one per batch. "ours, first layer": ``decode_attention`` as it stands; "ours,
        further layer": what a model's other layers pay, once the step's padding is worked out;
        "gather + SDPA": per request, the usual way without a paged kernel; "unpaged SDPA": on keys
        that need no gathering, all requests as long as the longest. The two "times" compare "ours,
        further layer" with the column before: above 1 ours is faster.
    """
    from minikv.measure.limits import copy_bandwidth
    from minikv.measure.table import table

    if torch.device(device).type != "cpu":
        print("attention_cpu measures the CPU only")
        return {"rows": []}
    limit, rows = copy_bandwidth("cpu"), []
    for name, lengths in BATCHES.items():
        inputs = [_Inputs(lengths, seed) for seed in range(3)]
        error = max(float((x.call() - x.gathered()).abs().max()) for x in inputs)
        assert error < 2e-5, f"results differ by {error}"
        best = {way: float("inf") for way in ("call", "layer", "gathered", "contiguous")}
        for turn in range(9 if quick else 60):
            for way in best:
                x = inputs[turn % len(inputs)]
                fn: Callable[[], Tensor] = getattr(x, way)
                start = perf_counter()
                fn()
                best[way] = min(best[way], perf_counter() - start)
        moved = 2 * sum(lengths) * KV_HEADS * D * 4
        rows.append(
            {
                "batch x context": name,
                "ours, first layer us": best["call"] * 1e6,
                "ours, further layer us": best["layer"] * 1e6,
                "gather + SDPA us": best["gathered"] * 1e6,
                "times gather's speed": best["gathered"] / best["layer"],
                "unpaged SDPA us": best["contiguous"] * 1e6,
                "times unpaged speed": best["contiguous"] / best["layer"],
                "GB/s": moved / best["layer"] / 1e9,
                "copy GB/s": limit / 1e9,
            }
        )
    print(
        f"decode attention, fp32, heads {Q_HEADS}/{KV_HEADS}/{D}, {torch.get_num_threads()} threads"
    )
    print(table(rows))
    print(
        "ours: the first layer of a step also works out the padding, further layers use it again."
    )
    print(
        "times ... speed: our further layer beside the column before; above 1 ours is faster. "
        "Unpaged keys are padded."
    )
    return {"rows": rows, "threads": torch.get_num_threads()}


class _Inputs:
    """One batch over a pool with shuffled pages, and the ways to attend to it."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        from minikv.attention import cpu
        from minikv.attention.options import Options

        gen = torch.Generator().manual_seed(seed)
        pages = [-(-n // PAGE) for n in lengths]
        order = (1 + torch.randperm(sum(pages), generator=gen)).split(pages)
        lists = [
            (o[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n]
            for o, n in zip(order, lengths, strict=True)
        ]
        slots = (sum(pages) + 1) * PAGE
        self.q = torch.randn(len(lengths), Q_HEADS, D, generator=gen)
        self.k_cache, self.v_cache = (
            torch.randn(slots, KV_HEADS, D, generator=gen) for _ in range(2)
        )
        self.indices = torch.cat(lists).to(torch.int32)
        self.indptr = torch.tensor(
            [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32
        )
        self.lists, self.options = lists, Options(D**-0.5, page_size=PAGE)
        self.parts = cpu.plan(
            self.q, self.k_cache, self.v_cache, self.indptr, self.indices, self.options
        )
        self.whole = torch.randn(2, len(lengths), max(lengths), KV_HEADS, D, generator=gen)

    def call(self) -> Tensor:
        from minikv.attention import decode_attention

        got = decode_attention(
            self.q, self.k_cache, self.v_cache, self.indptr, self.indices, backend="torch"
        )
        assert isinstance(got, Tensor)
        return got

    def layer(self) -> Tensor:
        from minikv.attention import cpu

        got = cpu.run(self.parts, self.q, self.k_cache, self.v_cache, self.options)
        assert isinstance(got, Tensor)
        return got

    def gathered(self) -> Tensor:
        outs = []
        for q, slots in zip(self.q, self.lists, strict=True):
            k, v = (cache[slots].transpose(0, 1)[None] for cache in (self.k_cache, self.v_cache))
            outs.append(F.scaled_dot_product_attention(q[None, :, None], k, v, enable_gqa=True))
        return torch.cat(outs).squeeze(2)

    def contiguous(self) -> Tensor:
        k, v = self.whole.transpose(2, 3)
        return F.scaled_dot_product_attention(self.q[:, :, None], k, v, enable_gqa=True)
