"""Player, calculator, playground and inspector without a browser: links, subscriptions, size,
errors."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import pytest

from minikv.errors import ArgumentError, StateError
from minikv.viz import calculator, example, inspector, style, tiles
from minikv.viz.player import Player
from minikv.viz.playground import Playground
from minikv.viz.widgets import Live

PROMPTS = [" ".join(example.WORDS[t] for t in tokens) for tokens in example.REQUESTS.values()]


def _frames(count: int = 4):
    return tiles.walk([0.0] * count, [[1.0]] * count, tile=1)


# ------------------------------------------------------------------------------------------ player


def test_the_player_is_linked_in_the_browser_only() -> None:
    player = Player(_frames())
    links = {
        (a.__class__.__name__, x, b.__class__.__name__, y)
        for a, x, b, y in ((*k.source, *k.target) for k in player.links)
    }
    assert links == {
        ("Play", "value", "IntSlider", "value"),
        ("Stepper", "value", "IntSlider", "value"),
        ("IntSlider", "value", "Stack", "selected_index"),
    }
    assert all(isinstance(link, ipywidgets.widgets.widget_link.Link) for link in player.links)
    for part in (player.play, player.slider, player.stepper, player.stack):
        ours = [
            f
            for by in part._trait_notifiers.values()
            for fs in by.values()
            for f in fs
            if "minikv" in f"{f}"
        ]
        assert ours == []  # nothing calls Python


def test_all_frames_are_there_before_anything_is_clicked(look) -> None:
    player = Player(_frames())
    assert len(player.stack.children) == len(player) == 5
    assert player.slider.max == player.play.max == player.stepper.max == 4
    ids = [i for frame in player.frames for i in look(frame).ids]
    assert len(ids) == len(set(ids))
    assert all(
        frame.svg in child.value
        for frame, child in zip(player.frames, player.stack.children, strict=True)
    )


def test_the_static_picture_is_outside() -> None:
    frames = _frames()
    assert Player(frames).static is frames[-1]
    assert Player(frames, static=0).static is frames[0]
    assert "player of 5 frames" in repr(Player(frames))
    with pytest.raises(ArgumentError, match="at least one"):
        Player([])


def test_without_jupyterlab_a_widget_is_a_sentence(running) -> None:
    shown = [
        Player(_frames()).widget,
        calculator.widget().widget,
        Playground().widget,
        inspector.Inspector(running.cache, decode=example.WORDS).widget,
    ]
    for widget in shown:
        bundle = widget._repr_mimebundle_()  # anywidget's comes with metadata
        text = (bundle if isinstance(bundle, dict) else bundle[0])["text/plain"]
        assert text.startswith("(in JupyterLab: ")
        assert text.endswith(")"), "longer than ipywidgets shows"


def test_scripts_come_from_no_network() -> None:
    for script in (inspector.TreeWidget._esm, Player(_frames()).stepper._esm):
        assert "http" not in str(script)
        assert "import " not in str(script)


# ----------------------------------------------------------------------------------- live pictures


def _counting():
    calls = []

    def draw(x: int):
        calls.append(x)
        if x < 0:
            raise ArgumentError("x", x, "must not be negative")
        return style.Drawing("<svg/>", f"{x}", "t", "d")

    return draw, calls


def test_b126_running_the_cell_again_draws_once_per_change() -> None:
    draw, calls = _counting()
    slider = ipywidgets.IntSlider(1)
    for _ in range(3):
        live = Live(draw, x=slider)
    calls.clear()
    slider.value = 5
    assert calls == [5]
    assert repr(live) == "5"


def test_b129_only_the_named_trait_calls() -> None:
    draw, calls = _counting()
    slider = ipywidgets.IntSlider(1)
    Live(draw, x=slider)
    calls.clear()
    slider.set_state({"value": 8})
    assert calls == [8]
    slider.max, slider.description = 50, "other"
    assert calls == [8]


def test_b129_every_subscription_names_its_trait() -> None:
    found = 0
    for path in Path(inspector.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
                "observe",
                "unobserve",
            ):
                found += 1
                assert "names" in {word.arg for word in node.keywords}, f"{path.name}:{node.lineno}"
    assert found >= 3


def test_b128_two_hundred_redraws_keep_the_size() -> None:
    live = calculator.widget()
    sizes = set()
    for i in range(200):
        live.controls["batch"].value = 2 ** (i % 2 + 3)
        assert len(live.errors.outputs) <= 1
        if i % 2:
            sizes.add(len(json.dumps({"p": live.picture.value, "o": live.errors.outputs})) // 100)
    assert len(sizes) <= 2  # only the digits of an id change
    assert len(live.widget.children) == 3


def test_b128_errors_do_not_pile_up() -> None:
    draw, _ = _counting()
    slider = ipywidgets.IntSlider(1, min=-300)
    live = Live(draw, x=slider)
    for i in range(1, 201):
        slider.value = -i
        assert len(live.errors.outputs) == 1
    assert "must not be negative" in live.errors.outputs[0]["text"]
    assert repr(live) == "1"  # the last good picture stays
    slider.value = 2
    assert live.errors.outputs == ()


# -------------------------------------------------------------------------------------- playground


def test_the_playground_matches_splits_and_shares(look) -> None:
    ground = Playground(prompts=PROMPTS)
    assert ground.log == [
        "A: 0 of 13 tokens reused, 12 more stored, 1 do not fill a page of 4",
        "B: 8 of 13 tokens reused, 4 more stored, 1 do not fill a page of 4, a node was split",
        "C: 8 of 13 tokens reused, 4 more stored, 1 do not fill a page of 4",
    ]
    assert look(ground.drawing).marks("token") == {"reused": 8, "computed": 4, "plain": 8}
    assert len(ground.steps()) == 3  # before, match, insert


def test_a_preview_changes_nothing(look) -> None:
    ground = Playground(prompts=PROMPTS)
    before, nodes = ground.cache.stats.lookups, len(list(ground.cache.nodes()))
    ground.prompt.value = "You are a kind helper"
    assert (ground.cache.stats.lookups, len(list(ground.cache.nodes()))) == (before, nodes)
    assert look(ground.drawing).marks("token")["reused"] == 4
    assert "5 tokens, 4 of them cached" in ground.drawing.desc


def test_a_full_pool_evicts_leaf_by_leaf(look) -> None:
    ground = Playground(pages=6, prompts=PROMPTS[:2])
    ground.run(PROMPTS[2], hold=True)
    ground.run("some thing quite new and it takes")
    assert "evicted" not in ground.log[-1]
    ground.run("another thing quite new")
    assert ground.log[-1].endswith("4 tokens evicted")
    struck = ground.evict_one()
    assert look(struck).marks("token")["evicted"] == 4
    ground.cache.check()


def test_locked_pages_are_refused_with_a_remedy() -> None:
    ground = Playground(pages=4)
    ground.run(PROMPTS[0], hold=True)
    with pytest.raises(StateError, match="finish a request"):
        ground.run("eight words that are all of them new")
    assert ground.allocator.available_size() == 4
    with pytest.raises(StateError, match="nothing can be evicted"):
        ground.evict_one()
    ground.finish()
    ground.run("eight words that are all of them new")
    ground.cache.check()


def test_buttons_show_errors_beside_the_picture() -> None:
    ground = Playground()
    ground.buttons["evict"].click()
    assert "nothing can be evicted" in ground.errors.outputs[0]["text"]
    ground.prompt.value = "one two three four"
    assert ground.errors.outputs == ()
    ground.buttons["run"].click()
    assert "0 of 4 tokens reused" in ground.log[-1]
    ground.buttons["reset"].click()
    assert ground.log == []


def test_b128_the_playground_keeps_its_size_over_200_redraws() -> None:
    ground = Playground(pages=8)
    sizes = []
    for i in range(200):
        ground.prompt.value = PROMPTS[i % 3]
        ground.run(PROMPTS[i % 3])
        assert len(ground.errors.outputs) <= 1
        sizes.append(len(ground._live.picture.value))
    assert max(sizes[100:]) <= max(sizes[3:100]) + 300  # counters gain digits, nothing else grows
    assert len(ground.prompt._trait_notifiers["value"]["change"]) == 1


def test_a_real_tokenizers_bytes_are_drawn(look) -> None:
    tokenizer = SimpleNamespace(
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode("utf-8", "replace"),
    )
    ground = Playground(tokenizer, page_size=2)
    assert look(ground.run("é日<&")).marks("token") == {"computed": 6}


# --------------------------------------------------------------------------------------- inspector


def test_the_inspector_reads_ten_thousand_nodes(big_tree) -> None:
    seen = inspector.Inspector(big_tree, decode=example.WORDS)
    columns = seen.widget.nodes
    assert {len(c) for c in columns.values()} == {10_000}
    assert sum(columns["tokens"]) == sum(len(n.key) for n in big_tree.nodes())
    assert seen.static.text.startswith("Radix tree: 10,000 nodes")
    hits = seen.search("kind helper")
    assert hits
    assert all("kind helper" in columns["search"][i] for i in hits)


def test_choosing_a_node_tells_all_about_it(running) -> None:
    seen = inspector.Inspector(
        running.cache, decode=example.decode, requests=running.requests, colour_by="owner"
    )
    leaf = seen.search("pages")[0]
    seen.widget.selected = leaf
    detail = seen.widget.detail
    assert detail["id"] == leaf
    assert detail["facts"]["text"] == "one line Why pages"
    assert detail["facts"]["token ids"] == "9 10 11 16"
    assert seen.widget.nodes["owner"][leaf] == "C"
    assert seen.widget.nodes["locks"][leaf] == 1
    json.dumps(seen.widget.nodes)


def test_the_inspector_refuses_an_unknown_colouring(running) -> None:
    with pytest.raises(ArgumentError, match="recency"):
        inspector.Inspector(running.cache, colour_by="size")
