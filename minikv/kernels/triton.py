"""The one place that imports Triton.

Triton reads ``TRITON_INTERPRET`` once, when it is first imported, and cannot switch later. So the
choice is made here: with a CUDA device kernels are compiled; without one they run in Triton's
interpreter (slow, but the same kernel code); without Triton (macOS, Windows) a stub stands in:
kernel files still import, and say what is missing when launched.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from minikv.errors import StateError

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class _MissingKernel:
    """Takes the place of a compiled kernel where Triton is not installed."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: Any) -> Any:
        raise StateError(
            f"kernel {self.__name__}: Triton is not installed on this machine; "
            "use backend='torch' (kernels='torch'), or install triton on Linux (pip install triton)"
        )


triton: Any  # launches take options that no signature shows
if TYPE_CHECKING:
    import triton.language as tl

    HAVE_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAVE_TRITON = True
    except ImportError:

        def _jit(fn: Any = None, **_: Any) -> Any:
            return _MissingKernel(fn) if fn is not None else _MissingKernel

        triton = SimpleNamespace(
            jit=_jit,
            cdiv=lambda a, b: -(-a // b),
            next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
        )
        tl = SimpleNamespace(constexpr=object, constexpr_function=lambda fn: fn)
        HAVE_TRITON = False

INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
