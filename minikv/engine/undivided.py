"""Bookkeeping that is done as a whole: neither Ctrl-C nor a callback comes in its middle.

A page that was taken but is in no table yet is lost if the code between is left. So whoever interrupts a step, or
aborts a request from an event listener, waits for the end of the scheduler's method that is running.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shielded() -> Iterator[None]:
    """Ctrl-C (SIGINT) waits for the end of the body; other threads than the main one never get it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda *seen: missed.append(seen))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if missed:
            before(*missed[0])


def undivided(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the scheduler that is shielded; aborts that were asked for meanwhile follow it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if self.busy:
            return method(self, *args, **options)
        with shielded():
            self.busy = True
            try:
                return method(self, *args, **options)
            finally:
                self.busy = False
                while self.aborts:
                    self.abort(self.aborts.pop(0))

    return run
