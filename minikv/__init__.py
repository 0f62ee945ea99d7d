"""minikv: how an LLM server's KV cache works, by running it.

Importing this package is cheap: PyTorch, Triton and the models are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minikv.errors import Error

if TYPE_CHECKING:
    from minikv.device import doctor
    from minikv.engine import LLM, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Error", "SamplingParams", "doctor"]

_HOME = {"LLM": "minikv.engine", "SamplingParams": "minikv.engine", "doctor": "minikv.device"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minikv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
