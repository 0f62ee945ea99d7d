"""Writing K and V into the pool, as a fraction of what a plain copy of the same bytes reaches."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minikv.device import default_dtype
from minikv.measure.limits import copy_bandwidth
from minikv.measure.table import table
from minikv.measure.timing import Timing, measure, measure_graph
from minikv.memory import KVPool, MLAPool

TOKENS = 8192
SHAPES = ((8, 128), (32, 128), (3, 64))  # KV heads, head size
L2_BYTES = 64 << 20


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Measure ``set_kv`` on views of a fused projection, slots in random pages of 16.

    Returns
    -------
    dict
        ``rows``: microseconds of one layer; `of copy` is bytes read and written over this machine's
        copy bandwidth; `peer` is PyTorch's indexed store, once for K and once for V.
    """
    on_cuda = torch.device(device).type == "cuda"
    tokens = TOKENS if on_cuda else 512
    limit = copy_bandwidth(device)
    dtype = default_dtype(device)
    cases: list[tuple[str, torch.dtype, torch.dtype, tuple[int, int], float]] = [
        ("set_kv", dtype, dtype, shape, 1.0) for shape in SHAPES[: 1 if quick else None]
    ]
    cases.append(("set_kv", dtype, torch.float8_e4m3fn, SHAPES[0], 0.5))
    cases.append(("mla set_kv", dtype, dtype, (1, 576), 1.0))
    if on_cuda and torch.cuda.get_device_capability(device) < (8, 9):
        cases = [case for case in cases if case[2] != torch.float8_e4m3fn]
    rows = [_row(*case, tokens, device, limit, quick) for case in cases]
    print(
        f"copy bandwidth {limit / 1e9:,.0f} GB/s, read and written"
        + ("" if on_cuda else "; CPU row: PyTorch")
    )
    print(table(rows))
    return {"rows": rows, "copy_bandwidth": limit}


def _row(
    name: str,
    given: torch.dtype,
    stored: torch.dtype,
    shape: tuple[int, int],
    scale: float,
    tokens: int,
    device: Any,
    limit: float,
    quick: bool,
) -> dict[str, Any]:
    heads, dim = shape
    mla = name.startswith("mla")
    parts = 1 if mla else 2
    moved = tokens * heads * dim * parts * (given.itemsize + stored.itemsize)
    on_cuda = torch.device(device).type == "cuda"
    sets = max(2, 2 * L2_BYTES // moved + 1) if on_cuda else 2  # more sets than the L2 cache holds
    size = 4 * tokens
    if mla:
        pool: Any = MLAPool(size, 16, sets, 512, dim - 512, stored, device)
    else:
        pool = KVPool(size, 16, sets, heads, dim, stored, device)
    pages = torch.randperm(size // 16, device=device)[: tokens // 16] + 1
    slots = (pages[:, None] * 16 + torch.arange(16, device=device)).flatten()
    calls: list[Callable[[], Any]] = []
    peers: list[Callable[[], Any]] = []
    for layer in range(sets):
        fused = torch.randn(tokens, 3 * heads, dim, device=device).to(given)
        k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
        store = partial(pool.set_kv, layer, slots, k, v, scale, scale)
        peer = _peer(pool, layer, slots, (k,) if mla else (k, v), scale)
        calls.append(store)
        peers.append(peer)
        store()
        got = pool.k(layer)[slots].clone()
        peer()  # the two agree before either is timed
        torch.testing.assert_close(got.float(), pool.k(layer)[slots].float(), rtol=0, atol=0)
    time, peer = (_time(each, device, quick) for each in (calls, peers))
    return {
        "call": name,
        "heads": heads,
        "size": dim,
        "from": str(given).removeprefix("torch."),
        "to": str(stored).removeprefix("torch."),
        "tokens": tokens,
        "device": torch.device(device).type,
        "us": time.us,
        "spread": time.spread,
        "GB/s": moved / time.median / 1e9,
        "of copy": moved / time.median / limit,
        "peer us": peer.us,
        "peer / ours": peer.us / time.us,
    }


def _peer(
    pool: Any, layer: int, slots: torch.Tensor, rows: tuple[torch.Tensor, ...], scale: float
) -> Any:
    caches = (pool.k(layer), pool.v(layer))[: len(rows)]

    def store() -> None:
        for cache, row in zip(caches, rows, strict=True):
            value = (row if scale == 1.0 else row.float() / scale).to(cache.dtype)
            if cache.dtype.itemsize == 1:
                cache, value = cache.view(torch.uint8), value.view(torch.uint8)
            cache.index_copy_(0, slots, value)

    return store


def _time(calls: list[Callable[[], Any]], device: Any, quick: bool) -> Timing:
    samples = 10 if quick else 30
    if torch.device(device).type == "cuda":
        return measure_graph(calls * (2 if quick else 5), samples=samples)
    return measure(calls[0], samples=samples)
