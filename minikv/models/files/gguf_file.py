"""GGUF files: the header is read here (2 s faster than the ``gguf`` package), tensors are
dequantised by that package.

Layout (version 2 and 3, little endian): magic, version, tensor count, key count; the keys, each a
name, a type and a value; one record per tensor, its name, sizes (fastest first), type and offset;
padding; the tensors' bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ArgumentError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9  # value types with a length in front


@dataclass(frozen=True)
class _Record:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """The metadata of a GGUF file, and its tensors one by one.

    Parameters
    ----------
    path
        A ``.gguf`` file, mapped into memory, not read as a whole.

    Raises
    ------
    ArgumentError
        When the file is not GGUF, or ends early.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        try:
            self._bytes = np.memmap(self.path, np.uint8, mode="c").view(np.ndarray)
            self._header()
        except (struct.error, ValueError, KeyError, UnicodeDecodeError) as e:
            raise ArgumentError(
                "model", str(path), f"is not a complete GGUF file ({e}); fetch it again"
            ) from e

    def _header(self) -> None:
        view = self._bytes.data
        at = 0

        def scalar(code: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from(f"<{code}", view, at)
            at += struct.calcsize(code)
            return value

        def text() -> str:
            nonlocal at
            size = scalar("Q")
            if at + size > len(view):
                raise ValueError("a name ends past the end of the file")
            at += size
            return str(view[at - size : at], "utf-8")

        def value(kind: int) -> Any:
            nonlocal at
            if kind == _STRING:
                return text()
            if kind != _ARRAY:
                return scalar(_SCALARS[kind])
            inner, count = scalar("I"), scalar("Q")
            if inner in _SCALARS:
                values = struct.unpack_from(f"<{count}{_SCALARS[inner]}", view, at)
                at += struct.calcsize(f"<{count}{_SCALARS[inner]}")
                return list(values)
            return [value(inner) for _ in range(count)]

        if bytes(view[:4]) != b"GGUF":
            raise ValueError("the magic number is missing")
        at = 4
        version = scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        tensors, keys = scalar("Q"), scalar("Q")
        for _ in range(keys):
            name, kind = text(), scalar("I")
            self.metadata[name] = value(kind)
        self._records: dict[str, _Record] = {}
        for _ in range(tensors):
            name, dims = text(), scalar("I")
            shape = tuple(scalar("Q") for _ in range(dims))[::-1]
            self._records[name] = _Record(shape, scalar("I"), scalar("Q"))
        align = self.metadata.get("general.alignment", 32)
        self._start = -(-at // align) * align

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the file's order."""
        return list(self._records)

    def read(self, name: str) -> Tensor:
        """One tensor, fp32 on the CPU, dequantised if need be."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        record = self._records[name]
        try:
            kind = GGMLQuantizationType(record.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            size = math.prod(record.shape) // block * block_bytes
            raw = self._bytes[self._start + record.offset :][:size]
            if len(raw) < size:
                raise ArgumentError(
                    "model", str(self.path), f"ends inside tensor {name}; fetch it again"
                )
            value = dequantize(raw.reshape(-1, record.shape[-1] // block * block_bytes), kind)
        except (NotImplementedError, ValueError) as e:
            raise ArgumentError(
                "model", str(self.path), f"tensor {name} has a type that cannot be read ({e})"
            ) from e
        return torch.from_numpy(np.asarray(value, dtype=np.float32)).view(record.shape)
