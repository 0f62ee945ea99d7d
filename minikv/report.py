"""What ``minikv doctor`` prints: this machine's devices, versions and files, and the command that
repairs each lack."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from minikv import device

INSTALL = "pip install -c constraints.txt -e ."


@dataclass(frozen=True)
class Lack:
    """Something missing: what it is, what goes without it, and the one command that repairs it."""

    what: str
    effect: str
    command: str


@dataclass(frozen=True)
class Report:
    """The facts of one machine.

    ``facts`` maps a name to what was found, in the order printed; ``lacks`` is empty on a complete
    installation.
    """

    tier: str
    device: str
    facts: dict[str, str]
    lacks: list[Lack] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.lacks

    def __str__(self) -> str:
        lines = ["minikv doctor", *(f"  {name:<12}{found}" for name, found in self.facts.items())]
        for lack in self.lacks:
            lines += [f"  lacks       {lack.what}: {lack.effect}", f"    repair    {lack.command}"]
        if self.ok:
            lines.append("  all there")
        return "\n".join(lines)


def dot_programs() -> list[str]:
    """Paths of the Graphviz programs there are, best first: a system ``dot``, and the one that the
    wheel ``graphviz-pure`` brings."""
    beside_python = shutil.which("graphviz-pure", path=os.fspath(Path(sys.executable).parent))
    found = [shutil.which("dot"), shutil.which("graphviz-pure") or beside_python]
    return [path for path in found if path is not None]


def dot_program() -> str | None:
    """Path of the best Graphviz program, or None."""
    return next(iter(dot_programs()), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def examine() -> Report:
    """Look at this machine; nothing is downloaded or changed."""
    import torch

    from minikv.models.files.download import model_status

    chosen, lacks = device.pick_device(), []
    tier = device.tier(chosen)
    name = (
        torch.cuda.get_device_name(chosen)
        if chosen.type == "cuda"
        else platform.processor() or platform.machine()
    )
    if chosen.type == "cuda":
        major, minor = torch.cuda.get_device_capability(chosen)
        processors = torch.cuda.get_device_properties(chosen).multi_processor_count
        name += f" (sm{major}{minor}, {processors} SMs)"
    memory = device.memory_facts(chosen)
    facts = {
        "tier": {
            "cuda": "cuda (compiled Triton kernels)",
            "interpreter": "interpreter (PyTorch on the CPU; Triton kernels "
            "run interpreted where asked)",
            "torch": "torch (PyTorch only, no Triton)",
        }[tier],
        "device": f"{chosen.type}: {name}",
        "memory": f"{_gigabytes(memory.free)} free of {_gigabytes(memory.total)}",
        "threads": str(torch.get_num_threads()),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton") or "not installed",
    }
    if not device.have_triton():
        if sys.platform == "linux":
            lacks.append(Lack("triton", "no Triton kernels, PyTorch runs everything", INSTALL))
        else:
            facts["triton"] = f"no wheels for {platform.system()}; PyTorch runs everything"
    for package in ("jupyterlab", "ipywidgets", "matplotlib"):
        found = _version(package)
        facts[package] = found or "not installed"
        if found is None:
            lacks.append(Lack(package, "the notebooks cannot run", INSTALL))
    dot = dot_program()
    facts["dot"] = dot or "not found"
    if dot is not None and Path(dot).stem == "graphviz-pure":
        facts["dot"] = "graphviz-pure, from the wheel"
    if dot is None:
        lacks.append(Lack("dot", "graphs are drawn as text", "pip install graphviz-pure"))
    model = model_status()
    facts["model"] = str(model).replace(str(Path.home()), "~")
    if not model.present:
        lacks.append(
            Lack("model file", "SmolLM2-135M is fetched on first use (93 MB)", "minikv model fetch")
        )
    return Report(tier, str(chosen), facts, lacks)
