"""The radix tree of a live ``RadixCache``: small trees token by token, large ones as a folded
outline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Texts, ints
from minikv.viz.style import Drawing, many
from minikv.viz.tree_outline import ColourBy, Look, outline, root_card
from minikv.viz.tree_view import Item, as_text, fold, gap_text, label, read, walk

SMALL_NODES, SMALL_WIDTH = 14, 1150
SCALES = {"recency": "last use", "hits": "hits"}


def draw(
    cache: Any,
    *,
    decode: Any = None,
    requests: Any = None,
    colour_by: ColourBy | None = None,
    computed: Iterable[Any] = (),
    reused: Iterable[Any] = (),
    evicted: Iterable[Any] = (),
    reused_tokens: int | None = None,
    who: int | str | None = None,
    max_nodes: int = 40,
    max_siblings: int = 8,
    title: str = "Radix tree",
    note: str = "",
) -> Drawing:
    """Draw a radix tree with its tokens, pages, slots, locks, hits and ages.

    Up to 14 nodes are drawn token by token, from left to right. A larger tree becomes an outline of
    at most about `max_nodes` lines: locked and heavy subtrees are opened first, long chains and
    other siblings fold into "+n more".

    Parameters
    ----------
    cache
        A ``RadixCache``, or any object with ``nodes()`` and ``page_size``.
    decode
        Tokenizer, function of a list of ids, or texts by id; the cache's own `decode` if it has
        one, else numbers.
    requests
        Objects with a ``node``, as a list or a dict by letter; their letters stand on the nodes
        they use.
    colour_by
        Colour of the nodes: ``"recency"``, ``"hits"`` or ``"owner"`` (of `requests`); always
        written out as well.
    note
        What happens in this picture, written under the title.
    computed, reused, evicted
        Nodes whose tokens are drawn solid, hatched or struck through, in the colour of request
        `who`.
    reused_tokens
        Only so many tokens of `reused` (a path, from the top) are hatched: a match that ends inside
        a node.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> print(draw(SimpleNamespace(page_size=4, nodes=lambda: [])))
    Radix tree: empty
    root
    """
    if colour_by not in (None, "recency", "hits", "owner"):
        raise ArgumentError("colour_by", colour_by, 'is one of "recency", "hits", "owner", or None')
    decode = getattr(cache, "decode", None) if decode is None else decode
    roots = read(cache, requests)
    whole = [item for root in roots for item in walk(root) if item.node is not None]
    kept = fold(roots, max_nodes, max_siblings)
    shown = [
        item for root in kept for item in walk(root) if item.node is not None and not item.folded
    ]
    marks, left = {}, math.inf if reused_tokens is None else reused_tokens
    for node in reused:
        marks[id(node)] = ("reused", min(len(node.key), left))
        left -= marks[id(node)][1]
    marks |= {
        id(n): (k, math.inf)
        for k, some in (("computed", computed), ("evicted", evicted))
        for n in some
    }
    look = Look(
        Texts(decode),
        cache.page_size,
        colour_by,
        marks,
        None if who is None else style.request(who),
    )
    look.shade = _shader(shown, colour_by)

    tokens = sum(item.tokens for item in whole)
    locked = sum(item.tokens for item in whole if item.locks)
    facts = (
        f"{many(len(whole), 'node')}, {many(tokens, 'token')} in "
        f"{many(tokens // cache.page_size, 'page')}"
    )
    facts += f" of {cache.page_size}, {locked:,} locked" if whole else ""
    facts = facts if whole else "empty"
    named = [root for root in kept if root.namespace is not None]
    desc = f"Prefix tree: {facts}." + (f" It holds {len(roots)} namespaces." if named else "")
    desc = f"{note}. {desc}" if note else desc
    facts = f"{note} · {facts}" if note else facts
    canvas = Canvas(title, desc, subtitle=facts)
    if not (len(whole) <= SMALL_NODES and _small(canvas, kept, look)):
        outline(canvas, kept, look)
    if colour_by:
        _scale(canvas, colour_by, shown)
    text = as_text(f"{title}: {facts}", kept, look.texts, cache.page_size)
    return canvas.finish(text, [_row(item, look) for item in shown])


def mimebundle(cache: Any) -> dict[str, str]:
    """What a cache shows as the value of a notebook cell: SVG and text."""
    return draw(cache)._repr_mimebundle_()


def _row(item: Item, look: Look) -> dict[str, Any]:
    depth, at = 0, item.parent
    while at is not None and at.node is not None:
        depth, at = depth + 1, at.parent
    return {
        "depth": depth,
        "text": label(item, look.texts, 40),
        "tokens": item.tokens,
        "pages": " ".join(map(str, item.pages(look.page_size)[:12])),
        "locks": item.locks,
        "hits": item.hits,
        "last use": item.last_use,
        "namespace": "" if item.namespace is None else repr(item.namespace),
        "requests": " ".join(item.owners),
    }


def _shader(items: list[Item], colour_by: ColourBy | None) -> Callable[[Item], str]:
    """Background colour of a node."""
    blue, orange = style.OKABE_ITO["blue"], style.OKABE_ITO["orange"]
    if colour_by == "recency":
        ages = {age: i for i, age in enumerate(sorted({i.last_use for i in items}))}
        return lambda item: style.blend(
            blue, 0.06 + 0.5 * ages[item.last_use] / max(len(ages) - 1, 1)
        )
    if colour_by == "hits":
        top = math.log1p(max((i.hits for i in items), default=1)) or 1
        return lambda item: style.blend(orange, 0.06 + 0.6 * math.log1p(item.hits) / top)
    if colour_by == "owner":
        return lambda item: (
            style.blend(style.request(item.owners[0]).colour, 0.35)
            if len(item.owners) == 1
            else style.SHADE
        )
    return lambda item: style.SHADE


def _scale(canvas: Canvas, colour_by: ColourBy, items: list[Item]) -> None:
    """Under the tree: how node colours are read."""
    y = canvas.bottom + 24
    if colour_by == "owner":
        words = "node colour: the request that uses it; grey: several requests, or none"
        canvas.text(canvas.margin, y, words, fill=style.MUTED)
        return
    values = [i.last_use if colour_by == "recency" else i.hits for i in items] or [0]
    name, colour = (
        SCALES[colour_by],
        style.OKABE_ITO["blue" if colour_by == "recency" else "orange"],
    )
    words = f"node colour: {name} {min(values):,}"
    canvas.text(canvas.margin, y, words, fill=style.MUTED)
    x = canvas.margin + 10 + 6.6 * len(words)
    for i in range(6):
        fill = style.blend(colour, 0.06 + (0.5 if colour_by == "recency" else 0.6) * i / 5)
        canvas.rect(x + 18 * i, y - 11, 18, 14, fill=fill)
    canvas.text(x + 114, y, f"{max(values):,}", fill=style.MUTED)


def _strip(item: Item, look: Look) -> list[tuple[int | None, list[int]]]:
    """(page, offsets into the key) of the boxes of a node; (None, [pages left out]) for the middle
    of a long key."""
    size = look.page_size
    pages = item.pages(size) or [0] * (item.tokens // size)
    limit = max(12 // size, 2)
    boxes: list[tuple[int | None, list[int]]] = [
        (page, list(range(i * size, min((i + 1) * size, item.tokens))))
        for i, page in enumerate(pages)
    ]
    if len(boxes) <= limit + 1:
        return boxes
    return [*boxes[: limit - 1], (None, [len(boxes) - limit]), boxes[-1]]


def _small(canvas: Canvas, roots: list[Item], look: Look) -> bool:
    """The tree from left to right, every node a row of page boxes; False when that would be too
    wide."""
    size, cell = look.page_size, canvas.cell
    if size > 8:
        return False
    box = canvas.page_box(size)[0] + 5
    strips = {
        id(i): _strip(i, look)
        for r in roots
        for i in walk(r)
        if i.node is not None and not i.folded
    }
    lefts: dict[int, float] = {}
    widths: dict[int, float] = {}
    for root in roots:
        for item in walk(root):
            if item.node is None:
                name = "root" if root.namespace is None else style.shorten(str(root.namespace), 18)
                widths[id(item)], lefts[id(item)] = 26 + 7.6 * style.columns(name), canvas.margin
                continue
            parent = item.parent
            lefts[id(item)] = lefts[id(parent)] + widths[id(parent)] + 38
            boxes = strips.get(id(item))
            inner = (
                180.0
                if boxes is None
                else sum(78 if page is None else box for page, _ in boxes) - 5
            )
            widths[id(item)] = max(inner + 16, 150)
    if max((lefts[k] + widths[k] for k in lefts), default=0) > SMALL_WIDTH:
        return False
    tall, middles, y = cell + 62, {}, canvas.top + 8
    for root in roots:
        every = list(walk(root))
        for item in every:
            if not item.children:
                middles[id(item)] = y + tall / 2
                y += tall + 14
        for item in reversed(every):
            if item.children:
                middles[id(item)] = (
                    middles[id(item.children[0])] + middles[id(item.children[-1])]
                ) / 2
        y += 10
        for item in every:
            if item.parent is not None:
                _edge(
                    canvas,
                    lefts[id(item.parent)] + widths[id(item.parent)],
                    middles[id(item.parent)],
                    lefts[id(item)],
                    middles[id(item)],
                )
        for item in every:
            x, middle = lefts[id(item)], middles[id(item)]
            if item.node is None:
                root_card(canvas, x, middle, widths[id(item)], root.namespace)
            elif item.folded:
                canvas.rect(
                    x,
                    middle - 15,
                    widths[id(item)],
                    30,
                    fill=style.PAPER,
                    stroke=style.NEUTRAL,
                    r=8,
                    dash="4 3",
                )
                canvas.text(
                    x + 10, middle + 4, gap_text(item), fill=style.MUTED, fit=widths[id(item)] - 16
                )
            else:
                _card(
                    canvas,
                    item,
                    strips[id(item)],
                    look,
                    x,
                    middle - tall / 2,
                    widths[id(item)],
                    tall,
                )
    return True


def _edge(canvas: Canvas, x1: float, y1: float, x2: float, y2: float) -> None:
    half = (x1 + x2) / 2
    canvas.path(
        f"M{x1:.1f} {y1:.1f}C{half:.1f} {y1:.1f} {half:.1f} {y2:.1f} {x2:.1f} {y2:.1f}",
        stroke=style.NEUTRAL,
    )


def _card(
    canvas: Canvas,
    item: Item,
    boxes: list[tuple[int | None, list[int]]],
    look: Look,
    x: float,
    y: float,
    w: float,
    h: float,
) -> None:
    """One node: its page boxes with their tokens, and a line with its locks, hits, age and
    requests."""
    canvas.add('<g data-node="1">')
    canvas.rect(x, y, w, h, fill=look.shade(item), r=10)
    (kind, marked), key, slots = (
        look.marks.get(id(item.node), ("plain", 0)),
        item.key,
        ints(item.node.slots),
    )
    owner = style.request(item.owners[0]) if len(item.owners) == 1 else None
    at, step = x + 8, canvas.page_box(look.page_size)[0] + 5
    for page, offsets in boxes:
        if page is None:
            canvas.text(at + 36, y + 36, "…", size=18, anchor="middle")
            canvas.text(
                at + 36, y + 52, f"{offsets[0]} pages", size=10.5, anchor="middle", fill=style.MUTED
            )
            at += 78
            continue
        first, last = (slots[offsets[0]], slots[offsets[-1]]) if slots else (0, 0)
        note = f"slots {first}–{last}" if slots and look.page_size > 2 else ""
        cx, cy = canvas.page(at, y + 8, page if slots else "–", len(offsets), note=note)
        for i, offset in enumerate(offsets):
            tip = f"token {key[offset]}" + (f", slot {slots[offset]}" if slots else "")
            shown = kind if offset < marked else "plain"
            who = look.who if shown in ("computed", "reused") and look.who else owner
            canvas.token(cx + i * canvas.cell, cy, look.texts(key[offset]), shown, who, tip=tip)
        at += step
    left, base = x + 10, y + h - 9
    if item.locks:
        left = canvas.padlock(left, base, item.locks) + 8
    facts = f"{many(item.hits, 'hit')} · used {item.last_use}"
    canvas.text(left, base, facts, size=11.5, fill=style.INK)
    for i, name in enumerate(reversed(item.owners[:4])):
        canvas.badge(x + w - 17 - 18 * i, base - 4, style.request(name), r=8)
    canvas.add("</g>")
