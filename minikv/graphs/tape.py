"""Recording on the CPU: what a CUDA graph does, with PyTorch operations in place of kernels.

A tape shows (and tests) on any machine what a graph is: the step's Python runs once; afterwards the
same operations read and write the same memory, whatever that memory holds by then. It spares
nothing, since each operation is launched again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv.errors import StateError


class Tape(TorchDispatchMode):
    """The operations of one recorded step."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        by_value = (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        )
        if by_value and (func is not torch.ops.aten.index.Tensor or _has_mask(args[1])):
            raise StateError(
                f"{func}: reads a tensor's values on the host, which a recorded step cannot do "
                "again"
            )
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    def replay(self) -> None:
        """Do the same operations again, into the same memory."""
        for func, args, kwargs, outs in self.operations:
            for old, new in zip(outs, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _has_mask(indices: list) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class TapeRecorder:
    """What :class:`~minikv.graphs.cuda.CudaRecorder` is on CUDA."""

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Run without recording."""
        for _ in range(times):
            run()

    def record(self, run: Callable[[], Any]) -> tuple[Tape, Any]:
        """Run once, recording; the tape and the step's output."""
        with Tape() as tape:
            out = run()
        return tape, out

    def held(self) -> int:
        """Bytes that recordings hold: not known for tapes."""
        return 0

    def give_back(self) -> None:
        """Nothing: memory is returned when tapes are dropped."""
