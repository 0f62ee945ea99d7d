"""The shortest way from Python to a running kernel, and from host numbers to the device: no waiting, few microseconds.

Triton's ordinary launch looks at every argument of every call to choose a binary, which costs more host time than a
small kernel runs. Where the argument types never change, :class:`Binary` compiles once and then only launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minikv._triton import INTERPRETED


class Binary:
    """One compiled kernel for fixed argument types; calling it launches it on the current stream.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function whose constexpr parameters come last.
    args
        Arguments of a first call: their types (and, unless the kernel says ``do_not_specialize``, their divisibility
        by 16) are compiled in. On CUDA later calls may pass pointers as plain integers.
    constexprs
        The constexpr parameters, in the kernel's order; `num_warps` is an option of the compiler.

    Notes
    -----
    In Triton's interpreter nothing is compiled and the tensors themselves are passed.
    """

    def __init__(self, kernel: Any, args: tuple[Any, ...], num_warps: int = 4, **constexprs: Any) -> None:
        self._kernel, self._constexprs = kernel, constexprs
        if INTERPRETED:
            return
        from triton.runtime import driver

        self._device = next(a.device.index for a in args if isinstance(a, torch.Tensor))
        active: Any = driver.active
        self._current_device, self._stream = active.get_current_device, active.get_current_stream
        with torch.cuda.device(self._device):
            compiled = kernel.warmup(*args, grid=(1,), num_warps=num_warps, **constexprs)
            self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._tail = tuple(constexprs.values())

    def __call__(self, grid_x: int, grid_y: int, *args: Any) -> None:
        if INTERPRETED:
            self._kernel[(grid_x, grid_y)](*args, **self._constexprs)
        elif self._current_device() == self._device:
            stream = self._stream(self._device)
            # No profiler hooks (the three Nones): grid, stream, handles and arguments go straight to the driver.
            self._run(
                grid_x, grid_y, 1, stream, self._function, self._metadata, None, None, None, *args, *self._tail
            )  # fmt: skip
        else:
            with torch.cuda.device(self._device):
                self(grid_x, grid_y, *args)


def pointer(tensor: torch.Tensor) -> Any:
    """What a :class:`Binary` takes for a tensor: its address on CUDA, the tensor itself in the interpreter."""
    return tensor if INTERPRETED else tensor.data_ptr()


class Staging:
    """Carries small host arrays to `device`: written in pinned memory, copied once, never waited for.

    Every call of :meth:`array` gets pinned memory that no earlier copy still reads: the arena is used front to back,
    then replaced, and PyTorch's host allocator keeps the old one until its copies are done.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._capacity, self._used = capacity, 0
        self._arena = self._new_arena(capacity if self._pinned else 0)
        self._on_device: dict[int, torch.Tensor] = {}

    def _new_arena(self, size: int) -> torch.Tensor:
        arena = torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
        self._host = arena.numpy()
        return arena

    def array(self, size: int) -> np.ndarray:
        """An int64 array ``[size]`` to fill; the next :meth:`send` carries it."""
        if not self._pinned:
            return np.empty(size, dtype=np.int64)
        if self._used + size > self._arena.numel():
            self._arena, self._used = self._new_arena(max(size, self._capacity)), 0
        return self._host[self._used : self._used + size]

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Copy the array last given out to the device, int64 ``[size]``; later sends may overwrite the result."""
        if not self._pinned:
            return torch.from_numpy(array)
        size = array.size
        target = self._on_device.get(size)
        if target is None:
            if len(self._on_device) >= 1024:
                self._on_device.clear()
            # Work on one stream runs in order, so a buffer is read before the next copy into it starts.
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                target = self._on_device[size] = torch.empty(size, dtype=torch.int64, device=self._device)
        target.copy_(self._arena[self._used : self._used + size], non_blocking=True)
        self._used += size
        return target
