"""What the slots stand for: keys and values of every layer, written by one kernel.

`KVPool` serves multi-head and grouped attention, `MLAPool` the latent rows of multi-head latent
attention (DeepSeek-V2, 2024), whose V is the first part of the row that serves as K.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from minikv.device import capability_of, memory_facts, pick_device
from minikv.errors import ArgumentError
from minikv.kernels.choice import use_triton
from minikv.memory.store import FP8, store_torch, store_triton
from minikv.numbers import INTEGERS, real, whole

DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
FP32 = torch.finfo(torch.float32)
# Share of the memory that is free now: others may use this GPU, and the model needs room, too.
DEFAULT_SHARE = 0.25


def plan_size(
    memory: int | None = None,
    *,
    bytes_per_token: int,
    page_size: int,
    device: torch.device | str = "cpu",
) -> int:
    """The `size` (tokens, whole pages) of the largest pool that fits into `memory` bytes, page 0
    included.

    Parameters
    ----------
    memory
        Bytes; None takes a quarter (``DEFAULT_SHARE``) of what is free on `device` now, never all
        that is left.
    bytes_per_token
        As a pool's ``bytes_per_token``: all layers together.
    page_size
        Tokens per page.
    device
        Whose free memory None means.

    Raises
    ------
    ArgumentError
        When not even one page besides page 0 fits, or a number is none to plan with.

    Examples
    --------
    >>> plan_size(1 << 20, bytes_per_token=1024, page_size=16)
    1008
    """
    if memory is None:
        memory = int(memory_facts(pick_device(device)).free * DEFAULT_SHARE)
    page_bytes = whole("bytes_per_token", bytes_per_token, 1) * whole("page_size", page_size, 1)
    remedy = "must be a finite number of bytes, or None for a share of what is free"
    pages = int(real("memory", memory, 0, sys.float_info.max, remedy)) // page_bytes - 1
    if pages < 1:
        raise ArgumentError(
            "memory", memory, f"bytes hold no page besides page 0; give at least {2 * page_bytes}"
        )
    return pages * page_size


class _Pool:
    """Layers of rows, one row per slot; page 0 comes on top of `size`."""

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        row: tuple[int, int],
        parts: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: str,
    ) -> None:
        page_size, num_layers = whole("page_size", page_size, 1), whole("num_layers", num_layers, 1)
        size = whole("size", size, page_size)
        row = whole("kv_heads", row[0], 1), whole("head_dim", row[1], 1)
        self.device = pick_device(device)
        if dtype not in DTYPES:
            remedy = "a pool stores float32, float16, bfloat16 or float8_e4m3fn"
            raise ArgumentError("dtype", dtype, remedy)
        if dtype == FP8 and capability_of(self.device) < (8, 9):
            name = torch.cuda.get_device_name(self.device)
            remedy = f"{name} has no fp8 (sm89 and newer have); use bfloat16 or float16"
            raise ArgumentError("dtype", dtype, remedy)
        self.page_size = page_size
        self.num_layers = num_layers
        self.dtype = dtype
        self.num_slots = (size // page_size + 1) * page_size
        self._triton = use_triton(kernels, self.device)
        rows = torch.zeros(parts, num_layers, self.num_slots, *row, dtype=dtype, device=self.device)
        self._parts = [list(part) for part in rows]  # [part][layer] -> [slots, heads, columns]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(layer[0].nbytes for part in self._parts for layer in part)

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, ``[slots, heads, columns]`` (a view)."""
        return self._parts[0][self._known(layer)]

    def _known(self, layer: int) -> int:
        """`layer`, when the pool has it."""
        if type(layer) is int and 0 <= layer < self.num_layers:
            return layer
        return whole("layer", layer, 0, self.num_layers - 1, f"must be 0 to {self.num_layers - 1}")

    def _store(
        self, layer: int, slots: Tensor, rows: dict[str, Tensor], scales: dict[str, float]
    ) -> None:
        for name, tensor in {"slots": slots, **rows}.items():
            if not isinstance(tensor, Tensor) or tensor.device.type != self.device.type:
                where = getattr(tensor, "device", tensor)
                remedy = f"must be a tensor on the pool's device, {self.device}"
                raise ArgumentError(name, where, remedy)
        layer = self._known(layer)
        if slots.ndim != 1 or slots.dtype not in INTEGERS:
            raise ArgumentError("slots", slots, "must be int64 or int32 [n]")
        n = slots.numel()
        want = (n, *self._parts[0][layer].shape[1:])
        for name, tensor in rows.items():
            if tensor.shape != want:
                remedy = f"must be {want}: one row per slot; give padding slot 0"
                raise ArgumentError(name, tuple(tensor.shape), remedy)
            if tensor.dtype not in DTYPES:
                remedy = "must be a floating type that a pool stores"
                raise ArgumentError(name, tensor.dtype, remedy)
        remedy = "must be a positive number that float32 holds; 1.0 stores values as they are"
        divisors = [real(name, x, FP32.tiny, FP32.max, remedy) for name, x in scales.items()]
        if n == 0:
            return
        if self.device.type == "cpu":
            wrong = slots[(slots < 0) | (slots >= self.num_slots)]
            if len(wrong):
                remedy = f"is outside the pool's {self.num_slots} slots"
                raise ArgumentError("slots", int(wrong[0]), remedy)
            mixed = self.dtype == FP8 and any(x.dtype != FP8 for x in rows.values())
            if self._triton and mixed:
                remedy = "Triton's interpreter rounds to fp8 wrongly; use kernels='torch'"
                raise ArgumentError("dtype", FP8, remedy)
        store = store_triton if self._triton else store_torch
        caches = [part[layer] for part in self._parts]
        store(caches, slots, [tensor.detach() for tensor in rows.values()], divisors)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.k(0).shape[1:]))
        dtype = str(self.dtype).removeprefix("torch.")
        mib = self.num_slots * self.bytes_per_token / 2**20
        return (
            f"{type(self).__name__}({self.num_slots} slots of {shape} in {self.num_layers} layers, "
            f"{dtype} on {self.device}: {mib:.1f} MiB, {self.bytes_per_token} bytes per token)"
        )


class KVPool(_Pool):
    """K and V of every slot in every layer.

    Parameters
    ----------
    size, page_size
        As for :class:`PagedAllocator`; the pool has one page more, page 0, which padding writes to.
    num_layers, kv_heads, head_dim
        Shape of the model.
    dtype
        Storage: float32, float16, bfloat16, or float8_e4m3fn (on CUDA from sm89 on).
    device
        Where the pool lives.
    kernels
        ``"triton"``, ``"torch"`` or ``"auto"``: Triton on CUDA, PyTorch on the CPU.

    Examples
    --------
    >>> import torch
    >>> p = KVPool(8, 4, num_layers=1, kv_heads=2, head_dim=2, dtype=torch.float32, device="cpu")
    >>> p.set_kv(0, torch.tensor([5]), torch.ones(1, 2, 2), torch.full((1, 2, 2), 3.0))
    >>> p.k(0)[5].tolist(), p.v(0)[5].tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [[3.0, 3.0], [3.0, 3.0]])
    >>> p
    KVPool(12 slots of 2×2 in 1 layers, float32 on cpu: 0.0 MiB, 32 bytes per token)
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: str = "auto",
    ) -> None:
        super().__init__(
            size, page_size, num_layers, (kv_heads, head_dim), 2, dtype, device, kernels
        )

    def v(self, layer: int) -> Tensor:
        """Values of a layer, ``[slots, kv_heads, head_dim]`` (a view)."""
        return self._parts[1][self._known(layer)]

    def set_kv(
        self,
        layer: int,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write K and V of `n` tokens in one launch; stored = value / scale.

        Parameters
        ----------
        layer
            Which layer.
        slots
            int32 or int64 ``[n]``; slot 0 for padding, which may repeat.
        k, v
            ``[n, kv_heads, head_dim]``, any floating type and strides: views of a fused projection
            are not copied.
        k_scale, v_scale
            What attention multiplies by when it reads. fp8 saturates at ±448; NaN stays NaN.

        Raises
        ------
        ArgumentError
            For lengths that differ, other shapes or devices, and on the CPU for a slot outside the
            pool.
        """
        self._store(layer, slots, {"k": k, "v": v}, {"k_scale": k_scale, "v_scale": v_scale})


class MLAPool(_Pool):
    """One latent row of ``kv_lora_rank + rope_dim`` columns per slot and layer; V is the view of
    its first columns.

    Parameters are those of :class:`KVPool`, with the row's two widths in place of heads.

    Examples
    --------
    >>> import torch
    >>> m = MLAPool(8, 4, 1, kv_lora_rank=4, rope_dim=2, dtype=torch.float32, device="cpu")
    >>> m.k(0).shape, m.v(0).shape
    (torch.Size([12, 1, 6]), torch.Size([12, 1, 4]))
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: str = "auto",
    ) -> None:
        columns = whole("kv_lora_rank", kv_lora_rank, 1) + whole("rope_dim", rope_dim, 0)
        super().__init__(size, page_size, num_layers, (1, columns), 1, dtype, device, kernels)
        self.kv_lora_rank = kv_lora_rank

    def v(self, layer: int) -> Tensor:
        """Values of a layer, ``[slots, 1, kv_lora_rank]``: a view of the rows."""
        return self.k(layer)[..., : self.kv_lora_rank]

    def set_kv(
        self,
        layer: int,
        slots: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the rows `k` ``[n, 1, kv_lora_rank + rope_dim]``, as :meth:`KVPool.set_kv`; `v` is
        part of them.

        `v` and `v_scale` are accepted so that both pools are called alike; one row has one scale,
        so they must agree.
        """
        if v_scale != k_scale:
            raise ArgumentError(
                "v_scale", v_scale, f"must equal k_scale, {k_scale}: V is part of the row"
            )
        self._store(layer, slots, {"k": k}, {"k_scale": k_scale})
