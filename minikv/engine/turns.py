"""One caller at a time: threads take turns, and Ctrl-C waits for the end of a turn.

A page that was taken but is in no table yet is lost if the code between is left. So what changes an
engine happens within a turn, which neither an interrupt nor another thread can enter.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from typing import Any


class Turns:
    """A re-entrant lock that threads get in the order in which they asked for it.

    It is handed over, so a thread that asks again at once cannot overtake one that waits. While the
    main thread waits for it or holds it, SIGINT (Ctrl-C) is kept, and its handler runs afterwards;
    Python never interrupts other threads.

    Attributes
    ----------
    depth
        How often the thread that holds it has entered it; 0 when it is free.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._owner: int | None = None
        self._waiting: deque[threading.Lock] = deque()  # a locked gate for each thread that waits
        self._guard = threading.Lock()
        self._handler: Any = None
        self._missed: list[tuple] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            if me == threading.main_thread().ident:
                self._missed = missed = []
                self._handler = signal.signal(signal.SIGINT, lambda *seen: missed.append(seen))
            gate = None
            with self._guard:
                if self._owner is None:
                    self._owner = me
                else:
                    gate = threading.Lock()
                    gate.acquire()
                    self._waiting.append(gate)
            if gate is not None:
                gate.acquire()  # the thread before opens it
                self._owner = me
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        with self._guard:
            self._owner = None
            if self._waiting:
                self._owner = -1  # the next one, which is about to wake up
                self._waiting.popleft().release()
        if threading.get_ident() == threading.main_thread().ident:
            signal.signal(signal.SIGINT, self._handler)
            if self._missed and callable(self._handler):
                self._handler(*self._missed[0])
