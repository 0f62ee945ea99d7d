"""The ways of running attention that its tests walk through."""

from __future__ import annotations

import pytest
import torch
from cases import Way

from minikv.kernels.triton import HAVE_TRITON

CUDA = torch.cuda.is_available()


WAYS = [Way("torch", "cpu"), Way("triton", "cpu"), Way("torch", "cuda"), Way("triton", "cuda")]


@pytest.fixture(
    params=[
        pytest.param(w, id="-".join(w), marks=[pytest.mark.gpu] if w.device == "cuda" else [])
        for w in WAYS
    ]
)
def way(request: pytest.FixtureRequest) -> Way:
    """PyTorch and Triton (interpreted) on the CPU; both on CUDA in ``-m gpu`` runs."""
    if request.param == ("triton", "cpu") and (CUDA or not HAVE_TRITON):
        pytest.skip(
            "kernels are compiled for CUDA in this process" if CUDA else "Triton is not installed"
        )
    return request.param
