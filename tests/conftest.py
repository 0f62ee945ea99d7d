"""What all rooms' tests share: the devices that kernels are tested on, and repeatable random
numbers."""

from __future__ import annotations

import os

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # as many processes as cores: threads on top would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from minikv.errors import StateError
from minikv.kernels.triton import HAVE_TRITON
from minikv.models.files.download import model_path

CUDA = torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Kernels run interpreted on ``cpu`` and, in ``-m gpu`` runs, compiled on ``cuda``."""
    if request.param == "cpu" and (CUDA or not HAVE_TRITON):
        pytest.skip(
            "kernels are compiled for CUDA in this process" if CUDA else "Triton is not installed"
        )
    return request.param


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2's file; without it (no network, nothing cached) tests that need it say so and
    skip."""
    try:
        return model_path(progress=False)
    except StateError as e:
        pytest.skip(f"the model file is absent and cannot be fetched: {e}")


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
