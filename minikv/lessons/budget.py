"""A step budget: stop a learner's function that never ends, by counting the lines it executes, not by a clock."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class OutOfSteps(BaseException):
    """The budget is used up. Not an ``Exception``, so that a learner's broad ``except`` does not swallow it."""


def _code_file(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.unwrap(function).__code__.co_filename
    except AttributeError:
        return None


@contextmanager
def limited(function: Callable[..., Any], steps: int) -> Iterator[None]:
    """Raise :class:`OutOfSteps` once code of the file or cell that defines `function` has executed `steps` lines.

    Code of other files (the package, NumPy) runs at full speed and is not counted.
    """
    home, left, before = _code_file(function), steps, sys.gettrace()

    def each_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                raise OutOfSteps
        return each_line

    def each_call(frame: FrameType, event: str, arg: Any) -> Any:
        return each_line if frame.f_code.co_filename == home else None

    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)
