"""Imports only go down the floors of the house, so that the package can be read from the ground
up."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "minikv"
FLOORS = {
    "errors": 0,
    "numbers": 0,
    "device": 0,
    "kernels": 1,
    "graphs": 2,
    "memory": 3,
    "prefix": 4,
    "attention": 4,
    "models": 5,
    "speculative": 6,
    "engine": 7,
}
BESIDE = {"viz", "measure", "lessons"}
TOP = {"__init__", "__main__", "cli", "tour", "report"}


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _module_imports(path: Path) -> list[str]:
    """Names of minikv modules that `path` imports when it is loaded: function bodies and type
    checking left out."""
    found: list[str] = []

    def walk(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.extend(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are written in full"
                if node.module == "minikv":
                    found.extend(f"minikv.{alias.name}" for alias in node.names)
                elif node.module:
                    found.append(node.module)
            elif isinstance(node, ast.If):
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    walk(node.body)
                walk(node.orelse)
            elif isinstance(node, ast.Try):
                walk(node.body)
                walk(node.orelse)
            elif isinstance(node, ast.ClassDef):
                walk(node.body)

    walk(ast.parse(path.read_text()).body)
    return [name for name in found if name.startswith("minikv.")]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = _room(path)
    assert room in FLOORS or room in BESIDE or room in TOP, (
        f"{room} is not in the plan of the house"
    )
    for name in _module_imports(path):
        other = name.split(".")[1]
        if room in FLOORS and other != room:
            assert other in FLOORS, (
                f"{path.name} imports {name}, which stands beside or above the floors"
            )
            assert FLOORS[other] < FLOORS[room], (
                f"{path.name} (floor {FLOORS[room]}) imports {name}"
            )


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("minikv", ["torch", "triton", "numpy"]),
        (
            "minikv.prefix",
            ["triton", "minikv.models", "minikv.attention", "minikv.engine", "minikv.viz"],
        ),
        ("minikv.engine.scheduler", ["triton", "minikv.models", "minikv.attention", "minikv.viz"]),
    ],
)
def test_importing_stays_light(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"
