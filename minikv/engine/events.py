"""What happened, one event per line of JSON; :mod:`minikv.measure.request_metrics` reads them.

Six events, each with its time `t` in seconds: ``add`` (id, prompt_tokens), ``admit`` (id,
cached_tokens, again), ``step`` (kind; extends, decodes: pairs [id, tokens computed] of the prompts
and of the running requests; sampled: pairs [id, tokens it got]; waiting, running, available,
evictable, size), ``retract`` (id), ``finish`` (id, reason, generated), ``refuse`` (error).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from minikv.errors import ArgumentError


class EventLog:
    """Passes events to listeners and, with a path, appends them to a JSON-lines file.

    Parameters
    ----------
    path
        File to append to; None writes nothing.
    listeners
        Called with each event, a dict.
    """

    def __init__(
        self, path: str | Path | None = None, listeners: Iterable[Callable[[dict], None]] = ()
    ) -> None:
        try:
            self._file = None
            if path is not None:
                self._file = open(os.fspath(path), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except (OSError, TypeError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            remedy = f"cannot be appended to ({reason}); name a file in a folder that exists"
            raise ArgumentError("event_log", path, remedy) from e
        self.listeners = list(listeners)

    def __call__(self, event: str, **fields: Any) -> None:
        """Tell the listeners and the file. One that fails gets a warning and no more events:
        requests do not suffer for it."""
        record = {"t": time.perf_counter(), "event": event, **fields}
        for listen in list(self.listeners):
            try:
                listen(record)
            except Exception as e:
                self.listeners.remove(listen)
                self._lost(f"the listener {getattr(listen, '__qualname__', listen)}", e)
        if self._file:
            try:
                self._file.write(json.dumps(record) + "\n")
            except (OSError, ValueError) as e:
                self._lost("event_log", e)
                self.close()

    def _lost(self, what: str, why: Exception) -> None:
        text = f"{what} failed at an event and gets no more of them: {type(why).__name__}: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Close the file, if there is one."""
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError):  # a full disk: the warning came before
                file.close()
