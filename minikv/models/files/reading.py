"""Reading files that may be damaged: every error names the file, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minikv.errors import ArgumentError, Error


@contextmanager
def reading(source: Path, what: str) -> Iterator[None]:
    """A damaged file may fail in any way: errors leave this block as one that names `what` of
    `source`.

    Errors of minikv, of the system, and of memory (PyTorch lacks it by a RuntimeError) do not come
    from damage and say themselves what is wrong.
    """
    try:
        yield
    except (Error, OSError, MemoryError, RuntimeError):
        raise
    except Exception as e:
        raise ArgumentError(
            "model",
            str(source),
            f"{what} cannot be understood ({type(e).__name__}: {e}); fetch it again",
        ) from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ArgumentError("model", str(path), f"is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise ArgumentError(
            "model", str(path), f"holds a {type(value).__name__}, not an object; fetch it again"
        )
    return value
