"""The maps of the house: links lead somewhere, and every room and main function is on them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reading import FLOORS, PACKAGE
from test_path import MAIN_PATH

from minikv.viz import house

MAP = PACKAGE / "README.md"
ROOT = PACKAGE.parent
PAGES = [MAP, ROOT / "README.md"]


def _links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=["map", "readme"])
def test_links_lead_somewhere(page: Path) -> None:
    links = _links(page)
    assert len(links) > 10
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("room", [r for r in FLOORS if r != "speculative"])
def test_every_room_is_on_the_maps(room: str) -> None:
    for page in PAGES:
        names = {Path(link).parts[-1].removesuffix(".py") for link in _links(page)}
        assert room in names, page


def test_the_path_of_a_prompt_is_on_the_map() -> None:
    text = MAP.read_text()
    at = [text.find(f"`{name}`") for name in MAIN_PATH]
    assert -1 not in at
    assert at == sorted(at)


def test_functions_named_on_the_path_are_in_the_files_beside_them() -> None:
    rows = re.findall(r"^\|[^|]*\| (`[^|]*`) \| (\[[^|]*\)) \|$", MAP.read_text(), re.M)
    assert len(rows) == 11
    for functions, files in rows:
        source = "".join((PACKAGE / f).read_text() for f in re.findall(r"\]\((.*?)\)", files))
        for owner, name in re.findall(r"`(\w+)\.(\w+)`", functions):
            assert f"def {name}(" in source, f"{owner}.{name}"


def test_moved_modules_are_where_the_list_says() -> None:
    """Full names of modules in the right column of CHANGES exist."""
    text = MAP.read_text()
    right = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| `minikv.")]
    assert len(right) > 10
    for name in re.findall(r"`minikv\.([a-z_.]+)", " ".join(right)):
        path = PACKAGE / name.replace(".", "/")
        assert any(
            p.exists() for p in (path, path.with_suffix(".py"), path.parent.with_suffix(".py"))
        )


def test_the_picture_shows_the_floors() -> None:
    shown = {row["room"]: row["floor"] for row in house.draw().data}
    assert shown == {room: floor for room, floor in FLOORS.items() if room in shown}
    assert set(FLOORS) - set(shown) == {"errors", "numbers"}, "they share a floor with device"
    text = house.draw().svg
    assert all(name in text for name in ("viz", "measure", "lessons"))
