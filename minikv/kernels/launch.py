"""The shortest way from Python to a running kernel: few microseconds, no waiting.

Triton's ordinary launch looks at every argument of every call to choose a binary, which costs more
host time than a small kernel runs. :func:`launch` looks at what a binary depends on only, and keeps
every compiled kernel of the package in one table. A caller whose argument types never change names
its binary itself (:func:`compiled`), which spares even that look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minikv.device import capability_of
from minikv.errors import ArgumentError
from minikv.kernels.triton import INTERPRETED

_binaries: dict[tuple[Any, ...], Binary] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    dependent: bool | None = None,
    **constexprs: Any,
) -> None:
    """Run a kernel on the current stream; compile it when these types and options first come.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function whose constexpr parameters come last.
    grid
        Programs, in one to three dimensions.
    args
        Its arguments but the constexprs: tensors, numbers, tensor descriptors or None. As in
        Triton, whether an integer is 1 and whether an integer or address is divisible by 16 is
        compiled in, unless the kernel says ``do_not_specialize``.
    num_warps, num_stages
        Options of the compiler.
    dependent
        Whether the kernel may start before the kernel before it has ended (programmatic dependent
        launch, sm90 and newer). The kernel learns what was chosen by its constexpr ``DEPENDENT``.
        None: it has no such parameter.
    constexprs
        The constexpr parameters, in the kernel's order.

    Raises
    ------
    ArgumentError
        For bfloat16 tensors where kernels are interpreted, which would compute nonsense.
    """
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    if dependent is not None:
        on_hopper = tensor.is_cuda and capability_of(tensor.device) >= (9, 0)
        dependent = constexprs["DEPENDENT"] = dependent and on_hopper
    if INTERPRETED:
        # The interpreter keeps bf16 as raw 16-bit integers: a dot would multiply bit patterns.
        for name, arg in zip(kernel.arg_names, args, strict=False):
            if getattr(arg, "dtype", None) == torch.bfloat16:
                remedy = (
                    "Triton's interpreter computes bfloat16 wrongly; use float32 or float16, or "
                    "backend='torch'"
                )
                raise ArgumentError(name.removesuffix("_ptr"), arg.dtype, remedy)
        kernel[grid](*args, **constexprs)
        return
    kinds = tuple(map(_kind, args, _unspecialized(kernel)))
    key = (id(kernel), tensor.device, num_warps, num_stages, kinds, *constexprs.values())
    binary = _binaries.get(key)
    if binary is None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if dependent:
            options["launch_pdl"] = True
        binary = _binaries[key] = Binary(kernel, args, options, constexprs)
    binary(grid, *map(pointer, args))


def compiled(
    kernel: Any, types: Any, example: Callable[[], tuple[Any, ...]], **constexprs: Any
) -> Binary:
    """The binary of a kernel into which nothing but `types` and the constexprs are compiled.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function that specialises none of its arguments.
    types
        Whatever tells the argument types of this caller from others; hashable.
    example
        Gives arguments of these types when the binary is first needed.
    """
    key = (id(kernel), types, *constexprs.values())
    binary = _binaries.get(key)
    if binary is None:
        binary = _binaries[key] = Binary(kernel, example(), {"num_warps": 4}, constexprs)
    return binary


_plain: dict[int, tuple[bool, ...]] = {}  # kernel -> for each argument, whether its value is left


def _unspecialized(kernel: Any) -> tuple[bool, ...]:
    flags = _plain.get(id(kernel))
    if flags is None:
        flags = _plain[id(kernel)] = tuple(p.do_not_specialize for p in kernel.params)
    return flags


def _kind(arg: Any, plain: bool) -> Any:
    """What a binary depends on in one argument."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, plain or arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        wide = not -(2**31) <= arg < 2**31
        return wide if plain else (type(arg), wide, arg == 1, arg % 16 == 0)
    if hasattr(arg, "block_shape"):  # a tensor descriptor
        return arg.base.dtype, tuple(arg.block_shape)
    return type(arg)


class Binary:
    """One compiled kernel for fixed argument types; calling it launches it on the current stream.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function whose constexpr parameters come last.
    args
        Arguments of a first call, whose types are compiled in. On CUDA later calls may pass
        addresses in place of tensors.
    options
        Of Triton's compiler: ``num_warps``, ``num_stages``, ``launch_pdl``.
    constexprs
        The constexpr parameters, in the kernel's order.

    Notes
    -----
    In Triton's interpreter nothing is compiled and the tensors themselves are passed.
    """

    def __init__(
        self,
        kernel: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        constexprs: dict[str, Any],
    ) -> None:
        self._kernel, self._constexprs = kernel, constexprs
        if INTERPRETED:
            return
        from triton.runtime import driver

        self._device = next(a.device.index for a in args if isinstance(a, torch.Tensor))
        active: Any = driver.active
        self._current_device, self._stream = active.get_current_device, active.get_current_stream
        with torch.cuda.device(self._device):
            made = kernel.warmup(*args, grid=(1,), **options, **constexprs)
            self._run, self._function = made.run, made.function
            self._metadata = made.packed_metadata
        self._tail = tuple(constexprs.values())

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        if INTERPRETED:
            self._kernel[grid](*args, **self._constexprs)
        elif self._current_device() == self._device:
            x, y, z = (*grid, 1, 1)[:3]
            stream = self._stream(self._device)
            # No profiler hooks (the three Nones): grid, stream, handles and arguments go straight
            # to the driver.
            handles = stream, self._function, self._metadata, None, None, None
            self._run(x, y, z, *handles, *args, *self._tail)
        else:
            with torch.cuda.device(self._device):
                self(grid, *args)


def pointer(arg: Any) -> Any:
    """What a :class:`Binary` takes for an argument: the address of a tensor on CUDA, in the
    interpreter the tensor itself, and whatever is no tensor as it is."""
    is_tensor = isinstance(arg, torch.Tensor)
    return arg.data_ptr() if is_tensor and not INTERPRETED else arg
