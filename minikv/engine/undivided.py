"""Bookkeeping that is done as a whole: neither Ctrl-C nor a callback comes in its middle.

A page that was taken but is in no table yet is lost if the code between is left. So whoever
interrupts a step, or aborts a request from an event listener, waits for the end of the scheduler's
method that is running.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any


class _Shield(ContextDecorator):
    """While it is up, Ctrl-C (SIGINT) waits; other threads than the main one never get it. It may
    be entered again."""

    def __init__(self) -> None:
        self._depth, self._before, self._missed = 0, signal.default_int_handler, []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._missed = []
                self._before = signal.signal(signal.SIGINT, lambda *seen: self._missed.append(seen))
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                signal.signal(signal.SIGINT, self._before)
                if self._missed and callable(self._before):
                    self._before(*self._missed[0])


shielded = _Shield()


def undivided(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the scheduler that is shielded; aborts that were asked for meanwhile follow it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if self.busy:
            return method(self, *args, **options)
        with shielded:
            self.busy = True
            try:
                return method(self, *args, **options)
            finally:
                self.busy = False
                while self.aborts:
                    self.abort(self.aborts.pop(0))

    return run
