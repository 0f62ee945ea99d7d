"""Triton or PyTorch: what a ``backend=`` or ``kernels=`` argument means on a device.

Triton is imported only where its kernels are chosen for tensors on the CPU.
"""

from __future__ import annotations

import torch

from minikv.device import have_triton
from minikv.errors import ArgumentError, StateError


def use_triton(choice: str, device: torch.device | str) -> bool:
    """Resolve a ``backend=`` or ``kernels=`` argument: True for Triton, False for PyTorch.

    Parameters
    ----------
    choice
        ``"auto"`` (Triton on CUDA, PyTorch on the CPU), ``"triton"`` or ``"torch"``.
    device
        Where the tensors live.

    Raises
    ------
    ArgumentError
        For another word.
    StateError
        For ``"triton"`` where Triton is not installed, or on CPU tensors in a process that compiles
        for CUDA.
    """
    if choice not in ("auto", "triton", "torch"):
        raise ArgumentError("backend", choice, "use 'auto', 'triton' or 'torch'")
    on_cuda = torch.device(device).type == "cuda"
    if choice == "torch" or (choice == "auto" and not (on_cuda and have_triton())):
        return False
    if not have_triton():
        raise StateError(
            "backend='triton': Triton is not installed; "
            "use 'torch', or on Linux: pip install triton"
        )
    if not on_cuda:
        from minikv.kernels.triton import INTERPRETED

        if not INTERPRETED:
            raise StateError(
                "backend='triton' on CPU tensors: Triton was imported in compiling mode; "
                "use 'torch', move the tensors to CUDA, "
                "or set TRITON_INTERPRET=1 before starting Python"
            )
    return True
