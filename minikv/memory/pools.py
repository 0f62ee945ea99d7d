"""What the slots stand for: keys and values of every layer, written by one kernel.

`KVPool` serves multi-head and grouped attention, `MLAPool` the latent rows of multi-head latent
attention (DeepSeek-V2, 2024), whose V is the first part of the row that serves as K.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from minikv.device import memory_facts, pick_device, refuse_interpreted_bf16
from minikv.errors import ArgumentError
from minikv.kernels.choice import use_triton
from minikv.memory.pool_kernels import FP8, store_torch, store_triton
from minikv.numbers import whole

DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
FP32 = torch.finfo(torch.float32)
DEFAULT_SHARE = (
    0.25  # of the memory that is free now: others may use this GPU, and the model needs room, too
)


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
    if not isinstance(memory, Real) or not math.isfinite(memory):
        raise ArgumentError(
            "memory",
            memory,
            "must be a finite number of bytes, or None for a share of what is free",
        )
    pages = int(memory) // page_bytes - 1
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
            raise ArgumentError(
                "dtype", dtype, "a pool stores float32, float16, bfloat16 or float8_e4m3fn"
            )
        if (
            dtype == FP8
            and self.device.type == "cuda"
            and torch.cuda.get_device_capability(self.device) < (8, 9)
        ):
            name = torch.cuda.get_device_name(self.device)
            raise ArgumentError(
                "dtype", dtype, f"{name} has no fp8 (sm89 and newer have); use bfloat16 or float16"
            )
        self.page_size, self.num_layers, self.dtype = page_size, num_layers, dtype
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
        return self._parts[0][layer]

    def _store(
        self, layer: int, slots: Tensor, rows: dict[str, Tensor], scales: dict[str, float]
    ) -> None:
        for name, tensor in {"slots": slots, **rows}.items():
            if not isinstance(tensor, Tensor) or tensor.device.type != self.device.type:
                where = getattr(tensor, "device", tensor)
                raise ArgumentError(
                    name, where, f"must be a tensor on the pool's device, {self.device}"
                )
        n, rows = slots.numel(), {name: tensor.detach() for name, tensor in rows.items()}
        layer = layer if type(layer) is int else whole("layer", layer)
        if not 0 <= layer < len(self._parts[0]):
            raise ArgumentError("layer", layer, f"must be 0 to {len(self._parts[0]) - 1}")
        if slots.ndim != 1 or slots.dtype not in (torch.int64, torch.int32):
            raise ArgumentError("slots", slots, "must be int64 or int32 [n]")
        for name, tensor in rows.items():
            want = (n, *self._parts[0][layer].shape[1:])
            if tensor.shape != want:
                raise ArgumentError(
                    name,
                    tuple(tensor.shape),
                    f"must be {want}: one row per slot; give padding slot 0",
                )
            if tensor.dtype not in DTYPES:
                raise ArgumentError(
                    name, tensor.dtype, "must be a floating type that a pool stores"
                )
        for name, scale in scales.items():
            if not isinstance(scale, Real) or not FP32.tiny <= scale <= FP32.max:
                remedy = (
                    "must be a positive number that float32 holds; 1.0 stores values as they are"
                )
                raise ArgumentError(name, scale, remedy)
        if n == 0:
            return
        if (
            self.device.type == "cpu"
            and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_slots
        ):
            wrong = slots[(slots < 0) | (slots >= self.num_slots)]
            raise ArgumentError(
                "slots", int(wrong[0]), f"is outside the pool's {self.num_slots} slots"
            )
        caches = [part[layer] for part in self._parts]
        if self._triton:
            refuse_interpreted_bf16(pool=caches[0], **rows)
            if (
                self.dtype == FP8
                and self.device.type == "cpu"
                and any(r.dtype != FP8 for r in rows.values())
            ):
                raise ArgumentError(
                    "dtype", FP8, "Triton's interpreter rounds to fp8 wrongly; use kernels='torch'"
                )
            store_triton(caches, slots, list(rows.values()), [*map(float, scales.values())])
        else:
            store_torch(caches, slots, list(rows.values()), [*map(float, scales.values())])

    def __repr__(self) -> str:
        kind, shape = type(self).__name__, "×".join(map(str, self.k(0).shape[1:]))
        dtype, mib = (
            str(self.dtype).removeprefix("torch."),
            self.num_slots * self.bytes_per_token / 2**20,
        )
        return (
            f"{kind}({self.num_slots} slots of {shape} in {self.num_layers} layers, {dtype} on {self.device}: "
            f"{mib:.1f} MiB, {self.bytes_per_token} bytes per token)"
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
        return self._parts[1][layer]

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
    >>> m = MLAPool(8, 4, num_layers=1, kv_lora_rank=4, rope_dim=2, dtype=torch.float32, device="cpu")
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
