"""Results on their way back from the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Landing:
    """Two places of pinned memory, used in turn: one is read while the next is written."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._places = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in self._places] if self._on_cuda else []

    def send(self, out: Tensor) -> Callable[[], Tensor]:
        """Send a result on its way; what is launched later does not delay it.

        Returns
        -------
        callable
            Waits for the result and gives it, on the CPU; it is good until the call after the next.
        """
        if not self._on_cuda:
            return lambda: out
        self._places.reverse()
        self._arrived.reverse()
        if self._places[0].numel() < out.nbytes:
            self._places[0] = torch.empty(out.nbytes, dtype=torch.uint8, pin_memory=True)
        place = self._places[0][: out.nbytes].view(out.dtype).view(out.shape)
        place.copy_(out, non_blocking=True)
        arrived = self._arrived[0]
        arrived.record()

        def read() -> Tensor:
            arrived.synchronize()
            return place

        return read
