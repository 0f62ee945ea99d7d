"""The habits of the project: formatted, linted, typed, small files, and pins that agree with each
other."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_ruff_finds_nothing() -> None:
    _run("ruff", "check", "--no-cache", ".")


def test_everything_is_formatted() -> None:
    _run("ruff", "format", "--check", "--no-cache", ".")


def test_types_hold() -> None:
    _run("pyright", "--pythonpath", sys.executable)


@pytest.mark.parametrize("path", sorted((ROOT / "minikv").rglob("*.py")), ids=lambda p: p.name)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def _code_lines(path: Path) -> int:
    """Lines that hold code: without blank lines, comments and docstrings."""
    source, lines = path.read_text(), set()
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_floors_stay_small() -> None:
    beside = {"viz", "measure", "lessons"}
    folders = [p for p in (ROOT / "minikv").iterdir() if p.is_dir() and p.name not in beside]
    files = [
        ROOT / "minikv" / "device.py",
        *(f for folder in folders for f in folder.rglob("*.py")),
    ]
    assert sum(_code_lines(path) for path in files) <= 7800  # the aim is 6,000


def _names(specs: list[str]) -> set[str]:
    return {re.split(r"[<>=!;\[ ]", spec)[0].lower().replace("-", "_") for spec in specs}


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[^\s=]+", line) for line in lines)
    pins = {line.split("==")[0].lower().replace("-", "_"): line.split("==")[1] for line in lines}
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == "3.7.1"
    extras = [spec for specs in PROJECT["optional-dependencies"].values() for spec in specs]
    assert _names(PROJECT["dependencies"] + extras) <= set(pins)


def test_the_environment_file_adds_no_pin_of_its_own() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert re.findall(r"- (-[ce] \S+)", text) == ["-c constraints.txt", "-e ."]
    conda = re.findall(r"^  - ([a-z]+)(?:=(\S+))?$", text, re.M)
    assert [name for name, _ in conda if name not in ("conda",)] == ["python", "pip", "graphviz"]
    minor = int(dict(conda)["python"].split(".")[1])
    assert minor >= int(PROJECT["requires-python"].split(".")[-1])


def test_top_level_is_the_design_card() -> None:
    allowed = {
        "notebooks",
        "minikv",
        "tests",
        "environment.yml",
        "README.md",
        "pyproject.toml",
        "constraints.txt",
        "LICENSE",
    }
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    tops = {name.split("/")[0] for name in listed}
    assert {t for t in tops if not t.startswith(".")} <= allowed


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "pip install -c constraints.txt -e . && minikv tour" in text
    assert "pip install -c constraints.txt -e '.[test]' && pytest" in text
