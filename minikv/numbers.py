"""Numbers as callers pass them: they go on as int or int64, or are refused by name."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch

from minikv.errors import ArgumentError


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
        if isinstance(values, torch.Tensor):
            array = values.numpy()
        else:
            array = values if isinstance(values, np.ndarray) else np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # on a GPU, of unequal lengths, of a type that NumPy lacks
        raise ArgumentError(
            name, values, "must be integers: a CPU tensor, an array or a list"
        ) from None
    kind = array.dtype.kind  # an empty list has none to speak of
    if array.size and kind != "i" and (kind != "u" or array.max() >= 2**63):
        raise ArgumentError(name, values, "must be integers of 64 bits with a sign")
    if ndim is not None and array.ndim != ndim:
        raise ArgumentError(name, values, f"must have {ndim} dimension, not {array.ndim}")
    return array if array.dtype == np.int64 else array.astype(np.int64)


def refuse_misplaced(
    last_loc: np.ndarray, prefix: np.ndarray, page_size: int, nobodys: np.ndarray
) -> None:
    """Name the first request whose prefix cannot end at its `last_loc`, or where that is in a page
    of nobody's."""
    misplaced = (last_loc + 1 - prefix) % page_size != 0
    wrong = misplaced | nobodys
    if wrong.any():
        i = int(np.argmax(wrong))
        why = f"not where a prefix of {prefix[i]} tokens ends in its page of {page_size}"
        why = why if misplaced[i] else f"in page {last_loc[i] // page_size}, which nobody holds"
        remedy = "pass the slot of the last prefix token, -1 without a prefix"
        raise ArgumentError("last_loc", int(last_loc[i]), f"of request {i} is {why}; {remedy}")
