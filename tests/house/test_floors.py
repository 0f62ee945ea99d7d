"""Imports only go down the floors of the house, so that the package can be read from the ground
up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reading import BESIDE, FLOORS, GROUND, PACKAGE, TOP, Import, imports_of, room_of

FILES = sorted(PACKAGE.rglob("*.py"))
CALLS_UP = {
    ("device.py", "minikv.report"),  # doctor() prints it
    ("engine/events.py", "minikv.measure.prometheus"),  # stats().prometheus()
    ("memory/allocator.py", "minikv.viz"),  # these three draw themselves in a notebook
    ("memory/table.py", "minikv.viz"),
    ("prefix/tree.py", "minikv.viz"),
}
"""What a room may call above it: inside a function, and only these."""


def refused(room: str, file: str, found: Import) -> str | None:
    """Why a file of this room may not import that, or None."""
    if room not in FLOORS or found.module == "minikv" or found.room == room:
        return None
    if found.room in FLOORS:
        down = FLOORS[found.room] < FLOORS[room]
        if room in GROUND and found.room in GROUND:
            down = GROUND.index(found.room) < GROUND.index(room)
        return None if down else f"floor {FLOORS[found.room]}, not below floor {FLOORS[room]}"
    if found.lazy and (file, found.module) in CALLS_UP:
        return None
    return "beside or above the floors, or not written out"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room, file = room_of(path), path.relative_to(PACKAGE)
    assert room in FLOORS or room in BESIDE or room in TOP, f"{room} has no place in the house"
    package = ".".join(["minikv", *file.parts[:-1]])
    for found in imports_of(path.read_text(), package):
        why = refused(room, file.as_posix(), found)
        assert why is None, f"{file}:{found.line} imports {found.module}: {why}"


def test_calls_up_are_really_there() -> None:
    met = set()
    for file in {file for file, _ in CALLS_UP}:
        package = ".".join(["minikv", *Path(file).parts[:-1]])
        for found in imports_of((PACKAGE / file).read_text(), package):
            met.add((file, found.module))
    assert met >= CALLS_UP


UP = {
    "at the top": "import minikv.engine.llm",
    "from": "from minikv.engine.llm import LLM",
    "a room from minikv": "from minikv import engine",
    "a name from minikv": "from minikv import LLM",
    "under another name": "from minikv import models as below",
    "relative": "from ..engine import llm",
    "relative, the room itself": "from .. import engine",
    "in a function": "def f():\n    import minikv.engine",
    "in a method": "class A:\n    def f(self):\n        from minikv.engine import batch",
    "in a class": "class A:\n    from minikv.engine import batch",
    "in an async function": "async def f():\n    from minikv import engine",
    "in except": "try:\n    pass\nexcept ImportError:\n    import minikv.engine",
    "in finally": "try:\n    pass\nfinally:\n    import minikv.engine",
    "in else of try": "try:\n    pass\nexcept E:\n    pass\nelse:\n    import minikv.engine",
    "in with": "with open('x') as f:\n    import minikv.engine",
    "in for": "for i in x:\n    import minikv.engine",
    "in else of for": "for i in x:\n    pass\nelse:\n    import minikv.engine",
    "in while": "while x:\n    import minikv.engine",
    "in match": "match x:\n    case 1:\n        import minikv.engine",
    "in if": "if x:\n    import minikv.engine",
    "in else of TYPE_CHECKING": "if TYPE_CHECKING:\n    pass\nelse:\n    import minikv.engine",
    "where types are not checked": "if not TYPE_CHECKING:\n    import minikv.engine",
    "import_module": "from importlib import import_module\nimport_module('minikv.engine')",
    "importlib.import_module": "import importlib\nimportlib.import_module('minikv.engine.llm')",
    "import_module of a room's file": "import_module(f'minikv.engine.{name}')",
    "import_module, relative": "import_module('..engine', __package__)",
    "__import__": "__import__('minikv.engine')",
    "a name that is computed": "import_module(name)",
    "an attribute of minikv": "import minikv\nminikv.LLM('tiny')",
    "an attribute in a function": "import minikv\ndef f():\n    return minikv.engine.llm",
    "a picture at the top": "from minikv.viz import pages",
    "a picture of a room that has none": "def f():\n    from minikv.viz import tiles",
}


@pytest.mark.parametrize("source", UP.values(), ids=list(UP))
def test_a_way_up_is_found(source: str) -> None:
    found = imports_of(source, "minikv.attention")
    assert any(refused("attention", "attention/api.py", i) for i in found)


DOWN = {
    "the room below": "from minikv.memory import KVPool",
    "its own room": "from . import options",
    "a file of its own room": "from .options import check",
    "for types only": "if TYPE_CHECKING:\n    from minikv.engine import LLM",
    "for types, by module": "import typing\nif typing.TYPE_CHECKING:\n    import minikv.engine",
    "other packages": "import torch\nfrom torch.nn import functional\nimport_module('torch')",
    "another package's attribute": "import torch\ntorch.engine()",
}


@pytest.mark.parametrize("source", DOWN.values(), ids=list(DOWN))
def test_a_way_down_is_allowed(source: str) -> None:
    found = imports_of(source, "minikv.attention")
    assert [i for i in found if refused("attention", "attention/api.py", i)] == []


def test_rooms_on_one_floor_do_not_meet() -> None:
    for room, other in (("attention", "prefix"), ("prefix", "attention"), ("errors", "numbers")):
        [found] = imports_of(f"def f():\n    import minikv.{other}", f"minikv.{room}")
        assert refused(room, f"{room}/x.py", found)
    [found] = imports_of("import minikv.errors", "minikv")
    assert refused("device", "device.py", found) is None, "the ground floor is read in one order"


def test_only_functions_call_up() -> None:
    [lazy] = imports_of("def f():\n    from minikv.viz import tree", "minikv.prefix")
    assert refused("prefix", "prefix/tree.py", lazy) is None
    [eager] = imports_of("from minikv.viz import tree", "minikv.prefix")
    assert refused("prefix", "prefix/tree.py", eager)
    assert refused("prefix", "prefix/node.py", lazy)


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
