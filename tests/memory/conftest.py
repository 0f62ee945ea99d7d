"""Allocators in every implementation that this process can run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from minikv.kernels.triton import HAVE_TRITON
from minikv.memory import PagedAllocator

os.environ.setdefault("OMP_NUM_THREADS", "1")
CUDA = torch.cuda.is_available()
KINDS = [
    ("torch", "cpu"),
    pytest.param(
        ("triton", "cpu"),
        marks=pytest.mark.skipif(CUDA or not HAVE_TRITON, reason="no interpreter in this process"),
    ),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def make(request: pytest.FixtureRequest) -> Callable[..., PagedAllocator]:
    """``make(size, page_size, **options)``: PyTorch and Triton, interpreted here and compiled in
    ``-m gpu`` runs."""
    kernels, device = request.param
    return lambda size, page_size, **options: PagedAllocator(
        size, page_size, device=device, kernels=kernels, **options
    )
