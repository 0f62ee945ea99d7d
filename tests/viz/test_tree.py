"""The picture of the radix tree, by its structure."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minikv import report
from minikv.errors import ArgumentError
from minikv.prefix import RadixCache
from minikv.viz import dot, example, tree, tree_frames, tree_view

GOLDEN = """\
Radix tree: 4 nodes, 20 tokens in 5 pages of 4, 16 locked
root
└─ [You·are·a·kind·helper·.·Answer·in]  8 tokens, pages 1 2, 4 hits, locked 2, used 7, requests A C
   ├─ [one·line·Why·cache]  4 tokens, pages 3, 0 hits, locked 1, used 2, requests A
   ├─ [one·line·How·big]  4 tokens, pages 5, 0 hits, used 5
   └─ [one·line·Why·pages]  4 tokens, pages 6, 0 hits, locked 1, used 7, requests C"""


def _draw(running, **options):
    return tree.draw(running.cache, decode=example.decode, requests=running.requests, **options)


def test_the_running_example_as_text(running) -> None:
    import re

    drawn = re.sub(r"used \d+", "used n", str(_draw(running)))
    drawn = re.sub(r"\d+ hits?", "n hits", drawn)
    golden = re.sub(r"\d+ hits?", "n hits", re.sub(r"used \d+", "used n", GOLDEN))
    assert drawn == golden


def test_the_running_example_as_svg(running, look) -> None:
    seen = look(_draw(running))
    assert seen.marks("token") == {"plain": 20}
    assert seen.marks("page") == {"1": 1, "2": 1, "3": 1, "5": 1, "6": 1}
    assert seen.marks("lock") == {"2": 1, "1": 2, "n": 1}  # n: in the legend
    assert seen.marks("node") == {"1": 4}
    assert seen.marks("root") == {"1": 1}
    assert "slots 4–7" in seen.texts
    assert len(seen.ids) == len(set(seen.ids)) == 2


def test_the_data_holds_what_is_drawn(running) -> None:
    rows = _draw(running).table()
    assert [row["tokens"] for row in rows] == [8, 4, 4, 4]
    assert rows[0]["pages"] == "1 2"
    assert rows[0]["requests"] == "A C"
    assert [row["depth"] for row in rows] == [0, 1, 1, 1]


def test_marked_nodes_are_solid_hatched_and_struck(running, look) -> None:
    nodes = [n for n in running.cache.nodes() if len(n.key)]
    top = next(n for n in nodes if len(n.key) == 8)
    leaves = [n for n in nodes if n is not top]
    seen = look(_draw(running, reused=[top], computed=leaves[:1], evicted=leaves[1:2], who="C"))
    assert seen.marks("token") == {"reused": 8, "computed": 4, "evicted": 4, "plain": 4}
    half = look(_draw(running, reused=[top], reused_tokens=5))
    assert half.marks("token") == {"reused": 5, "plain": 15}


@pytest.mark.parametrize("by", ["recency", "hits", "owner"])
def test_colour_is_never_alone(running, look, by: str) -> None:
    seen = look(_draw(running, colour_by=by))
    assert "node colour" in seen.words
    assert all(
        any(f"used {n.last_use}" in t for t in seen.texts)
        for n in running.cache.nodes()
        if len(n.key)
    )


def test_an_unknown_colouring_names_the_choices(running) -> None:
    with pytest.raises(ArgumentError, match="recency"):
        tree.draw(running.cache, colour_by="size")


def test_a_cache_draws_itself_without_html(running) -> None:
    bundle = running.cache._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert "4 nodes, 20 tokens" in bundle["text/plain"]


def test_a_cache_may_bring_its_own_texts() -> None:
    cache = RadixCache(2)
    cache.insert([1, 2])
    cache.decode = example.decode  # type: ignore[attr-defined]
    assert "[You·are]" in cache._repr_mimebundle_()["text/plain"]


def test_in_a_terminal_it_is_text(running) -> None:
    code = (
        "from minikv.prefix import RadixCache\nfrom minikv.viz import tree\n"
        "c = RadixCache(2); c.insert([1, 2, 3, 4]); print(tree.draw(c))"
    )
    out = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[1:] == ["root", "└─ [1·2·3·4]  4 tokens, pages 1 2, 0 hits, used 1"]


def test_drawing_needs_neither_matplotlib_nor_widgets() -> None:
    code = (
        "import sys; from minikv.viz import tree, pages, requests\n"
        "print([m for m in ('matplotlib', 'ipywidgets', 'IPython', 'triton') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_namespaces_are_roots_of_their_own(look) -> None:
    cache = RadixCache(2)
    for space in (None, "lora:a", ("t", 1), "", 1, True):
        cache.insert([1, 2, 3, 4], namespace=space)
    seen = look(tree.draw(cache))
    assert seen.marks("root") == {"1": 6}
    assert {"root", "lora:a"} <= set(seen.texts)
    text = str(tree.draw(cache))
    assert "namespace 'lora:a'" in text
    assert text.index("root") < text.index("namespace")


def test_ten_thousand_nodes_fold(big_tree, look) -> None:
    drawing = tree.draw(big_tree, decode=example.WORDS, colour_by="recency")
    seen = look(drawing)
    assert seen.marks("node")["1"] <= 42
    assert len(drawing.svg) < 200_000
    assert len(drawing.text.splitlines()) < 120
    shown = sum(1 for row in drawing.data)
    hidden = sum(int(t.split()[0][1:].replace(",", "")) for t in seen.texts if t.startswith("+"))
    assert shown + hidden == 10_000  # every node is drawn or counted


def test_folding_counts_every_token(big_tree) -> None:
    roots = tree_view.read(big_tree)
    whole = sum(i.tokens for r in roots for i in tree_view.walk(r))
    for limit, siblings in ((1, 1), (5, 2), (200, 3), (20_000, 10_000)):
        kept = tree_view.fold(roots, limit, siblings)
        assert sum(i.tokens for r in kept for i in tree_view.walk(r)) == whole


def test_a_long_chain_folds_in_the_middle() -> None:
    cache = RadixCache(1)
    for end in range(1, 1000):
        cache.insert(range(end))
    text = str(tree.draw(cache))
    assert "+997 more nodes, 997 tokens" in text
    assert len(text.splitlines()) == 5


def test_many_siblings_become_more(look) -> None:
    cache = RadixCache(1)
    for i in range(100):
        cache.insert([i])
    drawing = tree.draw(cache, max_siblings=8)
    assert "+92 more nodes, 92 tokens" in drawing.text
    assert look(drawing).marks("node") == {"1": 8}


def test_an_empty_tree(look) -> None:
    assert "empty" in str(tree.draw(RadixCache(4)))
    assert look(tree.draw(RadixCache(4))).marks("token") == {}


@pytest.mark.parametrize("text", ["<s>", "&", '"', "\\", "\x00", "日本", "👩‍👩‍👧", "a\\", "x\ny"])
def test_any_token_text_in_tree_and_terminal(text: str, look) -> None:
    cache = RadixCache(1)
    cache.insert([0, 1])
    drawing = tree.draw(cache, decode=[text, "b"])
    assert look(drawing).marks("token") == {"plain": 2}
    assert len(drawing.text.splitlines()) == 3
    assert drawing.text.isprintable() or "\n" in drawing.text


def test_frames_of_a_recording_show_each_event(look) -> None:
    cache = RadixCache(4)
    with cache.record() as recorder:
        for tokens in example.REQUESTS.values():
            cache.match_prefix(tokens[:-1])
            cache.insert(tokens)
        cache.evict(4)
    frames = tree_frames.frames(recorder, decode=example.decode)
    assert len(frames) == 1 + len(recorder.events)
    assert look(frames[2]).marks("token") == {"computed": 12}
    assert look(frames[-1]).marks("token")["evicted"] == 4
    assert "C inserts 12 tokens, 8 were there" in frames[-2].desc
    assert look(frames[-2]).marks("token") == {"reused": 8, "computed": 4, "plain": 8}


# ---------------------------------------------------------------------------------------- Graphviz


# What Graphviz says about this machine's fonts; the graph itself raises no warning.
FONTS = re.compile(r"font|metrics|fallback|width of non-ASCII", re.IGNORECASE)
WARNING = "Warning: no hard-coded metrics for 'monospace'.  Falling back to 'Times' metrics"


def _plain(source: str) -> list[list[str]]:
    works = [p for p in report.dot_programs() if dot._laid_out("digraph {}", p)]
    if not works:
        pytest.skip("no Graphviz program that works")
    out = subprocess.run(
        [works[0], "-Tplain"], input=source, capture_output=True, text=True, encoding="utf-8"
    )
    assert out.returncode == 0, out.stderr
    about_the_graph = [line for line in out.stderr.splitlines() if not FONTS.search(line)]
    assert not about_the_graph
    return [line.split() for line in out.stdout.splitlines()]


def test_b131_colons_make_no_ports() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2], namespace="lora:a")
    cache.insert([3], namespace="req:1")
    lines = _plain(dot.graph(cache).source)
    names = [line[1] for line in lines if line[0] == "node"]
    assert sorted(names) == ["n0", "n1", "n2", "n3"]
    assert len([line for line in lines if line[0] == "edge"]) == 2


@pytest.mark.parametrize(
    "text", ["\\", '"', "a\\", "x\ny", "<b>", "<s>", "&", "{a|b}", "日本", "\x00"]
)
def test_b132_labels_are_literal(text: str) -> None:
    cache = RadixCache(1)
    cache.insert([0])
    _plain(dot.graph(cache, decode=[text]).source)
    drawing = dot.draw(cache, decode=[text])
    import xml.etree.ElementTree as ET

    words = [e.text for e in ET.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}text")]
    from minikv.viz.style import token_text

    assert token_text(text).replace(" ", "\xa0") in [(w or "").replace(" ", "\xa0") for w in words]


def test_without_dot_there_is_text_and_one_hint(monkeypatch) -> None:
    monkeypatch.setattr(dot, "dot_programs", list)
    cache = RadixCache(1)
    cache.insert([1])
    drawing = dot.draw(cache)
    assert str(drawing).count("pip install graphviz-pure") == 1
    assert "<svg" in drawing.svg


def test_the_wheels_graphviz_will_do(monkeypatch) -> None:
    pure = shutil.which("graphviz-pure", path=str(sys.prefix) + "/bin")
    if pure is None:
        pytest.skip("graphviz-pure is not installed")
    monkeypatch.setattr(dot, "dot_programs", lambda: [pure])
    cache = RadixCache(1)
    cache.insert([1, 2])
    assert 'role="img"' in dot.draw(cache).svg


BROKEN = {
    "fails": "#!/bin/sh\necho 'no such library' >&2\nexit 1\n",
    "fails after half a picture": "#!/bin/sh\necho '<svg'\nexit 139\n",
    "says nothing": "#!/bin/sh\nexit 0\n",
    "hangs": "#!/bin/sh\nexec sleep 600\n",
    "is no program": "\x7fELF, but not for this machine",
}


def _first_on_the_path(monkeypatch, folder: Path, text: str) -> str:
    program = folder / "dot"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return str(program)


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_n30_a_broken_dot_is_passed_over(text: str, monkeypatch, tmp_path) -> None:
    broken = _first_on_the_path(monkeypatch, tmp_path, text)
    monkeypatch.setattr(dot, "PATIENCE", 10 if "sleep" not in text else 0.5)
    cache = RadixCache(1)
    cache.insert([1, 2])
    assert report.dot_program() == broken
    [_, *others] = report.dot_programs()
    if others:
        assert "laid out by Graphviz" in dot.draw(cache).desc
    monkeypatch.setattr(dot, "dot_programs", lambda: [broken])
    drawing = dot.draw(cache)
    assert str(drawing).count("pip install graphviz-pure") == 1
    assert "2 tokens" in str(drawing)
    assert "<svg" in drawing.svg


def test_p01_a_warning_from_dot_is_no_fault(monkeypatch, tmp_path, capfd) -> None:
    picture = "<svg viewBox='0 0 1 1'></svg>".replace("'", chr(92) + '"')
    says = f'cat >/dev/null\necho "{WARNING}" >&2\necho "{picture}"\n'
    _first_on_the_path(monkeypatch, tmp_path, "#!/bin/sh\n" + says)
    cache = RadixCache(1)
    cache.insert([1, 2])
    drawing = dot.draw(cache)
    assert 'viewBox="0 0 1 1"' in drawing.svg
    assert "pip install" not in str(drawing)
    assert capfd.readouterr() == ("", "")
    assert FONTS.search(WARNING)


@pytest.mark.parametrize(
    "said", ["Warning: node lora, port a, unrecognized", "Error: bad label format {a|b}"]
)
def test_p01_warnings_about_the_graph_count(said: str) -> None:
    assert not FONTS.search(said)


def test_objects_without_slots_are_drawn(look) -> None:
    root = SimpleNamespace(key=[], parent=None)
    node = SimpleNamespace(key=[5, 6], slots=None, parent=root, lock_count=0, hit_count=0)
    seen = look(tree.draw(SimpleNamespace(page_size=2, nodes=lambda: [root, node])))
    assert seen.marks("token") == {"plain": 2}
