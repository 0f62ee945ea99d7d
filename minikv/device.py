"""Which device and tier this process runs on, synchronising, memory facts, and ``doctor()``.

Three tiers, best first: ``cuda`` (compiled Triton kernels), ``interpreter`` (Triton's interpreter
on the CPU) and ``torch`` (no Triton at all). On a CPU the fast path is PyTorch; interpreted kernels
run only where asked by name.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minikv.errors import ArgumentError

if TYPE_CHECKING:
    from minikv.report import Report


def tier(device: torch.device | str | None = None) -> str:
    """The tier that kernels on `device` (default: this machine's best device) run in.

    Returns
    -------
    str
        ``"cuda"``, ``"interpreter"`` (Triton installed, no GPU) or ``"torch"`` (no Triton).
    """
    if pick_device("auto" if device is None else device).type == "cuda":
        return "cuda" if have_triton() else "torch"
    return "interpreter" if have_triton() else "torch"


def have_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def pick_device(device: torch.device | str = "auto") -> torch.device:
    """Turn ``"auto"``, a name or a device into a usable device.

    Raises
    ------
    ArgumentError
        For a name PyTorch does not know, or ``"cuda"`` on a machine without a CUDA device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ArgumentError("device", device, "use 'auto', 'cpu' or 'cuda'") from e
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "device", device, "this machine has no usable CUDA device; use 'cpu' or 'auto'"
        )
    if chosen.type not in ("cpu", "cuda"):
        raise ArgumentError("device", device, "minikv runs on 'cpu' and 'cuda'")
    return chosen


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; the interpreter on the CPU takes the H200's tiles."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished everything queued on it (a no-op on the CPU)."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class MemoryFacts:
    """Free and total memory of a device, in bytes."""

    free: int
    total: int


def memory_facts(device: torch.device | str) -> MemoryFacts:
    """Free and total bytes of a CUDA device, or of this machine's main memory for the CPU."""
    if torch.device(device).type == "cuda":
        return MemoryFacts(*torch.cuda.mem_get_info(device))
    import psutil

    memory = psutil.virtual_memory()
    return MemoryFacts(memory.available, memory.total)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype that ``dtype="auto"`` means: bf16 on sm80 and newer, fp16 on older GPUs, fp32 on
    the CPU."""
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def doctor(file: object = None) -> Report:
    """Print what this machine offers minikv, and the one command that repairs each lack.

    Returns
    -------
    Report
        The same facts as fields; see :class:`minikv.report.Report`.
    """
    from minikv.report import examine

    report = examine()
    print(report, file=file)  # type: ignore[arg-type]
    return report
