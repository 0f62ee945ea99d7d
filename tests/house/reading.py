"""What the tests of the house read out of source files: imports, weight, words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
GROUND = ("errors", "numbers", "device")
"""Floor 0 is three files; each may import those before it."""
BESIDE = {"viz", "measure", "lessons"}
TOP = {"__init__", "__main__", "cli", "tour", "report", "site", "serve"}
HOME = {"LLM": "engine", "SamplingParams": "engine", "doctor": "device", "Error": "errors"}
"""Rooms of the names that ``minikv`` itself offers."""
UNKNOWN = "?"
"""Stands for a module whose name is not written where it is imported."""


@dataclass(frozen=True)
class Import:
    """One import: the module's full name, its line, and whether a function's call runs it."""

    module: str
    line: int
    lazy: bool

    @property
    def room(self) -> str:
        return self.module.split(".")[1] if "." in self.module else self.module


def room_of(path: Path) -> str:
    """The room that a file of the package belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_files() -> list[Path]:
    """The files of floors 0 to 7."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) in FLOORS]


# -- imports


def imports_of(source: str, package: str) -> list[Import]:
    """Everything of minikv that a module imports, wherever the statement stands.

    Parameters
    ----------
    source
        The module's text.
    package
        Full name of the package the module is in, against which relative imports are resolved.
    """
    return [i for i in _imports(ast.parse(source), package, False) if _ours(i.module)]


def _ours(module: str) -> bool:
    return module == UNKNOWN or module.split(".")[0] == "minikv"


def _imports(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _says_type_checking(node.test):
        for statement in node.orelse:
            yield from _imports(statement, package, lazy)
        return
    for module in _named_by(node, package):
        yield Import(module, getattr(node, "lineno", 0), lazy)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, lazy or inside)


def _says_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _named_by(node: ast.AST, package: str) -> list[str]:
    """Modules that this node by itself imports, or reaches through the name ``minikv``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name != "minikv"]
    if isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        if base != "minikv":
            return [base]
        return [_of_minikv(alias.name) for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [_of_minikv(node.attr)] if node.value.id == "minikv" else []
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func).split(".")[-1]
        if called in ("import_module", "__import__"):
            return [_absolute(_beginning(node.args[0]), package)]
    return []


def _of_minikv(name: str) -> str:
    return "minikv" if name.startswith("__") else f"minikv.{HOME.get(name, name)}"


def _beginning(argument: ast.expr) -> str:
    """The text that a module's name begins with, as far as it is written out."""
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]
    known = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    return str(argument.value) if known else UNKNOWN


def _absolute(module: str, package: str) -> str:
    """A relative module's full name: one dot is the package itself, each further one its parent."""
    name = module.lstrip(".")
    dots = len(module) - len(name)
    if not dots:
        return module
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - dots + 1], *([name] if name else [])])


# -- weight


def weight(source: str) -> int:
    """Statements (docstrings not counted), 2 for each conditional expression, and the names of a
    tuple assignment beyond the first."""
    tree = ast.parse(source)
    documents = {id(statement) for statement in _docstrings(tree)}
    total = 0
    for node in ast.walk(tree):
        total += isinstance(node, ast.stmt) and id(node) not in documents
        total += 2 * isinstance(node, ast.IfExp)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            names = node.targets[0]
            total += len(names.elts) - 1 if isinstance(names, ast.Tuple) else 0
    return total


def _docstrings(tree: ast.Module) -> list[ast.Expr]:
    """The statements that are docstrings of the module, its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            found.append(node.body[0])
    return found


def crowded_assignments(source: str) -> list[str]:
    """Tuple assignments of more than two names from unlike values, ``"line 3: a, b, c = ..."``.

    Values are alike when they are made in the same way: calls of one function, attributes of one
    object, constants, elements of one array.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        names, values = node.targets[0], node.value.elts
        crowded = isinstance(names, ast.Tuple) and len(values) > 2
        if crowded and len({_making(value) for value in values}) > 1:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _making(value: ast.expr) -> tuple[str, str]:
    """How a value is made, in a word and the name it is made from."""
    if isinstance(value, ast.Call):
        return "call", ast.unparse(value.func)
    if isinstance(value, ast.Attribute | ast.Subscript):
        return type(value).__name__, ast.unparse(value.value)
    return type(value).__name__, ""


# -- words


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings with their lines; text below an assignment counts, too."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node.lineno, text.value


def forbidden_words(source: str, words: str) -> list[str]:
    """Places in comments and docstrings where one of the words (``"a|b"``) stands."""
    return [
        f"line {line}: {found[0]}"
        for line, text in prose(source)
        for found in re.finditer(rf"\b(?:{words})\b", text, re.IGNORECASE)
    ]
