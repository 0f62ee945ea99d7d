"""``minikv bench``: run measurements by name, print their tables, write them as JSON with the facts
of the machine.

A measurement is a module ``bench_<name>.py`` beside this one with ``run(out_dir=None, quick=False,
device="auto")``. It prints its tables and returns ``{"rows": [...], ...}``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import minikv
from minikv.device import pick_device, tier
from minikv.errors import ArgumentError, Error


def names() -> list[str]:
    """Names of all measurements."""
    return sorted(
        path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
    )


def phrases() -> dict[str, str]:
    """Name of each measurement, and the first line of its module: what it measures."""
    modules = {name: importlib.import_module(f"minikv.measure.bench_{name}") for name in names()}
    return {name: (module.__doc__ or "").partition("\n")[0] for name, module in modules.items()}


def listing() -> str:
    """One line for each measurement, as ``minikv bench`` prints them."""
    wide = max(map(len, names()))
    return "\n".join(f"  {name:<{wide}}  {phrase}" for name, phrase in phrases().items())


def run(
    names_: Iterable[str],
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Run measurements one after another.

    Parameters
    ----------
    names_
        As :func:`names` lists them.
    out_dir
        Folder for one ``<name>-<tier>.json`` each, written as soon as it is measured; None only
        prints.
    quick
        Fewer repetitions and smaller sizes.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    dict
        Name to what its module returned, with the machine's facts under ``"machine"``.

    Raises
    ------
    ArgumentError
        For a name that does not exist or a folder that cannot be written to, before anything runs.
    """
    chosen, known = list(names_), names()
    for name in chosen:
        if name not in known:
            raise ArgumentError("name", name, "there are measurements named " + ", ".join(known))
    on = pick_device(device)
    if out_dir is not None:
        try:
            Path(out_dir).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out_dir).close()
        except OSError as e:
            raise ArgumentError(
                "--out", str(out_dir), f"cannot write there ({e.strerror}); name another folder"
            ) from e
    machine = facts(on)
    print(
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"{machine['date']}"
    )
    found: dict[str, Any] = {}
    for name in chosen:
        print(f"\n== {name}", flush=True)
        result = importlib.import_module(f"minikv.measure.bench_{name}").run(
            out_dir=out_dir, quick=quick, device=str(on)
        )
        found[name] = {"name": name, "quick": quick, "machine": machine, **result}
        if out_dir is not None:
            path = Path(out_dir) / f"{name}-{machine['tier']}.json"
            path.write_text(json.dumps(found[name], indent=1) + "\n")
            print(f"written to {path}")
    return found


def facts(device: torch.device | str) -> dict[str, Any]:
    """What a reader needs to place a measurement: device, versions, command and date."""
    device = torch.device(device)
    try:
        triton: str | None = importlib.import_module("importlib.metadata").version("triton")
    except ImportError:
        triton = None
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "tier": tier(device),
        "minikv": minikv.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", "-m", "minikv.measure.suite", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "memory": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def _main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="minikv.measure.suite", description="run measurements by name"
    )
    parser.add_argument("names", nargs="*", help="default: list the names")
    parser.add_argument("--out", default=None, help="folder for JSON results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    if not options.names:
        print(listing())
        return 0
    try:
        run(options.names, options.out, options.quick, options.device)
    except Error as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
