"""The page allocator: time on the device and on the host, beside PyTorch's way and a Python
list."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from minikv.device import have_triton
from minikv.kernels.triton import tl, triton
from minikv.measure.table import table
from minikv.measure.timing import measure, measure_graph, measure_host
from minikv.memory import PagedAllocator

PAGE = 16
EXTENDS = (
    (1, 0, 512),
    (1, 0, 8192),
    (8, 100, 512),
    (256, 0, 32),
    (256, 1000, 32),
)  # requests, prefix, new tokens each
DECODES = ((1, 100), (32, 100), (256, 1000))  # requests, length


@triton.jit
def _empty_kernel(nothing_ptr, BLOCK: tl.constexpr):
    """What any kernel costs in a graph."""


class PlainList:
    """The same pages from a Python list, slots put together by a loop: how one would write it
    first."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size, self.fresh = page_size, list(range(1, pages + 1))

    def alloc_extend(self, prefix: list[int], seq: list[int], last: list[int]) -> torch.Tensor:
        free, slots, size = iter(self.fresh), [], self.page_size
        for p, n, slot in zip(prefix, seq, last, strict=True):
            for position in range(p, n):
                slot = next(free) * size if position % size == 0 else slot + 1
                slots.append(slot)
        return torch.tensor(slots)


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Measure ``alloc_extend`` and ``alloc_decode``; a row on the CPU says so and compares only
    with itself.

    Returns
    -------
    dict
        ``rows``: microseconds; `kernel` is the call in a graph, where it is one launch that reads
        the lengths from pinned memory; `host` is the time until the call returns; `empty` is an
        empty kernel in a graph, the limit.
    """
    on_cuda = torch.device(device).type == "cuda"
    rows = []
    for requests, prefix, new in EXTENDS[:2] + EXTENDS[3:4] if quick else EXTENDS:
        rows.append(_row("extend", requests, prefix, new, device, quick))
    for requests, length in DECODES[::2] if quick else DECODES:
        rows.append(_row("decode", requests, length, 1, device, quick))
    empty = None
    if on_cuda:
        nothing = torch.empty(1, device=device)
        empty = round(measure_graph([lambda: _empty_kernel[(1,)](nothing, BLOCK=32)] * 50).us, 3)
    print(
        f"page size {PAGE}, microseconds, medians"
        + ("" if on_cuda else "; CPU row: PyTorch operations, no GPU")
    )
    print(table(rows))
    print(
        f"limit: an empty kernel in a graph takes {empty} us"
        if on_cuda
        else "limit: none on the CPU"
    )
    return {"rows": rows, "page_size": PAGE, "empty_kernel_us": empty}


def _row(
    call: str, requests: int, prefix: int, new: int, device: Any, quick: bool
) -> dict[str, Any]:
    calls = 20 if quick else 100
    need = requests * (-(-(prefix + new) // PAGE) + 1)
    prefixes = torch.full((requests,), prefix)
    seq = prefixes + new
    timing: dict[str, dict[str, float]] = {}
    for kind in _kinds(device):
        a = PagedAllocator(need * PAGE * 2, PAGE, device=device, kernels=kind)
        slots = a.alloc(-(-prefix // PAGE) * PAGE * requests)
        assert slots is not None
        at = torch.arange(requests, device=device) * (-(-prefix // PAGE) * PAGE) + prefix - 1
        last = slots[at] if prefix else torch.full((requests,), -1, device=device)
        step = _step(a, call, prefixes, seq, last, requests * new)
        timing[kind] = {}
        if torch.device(device).type == "cuda":
            # First the graph, while all its lengths still fit into the allocator's first arena of
            # pinned memory.
            timing[kind]["graph"] = measure_graph([step] * 50).us
        timing[kind]["host"] = measure_host(step, device=device, samples=calls).us
    ours = timing["triton" if "triton" in timing else "torch"]
    plain = PlainList(2 * need, PAGE)
    lists = prefixes.tolist(), seq.tolist(), [prefix % PAGE - 1 + PAGE] * requests
    by_list = measure(lambda: plain.alloc_extend(*lists), samples=10).us
    return {
        "call": f"alloc_{call}",
        "requests": requests,
        "prefix": prefix,
        "new tokens": requests * new,
        "device": torch.device(device).type,
        "kernel": ours.get("graph"),
        "host": ours["host"],
        "torch device": timing["torch"].get("graph"),
        "torch host": timing["torch"]["host"],
        "list host": by_list,
        "list / ours": by_list / ours["host"],
    }


def _kinds(device: Any) -> list[str]:
    return (
        ["triton", "torch"] if torch.device(device).type == "cuda" and have_triton() else ["torch"]
    )


def _step(
    a: PagedAllocator, call: str, prefix: Any, seq: Any, last: Any, total: int
) -> Callable[[], object]:
    """The public call on a pool that is as full each time: what was taken is given back without any
    work."""
    free, head = a._free, a._free.head

    def step() -> None:
        free.head = head
        slots = (
            a.alloc_extend(prefix, seq, last, total)
            if call == "extend"
            else a.alloc_decode(seq, last)
        )
        assert slots is not None

    return step
