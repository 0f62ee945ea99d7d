"""Watching a kernel: which slots each of its programs loads and stores, in order, counted exactly.

Works where kernels are interpreted: there every load and store is a Python call with the addresses
in hand, and those calls are wrapped while a recording is on. An address is attributed to the kernel
argument whose elements it meets, and turned into a row of that tensor (of a pool: a slot).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from minikv.errors import StateError
from minikv.kernels.triton import INTERPRETED


@dataclass(frozen=True)
class Access:
    """One load, store or atomic operation of one program.

    Attributes
    ----------
    kind
        "load", "store" or "atomic".
    tensor
        Name of the kernel's argument, or None for memory of none of them.
    rows
        int64: the rows (index along the first dimension) of that tensor, each once, in order of
        first touch.
    elements, bytes
        What was really moved: lanes that a mask switches off count nothing, an address met twice
        counts twice.
    """

    kind: str
    tensor: str | None
    rows: np.ndarray
    elements: int
    bytes: int


@dataclass
class Program:
    """One program of one launch: its kernel, its place in the grid, and its accesses in order."""

    kernel: str
    index: tuple[int, int, int]
    accesses: list[Access] = field(default_factory=list)

    @property
    def bytes_loaded(self) -> int:
        return sum(a.bytes for a in self.accesses if a.kind != "store")

    @property
    def bytes_stored(self) -> int:
        return sum(a.bytes for a in self.accesses if a.kind != "load")

    def rows(self, tensor: str, kind: str = "load") -> list[int]:
        """Rows of `tensor` in the order this program met them; a row that several accesses meet is
        listed each time."""
        return [
            row
            for a in self.accesses
            if a.tensor == tensor and a.kind == kind
            for row in a.rows.tolist()
        ]


@dataclass
class Recording:
    """Every program that ran while recording, in the interpreter's order (first grid dimension
    slowest)."""

    programs: list[Program] = field(default_factory=list)

    @property
    def bytes_loaded(self) -> int:
        return sum(p.bytes_loaded for p in self.programs)

    @property
    def bytes_stored(self) -> int:
        return sum(p.bytes_stored for p in self.programs)

    def bytes_by_tensor(self, kind: str = "load") -> dict[str | None, int]:
        """Bytes loaded from (or with ``kind="store"`` stored to) each argument."""
        total: Counter[str | None] = Counter()
        for program in self.programs:
            for access in program.accesses:
                if access.kind == kind:
                    total[access.tensor] += access.bytes
        return dict(total)

    def counts(
        self, tensor: str, rows: int, kind: str = "load", kernel: str | None = None
    ) -> np.ndarray:
        """int64 [programs, rows]: how many accesses of each program met each row; what
        ``viz.tiles.load_map`` draws."""
        shown = [p for p in self.programs if kernel in (None, p.kernel)]
        return np.array([np.bincount(p.rows(tensor, kind), minlength=rows) for p in shown]).reshape(
            -1, rows
        )


@contextmanager
def record() -> Iterator[Recording]:
    """Record every kernel launched inside the ``with`` block.

    Yields
    ------
    Recording
        Filled while the block runs.

    Raises
    ------
    StateError
        Where kernels are not interpreted: a compiled kernel cannot be watched.

    Examples
    --------
    >>> with record() as recording:  # doctest: +SKIP
    ...     decode_attention(q, k_cache, v_cache, kv_indptr, kv_indices, backend="triton")
    >>> recording.programs[0].rows("k_cache")  # doctest: +SKIP
    [4, 5, 6, 7, 12, 13]
    """
    if not INTERPRETED:
        raise StateError(
            "recording needs Triton's interpreter, and this process compiles its kernels (or has "
            "no Triton); "
            "start Python with TRITON_INTERPRET=1 in the environment and pass CPU tensors"
        )
    from triton.runtime import interpreter

    recording, builder = Recording(), interpreter.interpreter_builder
    launch, grid_index = interpreter.GridExecutor.__call__, builder.set_grid_idx
    kernel: str = ""
    arguments: dict[str, Tensor] = {}

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        kernel = self.fn.__name__
        arguments.clear()
        for name, arg in {**dict(zip(self.arg_names, args, strict=False)), **kwargs}.items():
            tensor = getattr(arg, "base", arg)  # a tensor descriptor stands on a tensor
            if isinstance(tensor, Tensor) and tensor.numel():
                arguments[name] = tensor
        return launch(self, *args, **kwargs)

    def program_started(x: int, y: int, z: int) -> None:
        recording.programs.append(Program(kernel, (x, y, z)))
        grid_index(x, y, z)

    def watched(kind: str, call: Any, pointer_at: int, mask_at: int | None) -> Any:
        def access(*args: Any, **kwargs: Any) -> Any:
            pointers, mask = args[pointer_at], None if mask_at is None else args[mask_at]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            addresses = (
                pointers.data
                if mask is None
                else pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            )
            met = _attribute(addresses.ravel().astype(np.int64), arguments)
            recording.programs[-1].accesses.extend(
                Access(kind, name, rows, count, count * size) for name, rows, count in met
            )
            return call(*args, **kwargs)

        return access

    # Every form of load and store ends in these; the masks of the first two are their second and
    # third argument.
    wrapped = {"create_masked_load": ("load", 0, 1), "create_masked_store": ("store", 0, 2)}
    wrapped |= {"create_atomic_rmw": ("atomic", 1, 3), "create_atomic_cas": ("atomic", 0, None)}
    interpreter.GridExecutor.__call__ = launched
    builder.set_grid_idx = program_started
    for name, (kind, pointer_at, mask_at) in wrapped.items():
        setattr(builder, name, watched(kind, getattr(builder, name), pointer_at, mask_at))
    try:
        yield recording
    finally:
        interpreter.GridExecutor.__call__ = launch
        for name in ("set_grid_idx", *wrapped):
            delattr(builder, name)  # the class's own method shows again


def _attribute(
    addresses: np.ndarray, arguments: dict[str, Tensor]
) -> Iterator[tuple[str | None, np.ndarray, int]]:
    """Split addresses by the argument whose elements they meet: name, rows in order of first touch,
    how many."""
    for name, tensor in arguments.items():
        if not addresses.size:
            return
        strides = [stride * tensor.element_size() for stride in tensor.stride()] or [0]
        sizes = list(tensor.shape) or [1]
        inner = (
            sum((n - 1) * s for n, s in zip(sizes[1:], strides[1:], strict=True))
            + tensor.element_size()
        )
        offset = addresses - tensor.data_ptr()
        row = offset // strides[0] if strides[0] else np.zeros_like(offset)
        # Views of one storage (q, k and v of one projection) interleave: an element must lie inside
        # its own row.
        mine = (offset >= 0) & (row < sizes[0]) & (offset - row * strides[0] < inner)
        if mine.any():
            rows, first = np.unique(row[mine], return_index=True)
            yield name, rows[np.argsort(first)], int(mine.sum())
            addresses = addresses[~mine]
    if addresses.size:
        yield None, np.empty(0, np.int64), int(addresses.size)
