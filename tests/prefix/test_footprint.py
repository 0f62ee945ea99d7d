"""What the tree weighs, and what importing it brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minikv.measure import bench_cache


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_brings_neither_triton_nor_models() -> None:
    absent = [
        "triton",
        "minikv.models",
        "minikv.attention",
        "minikv.engine",
        "minikv.viz",
        "minikv.memory",
    ]
    assert (
        _python(f"import sys, minikv.prefix; print([m for m in {absent!r} if m in sys.modules])")
        == "[]"
    )


@pytest.mark.parametrize("shape", ["flat", "chains"])
def test_a_cached_token_takes_at_most_32_bytes(shape: str) -> None:
    assert bench_cache.bytes_per_token(shape, tokens=400_000) <= 32
