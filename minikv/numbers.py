"""Numbers as callers pass them: they go on as int or int64, or are refused by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minikv.errors import ArgumentError

INTEGERS = (torch.int64, torch.int32)  # types of slots on the device


def whole(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    remedy: str | None = None,
) -> int:
    """`value` as an int, when it is one of some kind (and no bool) within these bounds.

    Examples
    --------
    >>> whole("size", np.int64(12))
    12
    >>> whole("size", 12.0)
    Traceback (most recent call last):
    ...
    minikv.errors.ArgumentError: size=12.0: must be a whole number; pass an int
    """
    try:
        number = operator.index(value)
    except Exception:  # arrays and tensors refuse in ways of their own
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentError(name, value, remedy or "must be a whole number; pass an int")
    if least is not None and number < least:
        raise ArgumentError(name, value, remedy or f"must be at least {least}")
    if most is not None and number > most:
        raise ArgumentError(name, value, remedy or f"must be at most {most}")
    return number


def real(name: str, value: Any, least: float, most: float, remedy: str) -> float:
    """`value` as a float, when it is a number (and no bool) within these bounds."""
    try:
        number = math.nan if isinstance(value, bool) else float(value + 0)  # no text
    except Exception:
        number = math.nan
    if not least <= number <= most:
        raise ArgumentError(name, value, remedy)
    return number


def host_integers(name: str, values: Any, ndim: int | None = None) -> np.ndarray:
    """Integers of a list, array or CPU tensor as int64; nothing waits for a device, and int64 is
    not copied.

    Raises
    ------
    ArgumentError
        For a tensor on a GPU, anything but integers of 64 bits, or other than `ndim` dimensions.
    """
    try:
        array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths, tensors on a GPU
        remedy = "must be integers: a CPU tensor, an array or a list"
        raise ArgumentError(name, values, remedy) from None
    kind = array.dtype.kind  # NumPy calls an empty list floats
    if array.size and kind != "i" and (kind != "u" or array.max() >= 2**63):
        raise ArgumentError(name, values, "must be integers of 64 bits with a sign")
    if ndim is not None and array.ndim != ndim:
        raise ArgumentError(name, values, f"must have {ndim} dimension, not {array.ndim}")
    return array if array.dtype == np.int64 else array.astype(np.int64)


def is_id(value: Any) -> bool:
    """Whether `value` can be one token id: a whole number, and neither a bool nor a list of one."""
    if isinstance(value, (bool, str, bytes, list, tuple)):
        return False
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def first_of(numbers: Sequence[int]) -> str:
    """The first eight of `numbers`, to be shown.

    Examples
    --------
    >>> first_of([1, 2, 3]), first_of(range(10, 30))
    ('1 2 3', '10 11 12 13 14 15 16 17 …')
    """
    shown = [*map(str, numbers[:8]), "…"]
    return " ".join(shown[: len(numbers)])
