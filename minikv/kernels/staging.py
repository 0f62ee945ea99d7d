"""The way of host numbers to the device: pinned memory that is written in turn, so that nothing
waits for a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Stage:
    """Vectors that the host fills each step, in one block: one copy to the device, and no
    wait for it.

    On CUDA there are two pinned blocks, used in turn, so that the copy of the step before may still
    be under way. On the CPU the block itself is filled.
    """

    def __init__(self, length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        self.block = torch.zeros(length, dtype=dtype, device=device)
        on_cuda = device.type == "cuda"
        self.hosts = (
            [torch.zeros(length, dtype=dtype, pin_memory=True) for _ in range(2)] if on_cuda else []
        )
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


class Landing:
    """Two places of pinned memory for numbers on their way back: one is read while the next is
    written.

    Parameters
    ----------
    device
        Where the numbers come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._places: dict[Any, list[tuple[torch.Tensor, Any]]] = {}  # shape, dtype -> two places

    def send(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor on its way, before anything overwrites it.

        Returns
        -------
        Callable
            Waits for the numbers and returns them, on the CPU; work that is launched later does
            not delay them. Call it before :meth:`send` is called twice more.
        """
        if not self._on_cuda:
            copy = out.clone()
            return lambda: copy
        places = self._places.get((out.shape, out.dtype))
        if places is None:
            with torch.inference_mode(False):  # they outlive the step that first needs them
                places = [(_pinned(out), torch.cuda.Event()) for _ in range(2)]
            self._places[out.shape, out.dtype] = places
        places.reverse()
        place, arrived = places[0]
        place.copy_(out, non_blocking=True)
        arrived.record()

        def read() -> torch.Tensor:
            arrived.synchronize()
            return place

        return read


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small CPU tensor to `device`; to CUDA through pinned memory, so that the host does
    not wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Staging:
    """Small host arrays for kernels to read: written in pinned memory, never copied, never waited
    for.

    A kernel reads pinned host memory through its own address. A few numbers are there sooner than a
    copy would have brought them: a copy is one more command for the host to give and for the stream
    to go through.

    An arena is used front to back. Then the oldest one is taken if the device is done with it, else
    a new one: nothing that a kernel may still read is ever overwritten, as long as one stream does
    the work.
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
        self._arena, self._used = (
            self._spent.popleft() if fits else _Arena(max(size, self._capacity)),
            0,
        )


class _Arena:
    """Pinned memory, and an event after which it may be overwritten."""

    def __init__(self, size: int) -> None:
        self.size, self.done = size, torch.cuda.Event()
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.host, self.address = pinned.numpy(), pinned.data_ptr()
