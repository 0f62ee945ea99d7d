"""A large radix tree as lines, indented by depth; and what both looks of a tree share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Texts
from minikv.viz.tree_view import Item, gap_text, label, walk

ColourBy = Literal["recency", "hits", "owner"]


@dataclass
class Look:
    """What the drawing functions need to know besides the nodes."""

    texts: Texts
    page_size: int
    colour_by: ColourBy | None
    marks: dict[int, tuple[str, float]]
    who: style.Request | None
    shade: Callable[[Item], str] = field(default=lambda item: style.SHADE)


def root_card(canvas: Canvas, x: float, y: float, width: float, namespace: Any) -> None:
    """The root of a tree, or of a namespace in it."""
    fill = style.INK if namespace is None else _space_colour(namespace)
    canvas.add('<g data-root="1">')
    canvas.rect(x, y - 13, width, 26, fill=fill, r=13)
    name = "root" if namespace is None else style.shorten(str(namespace), 18)
    canvas.text(
        x + width / 2,
        y + 4.5,
        name,
        weight=600,
        anchor="middle",
        fill=style.ink_on(fill),
        fit=width - 12,
    )
    canvas.add("</g>")


def _space_colour(namespace: Any) -> str:
    """A colour for a namespace: far from the first requests' colours, the same in every process."""
    shades = [style.OKABE_ITO[name] for name in ("purple", "vermillion", "sky", "yellow", "green")]
    return shades[sum(map(ord, repr(namespace))) % len(shades)]


def outline(canvas: Canvas, roots: list[Item], look: Look) -> None:
    """The tree as lines, indented by depth, with a column for each fact."""
    y, tall = canvas.top + 14, 25
    ends = {"tokens": 640, "pages": 695, "locks": 738, "hits": 782, "last use": 836}
    for name, x in ends.items():
        canvas.text(x, y, name, size=11, anchor="end", fill=style.MUTED)
    canvas.text(canvas.margin, y, "text of the node's tokens", size=11, fill=style.MUTED)
    y += 10
    for root in roots:
        lines = [(item, _depth(item)) for item in walk(root)]
        step = min(20.0, 240 / max(max(d for _, d in lines), 1))
        trunk: dict[int, float] = {}
        for item, depth in lines:
            x, middle = canvas.margin + depth * step, y + tall / 2
            trunk[id(item)] = middle
            if item.parent is not None:
                knee = x - step + 7
                canvas.path(
                    f"M{knee:.1f} {trunk[id(item.parent)] + 11:.1f}V{middle:.1f}H{x - 1:.1f}",
                    stroke=style.FAINT,
                    line=1.3,
                )
            if item.node is None:
                root_card(
                    canvas,
                    canvas.margin,
                    middle,
                    26 + 7.6 * min(len(str(root.namespace or "root")), 18),
                    root.namespace,
                )
                if item.folded:
                    canvas.text(canvas.margin + 190, middle + 4, gap_text(item), fill=style.MUTED)
                y += tall + 4
                continue
            if item.folded:
                canvas.text(x + 2, middle + 4, gap_text(item), fill=style.MUTED, size=11.5)
                y += tall
                continue
            canvas.add('<g data-node="1">')
            canvas.rect(x, y + 2, 590 - x, tall - 4, fill=look.shade(item), r=6)
            room = 590 - x - 16 - 17 * min(len(item.owners), 4)
            canvas.text(
                x + 8,
                middle + 4,
                label(item, look.texts, max(int(room / 7.3), 4)),
                mono=True,
                size=12,
                fit=room,
            )
            for i, name in enumerate(reversed(item.owners[:4])):
                canvas.badge(580 - 17 * i, middle, style.request(name), r=7.5)
            values = (item.tokens, item.tokens // look.page_size, item.hits, item.last_use)
            for name, value in zip(("tokens", "pages", "hits", "last use"), values, strict=True):
                canvas.text(ends[name], middle + 4, f"{value:,}", size=11.5, anchor="end")
            if item.locks:
                canvas.padlock(
                    ends["locks"] - 20 - 7 * len(str(item.locks)), middle + 4, item.locks
                )
            canvas.add("</g>")
            y += tall
        y += 8
    canvas.reach(0, y)


def _depth(item: Item) -> int:
    depth = 0
    while item.parent is not None:
        depth, item = depth + 1, item.parent
    return depth
