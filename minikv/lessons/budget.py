"""A step budget: stop a learner's function that never ends, by counting the lines it executes, not by a clock."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INSTRUCTIONS = 20  # of the interpreter, in a long line: a loop written on one line has no second line to count


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
    home, left, before = _code_file(function), steps * INSTRUCTIONS, sys.gettrace()

    def each_step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "opcode":
            left -= 1
            if left < 0:
                raise OutOfSteps
        return each_step

    def each_call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != home:
            return None
        frame.f_trace_opcodes = True
        return each_step

    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)
