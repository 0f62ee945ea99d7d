"""A step budget: stop a learner's function that never ends, by counting the lines it executes, not by a clock."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INSTRUCTIONS = 20  # of the interpreter, in a long line: a loop written on one line has no second line to count
_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class OutOfSteps(BaseException):
    """The budget is used up. Not an ``Exception``, so that a learner's broad ``except`` does not swallow it."""


def _code_file(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.unwrap(function).__code__.co_filename
    except AttributeError:
        return None


class _Insisting(threading.Thread):
    """Raises OutOfSteps in the thread that made it, again and again.

    A bare ``except`` inside an endless loop swallows the first one, and Python traces no more after a trace function
    has raised. Sooner or later one arrives between the end of the ``except`` and the next round, and leaves the loop.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.target, self.over = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            _raise_in_thread(self.target, ctypes.py_object(OutOfSteps))

    def stop(self) -> None:
        """Raise no more. One that is still on its way arrives in here, before this returns."""
        self.over.set()
        self.join()


def limited(function: Callable[..., Any], steps: int, call: Callable[[], T]) -> T:
    """The result of `call`, unless code of the file or cell that defines `function` executes more than `steps` lines.

    Code of other files (the package, NumPy) runs at full speed and is not counted.

    Raises
    ------
    OutOfSteps
        When the budget is used up, also when the code caught that and went on. Loops that catch everything, one
        inside the other, may still not end: ``minikv check`` has a limit of time for those.
    """
    home, left, before = _code_file(function), steps * INSTRUCTIONS, sys.gettrace()
    insisting: _Insisting | None = None

    def each_step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left, insisting
        if event == "opcode":
            left -= 1
            if left < 0:
                if insisting is None:
                    insisting = _Insisting()
                    insisting.start()
                raise OutOfSteps
        return each_step

    def each_call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != home:
            return None
        frame.f_trace_opcodes = True
        return each_step

    try:
        sys.settrace(each_call)
        result = call()
    finally:
        while True:
            try:
                sys.settrace(before)
                if insisting is not None:
                    insisting.stop()
                break
            except OutOfSteps:  # the one that was on its way
                continue
        if left < 0:
            raise OutOfSteps
    return result
