"""The radix tree as a Graphviz graph, for those who want to lay it out, style it or export it
themselves.

A system ``dot`` is used when there is one and it works, else the program that the wheel
``graphviz-pure`` brings, else the drawing is its text. Ids are plain (``n0``, ``n1`` …), since a
colon in an id would mean a port; all text stands in labels, escaped.
"""

from __future__ import annotations

import subprocess
from typing import Any

from minikv.report import dot_programs
from minikv.viz import style
from minikv.viz.canvas import Canvas, next_id
from minikv.viz.live import Texts
from minikv.viz.style import Drawing, many
from minikv.viz.tree_view import as_text, fold, gap_text, label, read, walk

HINT = "no Graphviz program that works was found; to draw with it: pip install graphviz-pure"
PATIENCE = 60  # seconds that a program may take


def graph(
    cache: Any,
    *,
    decode: Any = None,
    requests: Any = None,
    max_nodes: int = 60,
    max_siblings: int = 12,
) -> Any:
    """The tree as a ``graphviz.Digraph`` (parameters as in :func:`minikv.viz.tree.draw`)."""
    import graphviz

    texts, ids = Texts(decode), {}
    made = graphviz.Digraph(
        graph_attr={"rankdir": "LR", "bgcolor": style.PAPER, "fontname": "sans-serif"},
        node_attr={
            "shape": "box",
            "style": "rounded,filled",
            "fillcolor": style.SHADE,
            "fontname": "monospace",
        },
        edge_attr={"color": style.NEUTRAL},
    )
    for root in fold(read(cache, requests), max_nodes, max_siblings):
        for item in walk(root):
            ids[id(item)] = name = f"n{len(ids)}"
            if item.folded:
                made.node(name, literal(gap_text(item)), style="dashed")
            elif item.node is None:
                made.node(
                    name,
                    literal("root" if root.namespace is None else str(root.namespace)),
                    shape="oval",
                )
            else:
                facts = f"{many(item.tokens, 'token')}, {many(item.hits, 'hit')}"
                facts += f", locked {item.locks}" if item.locks else ""
                made.node(name, literal(label(item, texts, 36)) + r"\n" + literal(facts))
            if item.parent is not None:
                made.edge(ids[id(item.parent)], name)
    return made


def literal(text: str) -> str:
    """A label that shows `text` as it is: backslashes, quotes and a leading ``<`` mean nothing to
    Graphviz.

    Examples
    --------
    >>> print(literal("a" + chr(92)), literal("<s>"))
    a\\\\ <s>
    """
    import graphviz

    return graphviz.nohtml(graphviz.escape("".join(style._visible(c) for c in text)))


def draw(
    cache: Any,
    *,
    decode: Any = None,
    requests: Any = None,
    title: str = "Radix tree",
    **options: Any,
) -> Drawing:
    """Draw the tree with Graphviz; without a program that works the drawing is its text, with one
    hint."""
    roots = fold(
        read(cache, requests), options.get("max_nodes", 60), options.get("max_siblings", 12)
    )
    text = as_text(title, roots, Texts(decode), cache.page_size)
    programs = dot_programs()
    source = graph(cache, decode=decode, requests=requests, **options).source if programs else ""
    body = next(filter(None, (_laid_out(source, program) for program in programs)), None)
    if body is None:
        canvas = Canvas(title, HINT, subtitle=HINT)
        for i, line in enumerate(text.splitlines()):
            canvas.text(canvas.margin, canvas.top + 14 + 18 * i, line, mono=True, size=11.5)
        return canvas.finish(f"{text}\n({HINT})", [])
    desc = f"Prefix tree of {sum(r.subtree_nodes for r in roots)} nodes, laid out by Graphviz."
    return Drawing(_own(body, title, desc), text, title, desc, [])


def _laid_out(source: str, program: str) -> str | None:
    """The graph as SVG; None when the program does not start, fails, hangs or gives no SVG."""
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=source.encode(), capture_output=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    body = done.stdout.decode(errors="replace")
    return body if done.returncode == 0 and "</svg>" in body else None


def _own(body: str, title: str, desc: str) -> str:
    """Graphviz's SVG with our title and description, ids of its own and no fixed width."""
    import re

    body, mark = body[body.index("<svg") :], next_id(body)
    body = re.sub(r'\bid="', f'id="{mark}-', body)
    body = re.sub(r"<title>[^<]*</title>\n?", "", body)
    head = re.search(r'viewBox="([\d. ]+)"', body)
    assert head is not None
    return re.sub(
        r"<svg [^>]*>",
        lambda _: (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'{head[0]} role="img" '
            f'aria-labelledby="{mark}-t {mark}-d" style="width:100%;max-width:860px">'
            f'<title id="{mark}-t">{style.clean(title)}</title><desc '
            f'id="{mark}-d">{style.clean(desc)}</desc>'
        ),
        body,
        count=1,
    ).strip()
