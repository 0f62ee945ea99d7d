"""The picture of an order of requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minikv.errors import ArgumentError
from minikv.viz import example, order, reorder, widgets


def test_reused_and_computed_tokens_are_drawn_and_counted(look) -> None:
    runs = {
        "C": SimpleNamespace(token_ids=[*example.REQUESTS["C"], 5], prompt_len=13, cached_tokens=0),
        "A": SimpleNamespace(token_ids=example.REQUESTS["A"], cached_tokens=8),
    }
    drawing = order.draw(runs, decode=example.decode, least=18)
    seen = look(drawing)
    assert seen.marks("token") == {"computed": 18, "reused": 8}
    assert {"13 computed", "5 computed"} <= set(seen.texts)
    assert "18 of 26 tokens computed; no order needs fewer than 18" in drawing.desc
    assert [row["request"] for row in drawing.table()] == ["C", "A"]
    assert len(seen.ids) == len(set(seen.ids))


def test_long_prompts_are_cut_and_none_is_an_empty_card(look) -> None:
    long = look(order.draw([SimpleNamespace(token_ids=range(100), cached_tokens=60)]))
    assert long.marks("token") == {"reused": order.MOST}
    assert f"… {100 - order.MOST} more, 40 computed" in long.texts
    assert "0 requests" in order.draw([]).text


def test_an_order_that_the_reader_changes_is_drawn_again() -> None:
    control, seen = reorder.Reorder("BAC"), []

    def draw(order):
        seen.append("".join(order))
        return example_drawing(order)

    def example_drawing(letters):
        return order.draw(
            {c: SimpleNamespace(token_ids=example.REQUESTS[c], cached_tokens=0) for c in letters}
        )

    live = widgets.Live(draw, order=control)
    control.value = ["A", "B", "C"]
    assert seen == ["BAC", "ABC"]
    assert [row["request"] for row in live.drawing.table()] == ["A", "B", "C"]
    assert control.looks["B"] == ["#E69F00", "#000000"]


def test_only_orders_of_the_same_letters_are_taken() -> None:
    control = reorder.Reorder("ABC")
    for wrong in (["A", "B"], ["A", "B", "B"], ["A", "B", "D"]):
        with pytest.raises(ArgumentError, match="not an order of A B C"):
            control.value = wrong
    assert control.value == ["A", "B", "C"]
    with pytest.raises(ArgumentError, match="once"):
        reorder.Reorder("ABA")
