"""Looking into a tree of thousands of nodes: search by text, open nodes by mouse or keyboard, see
all about one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from minikv.errors import ArgumentError
from minikv.viz import style, tree
from minikv.viz.live import Texts, ints
from minikv.viz.style import Drawing
from minikv.viz.tree_view import Item, read, walk

SNIPPET, SEARCHED, SHOWN = 60, 400, 4000
COLUMNS = (
    "parent",
    "text",
    "search",
    "tokens",
    "pages",
    "locks",
    "hits",
    "last",
    "namespace",
    "owner",
    "colour",
)


class TreeWidget(anywidget.AnyWidget):
    """The tree in the browser; it asks Python only for the whole text and slots of a chosen
    node."""

    _esm = Path(__file__).with_name("inspector.js").read_text(encoding="utf-8")
    nodes = traitlets.Dict().tag(sync=True)
    colour_by = traitlets.Unicode("last").tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    detail = traitlets.Dict({"id": -1, "facts": {}}).tag(sync=True)

    def __repr__(self) -> str:
        return "(in JupyterLab: search this tree by text, open its nodes)"


class Inspector:
    """A tree that can be searched and opened, with a static picture before it.

    Parameters
    ----------
    cache
        A ``RadixCache``; the tree is read once, as it is now.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    requests
        Objects with a ``node``; their letters are shown.
    colour_by
        ``"recency"``, ``"hits"`` or ``"owner"``.

    Attributes
    ----------
    static
        The folded picture, a ``Drawing``.
    widget
        The tree in the browser.
    """

    def __init__(
        self, cache: Any, *, decode: Any = None, requests: Any = None, colour_by: str = "recency"
    ) -> None:
        kinds = {"recency": "last", "hits": "hits", "owner": "owner"}
        if colour_by not in kinds:
            raise ArgumentError("colour_by", colour_by, f"is one of {', '.join(kinds)}")
        self.page_size, self.texts = cache.page_size, Texts(decode)
        self.items = [i for root in read(cache, requests) for i in walk(root) if i.node is not None]
        look: Any = {"colour_by": colour_by}
        self.static: Drawing = tree.draw(cache, decode=decode, requests=requests, **look)
        self.widget = TreeWidget(nodes=self._columns(), colour_by=kinds[colour_by])
        self.widget.observe(self._chosen, names="selected")

    def _columns(self) -> dict[str, list[Any]]:
        """What the browser gets of every node, one list per fact."""
        at = {id(item): i for i, item in enumerate(self.items)}
        rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for item in self.items:
            text = self.texts.joined(item.node.key[:SEARCHED])
            pages = item.pages(self.page_size)
            more = f" … {len(pages)} in all" if len(pages) > 8 else ""
            colour = style.request(item.owners[0]).colour if len(item.owners) == 1 else ""
            for name, value in zip(
                rows,
                (
                    at.get(id(item.parent), -1),
                    style.shorten(style.token_text(text[: 2 * SNIPPET]), SNIPPET),
                    text.lower()[:SEARCHED],
                    item.tokens,
                    " ".join(map(str, pages[:8])) + more,
                    item.locks,
                    item.hits,
                    item.last_use,
                    "" if item.namespace is None else repr(item.namespace),
                    " ".join(item.owners),
                    colour,
                ),
                strict=True,
            ):
                rows[name].append(value)
        return rows

    def facts(self, index: int) -> dict[str, str]:
        """All about one node (by its number in the widget) as text."""
        item: Item = self.items[index]
        slots, key = ints(item.node.slots), item.key
        return {
            "text": _cut(self.texts.joined(key)),
            "token ids": _cut(" ".join(map(str, key))),
            "pages": _cut(" ".join(map(str, item.pages(self.page_size)))),
            "slots": _cut(" ".join(map(str, slots))),
        }

    def search(self, text: str) -> list[int]:
        """Numbers of the nodes whose text holds `text` (in any case)."""
        return [i for i, words in enumerate(self.widget.nodes["search"]) if text.lower() in words]

    def _chosen(self, change: Any) -> None:
        index = change["new"]
        if 0 <= index < len(self.items):
            self.widget.detail = {"id": index, "facts": self.facts(index)}

    def __repr__(self) -> str:
        return f"{self.static}"

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import display

        display(self.static)
        display(self.widget)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + f" … ({len(text):,} characters)"
