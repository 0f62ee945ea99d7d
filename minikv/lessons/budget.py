"""A step budget: stop a learner's function that never ends, by counting the lines it executes, not
by a clock."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INSTRUCTIONS = (
    20  # of the interpreter, in a long line: a loop written on one line has no second line to count
)
_raise_in_thread = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class OutOfSteps(BaseException):
    """The budget is used up. Not an ``Exception``, so that a learner's broad ``except`` does not
    swallow it."""


def _code_file(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.unwrap(function).__code__.co_filename
    except AttributeError:
        return None


def _renewed() -> type[OutOfSteps]:
    """An OutOfSteps of this thread that comes again: each that is made orders the next one, due at
    once.

    Code that catches everything swallows the first, and Python traces no more after a trace
    function has raised. The next then arrives where the interpreter looks for such orders: after a
    call, and at each jump back to the beginning of a loop. A handler must come to one of those
    before it can go on with its loop, and so is left as well, and the handler around it. Nothing of
    Python runs in between in which the order could arrive too early.
    """
    again = type("OutOfSteps", (OutOfSteps,), {})
    order = partial(_raise_in_thread, threading.get_ident(), again)
    again.__init__ = staticmethod(order)  # type: ignore[method-assign]
    return again


def limited(function: Callable[..., Any], steps: int, call: Callable[[], T]) -> T:
    """The result of `call`, unless code of the file or cell that defines `function` executes more
    than `steps` lines.

    Code of other files (the package, NumPy) runs at full speed and is not counted.

    Raises
    ------
    OutOfSteps
        When the budget is used up, also when the code caught that and went on. A loop that runs
        inside one call of C code, such as ``sum(iter(int, 1))``, executes no lines: only ``minikv
        check``, which has a limit of time, ends that one.
    """
    home, left, before = _code_file(function), steps * INSTRUCTIONS, sys.gettrace()
    again = _renewed()

    def each_step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "opcode":
            left -= 1
            if left < 0:
                raise again
        return each_step

    def each_call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != home:
            return None
        frame.f_trace, frame.f_trace_opcodes = (
            each_step,
            True,
        )  # in this order: Python 3.13 looks at both
        return each_step

    sys._getframe().f_trace_opcodes = (
        True  # else Python 3.12 reports no opcodes in this thread at all
    )
    try:
        sys.settrace(each_call)
        result = call()
    finally:
        again.__init__ = OutOfSteps.__init__  # type: ignore[method-assign]
        while True:
            try:
                sys.settrace(before)
                break
            except OutOfSteps:  # the one that was on its way
                continue
        if left < 0:
            raise OutOfSteps
    return result
