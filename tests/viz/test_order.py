"""The picture of an order of requests."""

from __future__ import annotations

from types import SimpleNamespace

from minikv.viz import example, order


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
