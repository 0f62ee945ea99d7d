"""The legend, the drawing, and text that no picture may stumble over."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas

NASTY = [
    "<s>",
    "a & b",
    'say "hi"',
    "it's",
    "back\\slash",
    "a\\",
    "\x00\x07\x1b[31m",
    "\ud800",
    "\u202eevil",
    "\ufffe",
    "日本語",
    "👩‍👩‍👧",
    "e\u0301",
    " ",
    "\n",
    "\t",
    "",
    "]]>",
    "--",
    "{x}",
    "%d",
]


def test_the_legend_shows_every_mark(look) -> None:
    seen = look(style.legend())
    assert set(seen.marks("legend")) == set(style.LEGEND)
    assert {"request A", "request B", "request C"} <= set(seen.texts)


def test_a_drawing_is_accessible_and_offers_no_html() -> None:
    drawing = style.legend()
    root = ET.fromstring(drawing.svg)
    assert root.get("role") == "img"
    assert root.get("viewBox")
    assert root.get("width") is None
    assert root.get("height") is None
    title, desc = root[0], root[1]
    assert title.tag.endswith("title")
    assert desc.tag.endswith("desc")
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert (title.text, desc.text) == (drawing.title, drawing.desc)
    assert set(drawing._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}


def test_ids_are_unique_even_for_equal_figures(look) -> None:
    ids = look(style.legend()).ids + look(style.legend()).ids
    figure, axes = style.chart("t", "x (s)", "y (m)")
    axes.plot([1, 2])
    chart = style.finish_chart(figure, "d")
    ids += look(chart).ids + look(style.finish_chart(figure, "d")).ids
    assert len(ids) == len(set(ids))
    assert chart.svg.count("<title") == 1
    assert "<metadata" not in chart.svg


def test_no_style_sheet_pattern_or_foreign_link_stands_in_a_canvas(running) -> None:
    from minikv.viz import tree

    svg = tree.draw(running.cache).svg
    for word in ("<style", "url(", "<defs", "href", "<script", "foreignObject"):
        assert word not in svg


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_legal_and_stays_one_token(text: str, look) -> None:
    canvas = Canvas(text, text)
    canvas.token(10, 60, text, "computed", style.request("A"), tip=text)
    seen = look(canvas.finish(text))
    assert seen.marks("token") == {"computed": 1}


def test_white_space_and_controls_are_visible() -> None:
    assert style.token_text(" a\tb\n") == "·a⇥b↵"
    assert style.token_text("\x07\ud800\u202e") == "\\x07\\ud800\\u202e"
    assert style.token_text("👩‍👩‍👧日e\u0301") == "👩‍👩‍👧日e\u0301"


def test_shortening_counts_wide_characters_and_keeps_marks() -> None:
    assert style.columns("日本") == 4
    assert style.shorten("日本語です", 5) == "日本…"
    assert style.shorten("e\u0301e\u0301e\u0301e\u0301", 3) == "e\u0301e\u0301…"
    assert style.shorten("abc", 3) == "abc"


def test_requests_have_letters_beyond_the_colours() -> None:
    looks = [style.request(i) for i in range(30)]
    assert len({r.letter for r in looks}) == 30
    assert looks[26].letter == "AA"
    assert all(style.request(r.letter) == r for r in looks)
    for r in looks:
        a, b = sorted((style.luminance(r.colour), style.luminance(r.ink)))
        assert (b + 0.05) / (a + 0.05) >= 4.5


def test_text_on_the_card_contrasts() -> None:
    for ink in (style.INK, style.MUTED, "#a34700"):
        assert (style.luminance(style.PAPER) + 0.05) / (style.luminance(ink) + 0.05) >= 4.5


def test_nothing_is_cut_off_by_the_card(look) -> None:
    canvas = Canvas("t", "d")
    canvas.text(2000, 900, "far away")
    canvas.rect(10, 10, 3000, 5, fill="#ffffff")
    box = look(canvas.finish("")).root.get("viewBox").split()
    assert float(box[2]) >= 3010
    assert float(box[3]) >= 900


def test_saving_and_the_table(tmp_path) -> None:
    drawing = style.legend()
    assert drawing.save(tmp_path / "a.svg").read_text(encoding="utf-8") == drawing.svg
    assert drawing.save(tmp_path / "a.txt").read_text(encoding="utf-8") == repr(drawing) + "\n"
    with pytest.raises(ArgumentError, match=r"saved as \.svg"):
        drawing.save(tmp_path / "a.html")
    assert str(style.Table([{"a": 1, "b": "日"}, {"a": 22}])) == "a   b\n--  --\n1   日\n22"
    assert drawing.table()[0]["mark"] == "plain"
