"""Every picture of the running example, exact in its structure: words, marks and their nesting, no
coordinates.

The expected outlines stand in ``golden/``. After a wanted change delete the file, run twice, and
read the diff.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from minikv.viz import (
    attention,
    batch,
    example,
    memory_over_time,
    pages,
    requests,
    roofline,
    style,
    tiles,
    tree,
)
from minikv.viz.style import Drawing

GOLDEN = Path(__file__).parent / "golden"
SPEECH = {"decode": example.decode, "page_size": example.PAGE_SIZE}
LEVELS = {
    "contiguous": [
        {"used": 13, "reserved": 20, "external": 4},
        {"used": 26, "reserved": 34, "external": 8},
        {"used": 13, "reserved": 20},
    ],
    "pages": [
        {"used": 13, "internal": 3},
        {"used": 26, "internal": 6},
        {"used": 13, "internal": 3},
    ],
}
WORK = [
    {"name": "decode, 1 request", "intensity": 1.1, "flops": 4.0e12},
    {"name": "prefill of 4,096", "intensity": 3960.0, "flops": 7.0e14},
]


def _pictures(running) -> dict[str, Drawing | list[Drawing]]:
    """The running example, or fixed numbers where it has none, as each picture shows it."""
    live = {"requests": running.requests, "table": running.table}
    speech = {"decode": example.decode}
    return {
        "legend": style.legend(),
        "tree": tree.draw(running.cache, requests=running.requests, **speech),
        "page_map": pages.draw(running.allocator, cache=running.cache, **live, **speech),
        "page_table": pages.page_table(
            running.allocator, who="C", cache=running.cache, **live, **speech
        ),
        "request_rows": requests.draw(running.table, requests=running.requests, **SPEECH),
        "block_table": requests.block_table(
            running.requests, example.PAGE_SIZE, table=running.table
        ),
        "ragged_batch": batch.draw(
            [0, 13, 18, 19], [0, 0, 8, 21], [*range(4, 12), *range(4, 17)], page_size=4
        ),
        "attention_triangle": attention.draw(5, 4, sliding_window=6, tile=(4, 4)),
        "tile_walk": tiles.walk([1.0, 2.0, float("-inf"), 0.0, 3.0], [[1.0, 0.0]] * 5, tile=2),
        "roofline": roofline.draw(WORK, bandwidth=4e12, peak=7.5e14),
        "memory_over_time": memory_over_time.draw(LEVELS, 48),
    }


NAMES = ["legend", "tree", "page_map", "page_table", "request_rows", "block_table", "ragged_batch"]
NAMES += ["attention_triangle", "tile_walk", "roofline", "memory_over_time"]


def _outline(drawing: Drawing) -> Iterator[str]:
    """Title, description and text form; then words and marks as they are nested in the SVG."""
    yield from (f"title: {drawing.title}", f"desc: {drawing.desc}", "", "as text:")
    yield from (f"  {line}".rstrip() for line in drawing.text.splitlines())
    yield from ("", "as SVG:")
    yield from _inside(ET.fromstring(drawing.svg), "  ")


def _inside(element: ET.Element, indent: str) -> Iterator[str]:
    for child in element:
        tag = child.tag.rpartition("}")[2]
        marks = " ".join(
            f"{k.removeprefix('data-')}={v}"
            for k, v in sorted(child.items())
            if k.startswith("data-")
        )
        words = "".join(child.itertext()).strip() if tag == "text" else ""
        if "tick_" in child.get("id", ""):
            continue  # the numbers of a chart's axis
        if marks:
            yield f"{indent}{tag} {marks}"
        elif words:
            yield f"{indent}{words!r}"
        elif tag == "title" and indent != "  ":
            yield f"{indent}tip {child.text!r}"
        yield from _inside(child, indent + "  " if marks else indent)


@pytest.mark.parametrize("name", NAMES)
def test_golden_structure(name: str, running) -> None:
    found = _pictures(running)
    assert list(found) == NAMES
    drawings = found[name] if isinstance(found[name], list) else [found[name]]
    got = "\n\n--------\n\n".join("\n".join(_outline(d)) for d in drawings) + "\n"
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(got, encoding="utf-8")
        pytest.fail(f"{path} was missing and has been written: read it, then commit it")
    assert got == path.read_text(encoding="utf-8")
    for drawing in drawings:
        root = ET.fromstring(drawing.svg)
        assert [child.tag.rpartition("}")[2] for child in root[:2]] == ["title", "desc"]
        assert len(drawing.title) > 5
        assert len(drawing.desc) > 20
