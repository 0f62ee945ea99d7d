"""Say in one sentence where two results first differ."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Tensors and arrays as nested lists, tuples as lists, NumPy scalars as Python ones."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def first_difference(
    expected: Any, got: Any, *, tolerance: float = 1e-5, where: str = "the result"
) -> str | None:
    """None when equal (numbers within `tolerance`, relative above 1), else the first difference in
    words."""
    return _differ(plain(expected), plain(got), tolerance, where)


def _differ(expected: Any, got: Any, tolerance: float, where: str) -> str | None:
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return None if expected is got else f"{where} is {got!r}, expected {expected!r}"
    if isinstance(expected, int | float) and isinstance(got, int | float):
        close = expected == got or abs(expected - got) <= tolerance * max(1.0, abs(expected))
        both_nan = expected != expected and got != got
        return None if close or both_nan else f"{where} is {got}, expected {expected}"
    if isinstance(expected, list) and isinstance(got, list):
        for i, (e, g) in enumerate(zip(expected, got, strict=False)):
            problem = _differ(e, g, tolerance, f"{where}[{i}]")
            if problem:
                return problem
        if len(expected) != len(got):
            return f"{where} has {len(got)} entries, expected {len(expected)}"
        return None
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected:
            if key not in got:
                return f"{where} lacks {key!r}"
            problem = _differ(expected[key], got[key], tolerance, f"{where}[{key!r}]")
            if problem:
                return problem
        extra = [key for key in got if key not in expected]
        return f"{where} has {extra[0]!r}, which should not be there" if extra else None
    if type(expected) is not type(got):
        return (
            f"{where} is a {type(got).__name__} ({got!r:.60}), expected a {type(expected).__name__}"
        )
    return None if expected == got else f"{where} is {got!r:.80}, expected {expected!r:.80}"


def judge_walk(_: Any, expected: Any, got: Any) -> str | None:
    """The verdict on an exercise that walks: pairs (slots, free) of each step."""
    for step, (want, have) in enumerate(zip(expected, got, strict=False), start=1):
        if list(want) != list(have):
            return f"step {step}: returned (slots, free) = {tuple(have)}, expected {tuple(want)}"
    if len(expected) != len(got):
        return f"stopped after {len(got)} steps, expected {len(expected)}"
    return None


def judge_pair(_: Any, expected: Any, got: Any) -> str | None:
    """The verdict on a pair (slots, free pages left)."""
    if not isinstance(got, tuple | list) or len(got) != 2:
        return f"returned {got!r:.80}; return the pair (slots, free pages left)"
    slots, left = got
    if expected[0] is None or slots is None:
        if (expected[0] is None) != (slots is None):
            right = (
                "there are too few pages, so slots must be None"
                if expected[0] is None
                else "there are pages enough"
            )
            return f"slots = {slots}: {right}"
    elif list(slots) != list(expected[0]):
        return f"slots = {list(slots)}, expected {list(expected[0])}"
    if list(left) != list(expected[1]):
        return f"free pages left = {list(left)}, expected {list(expected[1])}"
    return None
