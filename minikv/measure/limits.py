"""What this machine can do at best: the lines that every measurement is drawn beside.

All are measured once per process, outside CUDA graphs (a captured ``copy_`` becomes a memcpy node,
which is slower). On a GPU the median counts. A CPU is shared with all that runs on it, so there the
best of `ROUNDS` short measurements counts, taken `PAUSE` seconds apart: a limit is what the machine
can do when it is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from minikv.device import default_dtype, memory_facts, pick_device
from minikv.measure.timing import measure

ROUNDS, PAUSE = 8, 0.1


def copy_bandwidth(device: torch.device | str = "auto") -> float:
    """Bytes per second of a large copy on `device`: bytes read plus bytes written."""
    return _copy_bandwidth(str(pick_device(device)))


def read_bandwidth(device: torch.device | str = "auto") -> float:
    """Bytes per second of a large sum: bytes that are only read."""
    return _read_bandwidth(str(pick_device(device)))


def matmul_rate(device: torch.device | str = "auto", dtype: torch.dtype | None = None) -> float:
    """FLOP per second of a large square matrix product; `dtype` defaults to that of
    ``dtype="auto"``."""
    chosen = pick_device(device)
    return _matmul_rate(str(chosen), default_dtype(chosen) if dtype is None else dtype)


def _large(device: str, most: int) -> int:
    """Bytes of a test buffer: far beyond any cache, and at most an eighth of what is free."""
    return min(most, memory_facts(device).free // 8) // 4096 * 4096


def _seconds(fn: Callable[[], Any], device: str) -> float:
    """Seconds of one undisturbed call."""
    if device.startswith("cuda"):
        return measure(fn, device=device, samples=10).median
    best = measure(fn, samples=3).low
    for _ in range(ROUNDS - 1):
        time.sleep(PAUSE)
        best = min(best, measure(fn, warmup=1, samples=3).low)
    return best


@cache
def _copy_bandwidth(device: str) -> float:
    size = _large(device, 1 << 32 if device.startswith("cuda") else 1 << 27)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


@cache
def _read_bandwidth(device: str) -> float:
    size = _large(device, 1 << 32 if device.startswith("cuda") else 1 << 27)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / _seconds(source.sum, device)


@cache
def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    n = 8192 if device.startswith("cuda") else 768
    # Random numbers: a GPU draws less power, and clocks higher, on zeros.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _seconds(lambda: torch.mm(a, b, out=out), device)
