"""The shortest way from Python to a running kernel, and from host numbers to it: no waiting, few microseconds.

Triton's ordinary launch looks at every argument of every call to choose a binary, which costs more host time than a
small kernel runs. Where the argument types never change, :class:`Binary` compiles once and then only launches.
"""

from __future__ import annotations

from collections import deque
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
        The constexpr parameters, in the kernel's order.
    num_warps, num_stages, launch_pdl
        Options of the compiler; the last lets the kernel start before the one before it has ended (sm90 and newer).

    Notes
    -----
    In Triton's interpreter nothing is compiled and the tensors themselves are passed.
    """

    def __init__(
        self,
        kernel: Any,
        args: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
        launch_pdl: bool = False,
        **constexprs: Any,
    ) -> None:
        self._kernel, self._constexprs = kernel, constexprs
        if INTERPRETED:
            return
        from triton.runtime import driver

        self._device = next(a.device.index for a in args if isinstance(a, torch.Tensor))
        active: Any = driver.active
        self._current_device, self._stream = active.get_current_device, active.get_current_stream
        with torch.cuda.device(self._device):
            options = {"num_warps": num_warps, "num_stages": num_stages, **({"launch_pdl": True} if launch_pdl else {})}
            compiled = kernel.warmup(*args, grid=(1,), **options, **constexprs)
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


def pointer(tensor: torch.Tensor | int) -> Any:
    """What a :class:`Binary` takes for a tensor: its address on CUDA, the tensor itself in the interpreter."""
    return tensor if INTERPRETED or isinstance(tensor, int) else tensor.data_ptr()


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: ``cuda:0``, not ``cuda``."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


class Stage:
    """Vectors that the host fills each step, in one block: one copy to the device, which nobody waits for.

    On CUDA there are two pinned blocks, used in turn, so that the copy of the step before may still be under way. On
    the CPU the block itself is filled.
    """

    def __init__(self, length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        self.block = torch.zeros(length, dtype=dtype, device=device)
        on_cuda = device.type == "cuda"
        self.hosts = [torch.zeros(length, dtype=dtype, pin_memory=True) for _ in range(2)] if on_cuda else []
        self._copied = [torch.cuda.Event() for _ in self.hosts]

    @property
    def host(self) -> torch.Tensor:
        """The block to fill now."""
        return self.hosts[0] if self.hosts else self.block

    def turn(self) -> None:
        """Begin a step: take the block whose copy is older."""
        if self.hosts:
            self.hosts.reverse()
            self._copied.reverse()
            self._copied[0].synchronize()

    def send(self) -> None:
        """Copy the filled block to the device."""
        if self.hosts:
            self.block.copy_(self.hosts[0], non_blocking=True)
            self._copied[0].record()


class Staging:
    """Small host arrays for kernels to read: written in pinned memory, never copied, never waited for.

    A kernel reads pinned host memory through its own address. A few numbers are there sooner than a copy would have
    brought them: a copy is one more command for the host to give and for the stream to go through.

    An arena is used front to back. Then the oldest one is taken if the device is done with it, else a new one: nothing
    that a kernel may still read is ever overwritten, as long as one stream does the work.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        self._capacity, self._used = capacity, 0
        self._arena = _Arena(capacity) if device.type == "cuda" else None
        self._spent: deque[_Arena] = deque()

    def array(self, size: int) -> tuple[np.ndarray, Any]:
        """An int64 array ``[size]`` to fill, and what a :class:`Binary` takes for it."""
        if self._arena is None:
            array = np.empty(size, dtype=np.int64)
            return array, torch.from_numpy(array)
        if self._used + size > self._arena.size:
            self._next_arena(size)
        start, arena = self._used, self._arena
        self._used = start + size
        return arena.host[start : start + size], arena.address + 8 * start

    def _next_arena(self, size: int) -> None:
        if self._arena is not None:
            self._arena.done.record()
            self._spent.append(self._arena)
        fits = self._spent and self._spent[0].size >= size and self._spent[0].done.query()
        self._arena, self._used = self._spent.popleft() if fits else _Arena(max(size, self._capacity)), 0


class _Arena:
    """Pinned memory, and an event after which it may be overwritten."""

    def __init__(self, size: int) -> None:
        self.size, self.done = size, torch.cuda.Event()
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.host, self.address = pinned.numpy(), pinned.data_ptr()
