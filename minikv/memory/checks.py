"""Numbers as callers pass them: they go on as int or int64, or are refused by name."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from minikv.errors import ArgumentError


def whole(name: str, value: Any) -> int:
    """`value` as an int, when it is one of some kind.

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
        return operator.index(value)
    except TypeError:
        raise ArgumentError(name, value, "must be a whole number; pass an int") from None


def host_integers(name: str, values: Any, ndim: int | None = None) -> np.ndarray:
    """Integers of a list, array or CPU tensor as int64; nothing waits for a device, and int64 is not copied.

    Raises
    ------
    ArgumentError
        For a tensor on a GPU, anything but integers of 64 bits, or other than `ndim` dimensions.
    """
    given = values
    if isinstance(values, torch.Tensor):
        if values.is_cuda:
            raise ArgumentError(name, values.device, "must be a CPU tensor: reading it back would wait for the device")
        try:
            values = values.numpy()
        except (TypeError, RuntimeError):  # types that NumPy lacks, tensors with a gradient
            raise ArgumentError(name, given, "must be integers") from None
    elif not isinstance(values, np.ndarray):
        try:
            values = np.asarray(values)
        except (ValueError, TypeError):  # lists of unequal lengths, or of tensors on a GPU
            raise ArgumentError(name, given, "must be integers") from None
        values = values if values.size else values.astype(np.int64)
    if values.dtype.kind not in "iu" or (ndim is not None and values.ndim != ndim):
        raise ArgumentError(name, given, "must be integers" + ("" if ndim is None else " [n]"))
    if values.dtype != np.int64:
        if values.dtype == np.uint64 and values.size and values.max() >= 2**63:
            raise ArgumentError(name, int(values.max()), "does not fit into 64 bits with a sign")
        values = values.astype(np.int64)
    return values


def refuse_misplaced(last_loc: np.ndarray, prefix: np.ndarray, page_size: int, nobodys: np.ndarray) -> None:
    """Name the first request whose prefix cannot end at its `last_loc`, or where that is in a page of nobody's."""
    misplaced = (last_loc + 1 - prefix) % page_size != 0
    wrong = misplaced | nobodys
    if wrong.any():
        i = int(np.argmax(wrong))
        why = f"not where a prefix of {prefix[i]} tokens ends in its page of {page_size}"
        why = why if misplaced[i] else f"in page {last_loc[i] // page_size}, which nobody holds"
        remedy = "pass the slot of the last prefix token, -1 without a prefix"
        raise ArgumentError("last_loc", int(last_loc[i]), f"of request {i} is {why}; {remedy}")
