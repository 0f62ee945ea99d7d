"""The shortest way from Python to a running kernel: few microseconds, no waiting.

Triton's ordinary launch looks at every argument of every call to choose a binary, which costs more
host time than a small kernel runs. Where the argument types never change, :class:`Binary` compiles
once and then only launches.
"""

from __future__ import annotations

from typing import Any

import torch

from minikv.kernels.triton import INTERPRETED


class Binary:
    """One compiled kernel for fixed argument types; calling it launches it on the current stream.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function whose constexpr parameters come last.
    args
        Arguments of a first call: their types (and, unless the kernel says ``do_not_specialize``,
        their divisibility by 16) are compiled in. On CUDA later calls may pass pointers as plain
        integers.
    constexprs
        The constexpr parameters, in the kernel's order.
    num_warps, num_stages, launch_pdl
        Options of the compiler; the last lets the kernel start before the one before it has ended
        (sm90 and newer).

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
            options = {
                "num_warps": num_warps,
                "num_stages": num_stages,
                **({"launch_pdl": True} if launch_pdl else {}),
            }
            compiled = kernel.warmup(*args, grid=(1,), **options, **constexprs)
            self._run, self._function, self._metadata = (
                compiled.run,
                compiled.function,
                compiled.packed_metadata,
            )
        self._tail = tuple(constexprs.values())

    def __call__(self, grid_x: int, grid_y: int, *args: Any) -> None:
        if INTERPRETED:
            self._kernel[(grid_x, grid_y)](*args, **self._constexprs)
        elif self._current_device() == self._device:
            stream = self._stream(self._device)
            # No profiler hooks (the three Nones): grid, stream, handles and arguments go straight
            # to the driver.
            self._run(
                grid_x, grid_y, 1, stream, self._function, self._metadata, None, None, None, *args, *self._tail
            )  # fmt: skip
        else:
            with torch.cuda.device(self._device):
                self(grid_x, grid_y, *args)


def pointer(tensor: torch.Tensor | int) -> Any:
    """What a :class:`Binary` takes for a tensor: its address on CUDA, the tensor itself in the
    interpreter."""
    return tensor if INTERPRETED or isinstance(tensor, int) else tensor.data_ptr()


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: ``cuda:0``, not ``cuda``."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == torch.device("cuda")
        else device
    )
