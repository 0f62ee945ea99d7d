"""The page map: physical memory page by page, and the page table that leads a request's tokens to
it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Holder, Texts, holders
from minikv.viz.pool_view import Page, Pool, detailed, read
from minikv.viz.style import Drawing

COLUMNS = 13  # pages side by side at full size
SMALL_SQUARES = 600


def draw(
    allocator: Any,
    *,
    requests: Any = None,
    cache: Any = None,
    table: Any = None,
    decode: Any = None,
    title: str = "Page map",
) -> Drawing:
    """Draw physical memory: every page, its slots, who holds it, and the order of the free list.

    Parameters
    ----------
    allocator
        A ``PagedAllocator``.
    requests
        Requests that hold slots, as a list or a dict by letter: objects with ``token_ids``,
        ``computed``, ``row`` (and `table`), or lists of slots.
    cache
        A ``RadixCache``; its pages are marked as cached, with their locks.
    table
        The ``RequestTable`` in which the requests' slots stand.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    """
    pool = read(allocator, requests, cache, table, decode)
    free, cached = int((pool.free_at[1:] >= 0).sum()), int(pool.cached[1:].sum())
    facts = (
        f"{pool.count} pages of {allocator.page_size} slots: {pool.count - free} held, {free} free"
    )
    facts += f", {cached} of the held ones in the cache" if cached else ""
    desc = f"Physical memory as {facts}."
    canvas = Canvas(
        title,
        desc,
        subtitle=f"{facts} · page 0 takes the writes of padding and is never handed out",
    )
    if detailed(allocator):
        place(canvas, pool.pages(), canvas.top)
    else:
        _small(canvas, pool)
    return canvas.finish(_text(title, facts, pool), _rows(pool))


def page_table(
    allocator: Any,
    requests: Any,
    *,
    who: str | None = None,
    cache: Any = None,
    table: Any = None,
    decode: Any = None,
    title: str | None = None,
) -> Drawing:
    """Draw one request's logical order above, physical memory below, and the page table as arrows
    between them.

    Parameters
    ----------
    who
        Letter of the request whose page table is drawn; the first one by default.
    allocator, requests, cache, table, decode
        As in :func:`draw`.

    Raises
    ------
    ArgumentError
        When there is no such request, or none at all, or one holds slots that the allocator does
        not have.
    """
    found = {h.letter: h for h in holders(requests, table)}
    if not found:
        raise ArgumentError(
            "requests", requests, "is empty; give the request whose page table is to be drawn"
        )
    if who is not None and who not in found:
        raise ArgumentError(
            "who", who, f"is the letter of no request here; there are {', '.join(found)}"
        )
    one = found[who or next(iter(found))]
    size = allocator.page_size
    pool = read(allocator, requests, cache, table, decode)
    title = title or f"Page table of request {one.letter}"
    blocks = [one.slots[i : i + size] for i in range(0, len(one.slots), size)]
    numbers = [block[0] // size for block in blocks]
    desc = (
        f"Request {one.letter}'s {len(one.slots)} tokens in logical order, and the pages {numbers} "
        "that hold them."
    )
    canvas = Canvas(
        title,
        desc,
        subtitle="logical order above, physical memory below, arrows are the page table",
    )
    cell = min(40.0, (812 - 12 * len(blocks)) / max(len(one.slots) + len(blocks) * 0.2, 1))
    y, x = canvas.top + 4, canvas.margin
    starts = _logical(canvas, one, blocks, x, y, max(cell, 12), decode)
    strip = canvas.page_box(size, max(cell, 12))[1]
    keep = pool.pages(sorted({*numbers} - {0}) if pool.count > COLUMNS else None)
    boxes = place(canvas, keep, y + strip + 92)
    note = {"size": 11.5, "fill": style.MUTED, "anchor": "end", "halo": style.PAPER}
    canvas.text(canvas.right, y + strip + 82, "physical memory", **note)
    for start, n in zip(starts, numbers, strict=True):
        if n in boxes:
            canvas.arrow(start, y + strip + 2, boxes[n][0], boxes[n][1], colour=one.look.colour)
    rows = [
        {"block": b, "tokens": len(blocks[b]), "page": n, "first slot": n * size}
        for b, n in enumerate(numbers)
    ]
    return canvas.finish(f"{title}\n{style.Table(rows)}", rows)


def mimebundle(allocator: Any) -> dict[str, str]:
    """What an allocator shows as the value of a notebook cell: SVG and text."""
    return draw(allocator)._repr_mimebundle_()


def _logical(
    canvas: Canvas,
    one: Holder,
    blocks: list[list[int]],
    x: float,
    y: float,
    cell: float,
    decode: Any,
) -> list[float]:
    """The strip of a request's tokens in blocks of one page; returns the middle of each block."""
    size, text, starts = max((len(b) for b in blocks), default=1), Texts(decode), []
    for b, block in enumerate(blocks):
        w, h = canvas.page_box(max(len(block), 1), cell)
        canvas.rect(x, y, w, h, fill="#ffffff", stroke=one.look.colour, r=7, line=1.2, dash="5 3")
        canvas.text(x + 8, y + 14, f"block {b}", size=10.5, fill=style.MUTED, fit=w - 10)
        for i in range(len(block)):
            at = b * size + i
            shown = text(one.tokens[at]) if at < len(one.tokens) else at
            kind = "reused" if at < one.reused else "computed"
            canvas.token(x + 4 + i * cell, y + 19, shown, kind, one.look, size=cell)
        starts.append(x + w / 2)
        x += w + 12
    return starts


def place(canvas: Canvas, pages: list[Page], y: float) -> dict[int, tuple[float, float]]:
    """Draw pages as columns of slots, side by side; returns the middle of the upper edge of
    each."""
    boxes, x0 = {}, canvas.margin
    w, h = canvas.page_box(len(pages[0].cells) if pages else 1, down=True)
    per_row = max(min(COLUMNS, len(pages)), 1)
    gap = min((canvas.right - canvas.margin - per_row * w) / max(per_row - 1, 1), 18)
    for i, page in enumerate(pages):
        x, top = x0 + i % per_row * (w + gap), y + i // per_row * (h + 46)
        cx, cy = canvas.page(
            x, top, page.number, len(page.cells), down=True, free=page.free_at >= 0
        )
        for k, (shown, kind, who) in enumerate(page.cells):
            slot = page.number * len(page.cells) + k
            canvas.token(
                cx, cy + k * canvas.cell, shown, kind, who, tip=f"slot {slot}: {shown or kind}"
            )
        _foot(canvas, page, x + w / 2, top + h)
        boxes[page.number] = (x + w / 2, top)
    return boxes


def _foot(canvas: Canvas, page: Page, x: float, y: float) -> None:
    """Below a page: who uses it, or its place in the free list."""
    if page.free_at >= 0:
        words = "next" if page.free_at == 0 else f"free {page.free_at + 1}"
        canvas.text(x, y + 15, words, size=10.5, anchor="middle", fill=style.MUTED)
    elif page.letters:
        shown = page.letters[:3]
        for i, name in enumerate(shown):
            canvas.badge(x + (i - (len(shown) - 1) / 2) * 16, y + 13, style.request(name), r=7.5)
        if len(page.letters) > 3:
            canvas.text(
                x,
                y + 32,
                f"+{len(page.letters) - 3} more",
                size=9.5,
                anchor="middle",
                fill=style.MUTED,
            )
            return
    if page.cached:
        words, low = "cached", y + (34 if page.letters else 15)
        if page.locks:
            canvas.padlock(x - 14, low, page.locks)
        else:
            canvas.text(x, low, words, size=10.5, anchor="middle", fill=style.MUTED)


def _small(canvas: Canvas, pool: Pool) -> None:
    """Large pools: one small square per page, or per group of pages when there are very many."""
    group, per_row, step = _group(pool), 50, 16.2
    for k, (first, last, held, letters) in enumerate(_squares(pool)):
        x, y = canvas.margin + k % per_row * step, canvas.top + k // per_row * step
        _free_square(canvas, x, y)
        if held:
            who = style.request(letters.most_common(1)[0][0]) if letters else None
            if who:
                canvas.seen.setdefault(who.letter, who)
            tall = max(14 * held / (last - first + 1), 2)
            canvas.rect(x, y + 14 - tall, 14, tall, fill=who.colour if who else style.NEUTRAL, r=3)
            if who and group == 1:
                canvas.text(
                    x + 7,
                    y + 10.5,
                    who.letter,
                    size=9,
                    weight=600,
                    fill=who.ink,
                    anchor="middle",
                    fit=14,
                )
    words = (
        "one square is one page"
        if group == 1
        else f"one square is {group} pages, filled as far as they are held"
    )
    y = canvas.bottom + 24
    canvas.text(canvas.margin, y, words, fill=style.MUTED)
    x = canvas.margin + 24 + 6.3 * len(words)
    grey = pool.free_at < 0
    grey[[0, *pool.letters]] = False
    if grey.any():
        canvas.rect(x, y - 11, 14, 14, fill=style.NEUTRAL, r=3)
        what = "held: in the cache" if pool.cached[grey].all() else "held, no request named"
        canvas.text(x + 20, y, what, fill=style.MUTED)
        x += 44 + 6.3 * len(what)
    if grey.sum() < pool.count:
        _free_square(canvas, x, y - 11)
        canvas.text(x + 20, y, "free", fill=style.MUTED)


def _group(pool: Pool) -> int:
    """How many pages one small square stands for."""
    return max(-(-pool.count // SMALL_SQUARES), 1)


def _squares(pool: Pool) -> list[tuple[int, int, int, Counter[str]]]:
    """Each small square's first and last page, how many of them are held, and by whom (each page's
    first letter)."""
    group = _group(pool)
    firsts = range(1, pool.count + 1, group)
    held = [int((pool.free_at[first : first + group] < 0).sum()) for first in firsts]
    letters: list[Counter[str]] = [Counter() for _ in firsts]
    for n in sorted(pool.letters):
        if pool.free_at[n] < 0:
            letters[(n - 1) // group][pool.letters[n][0]] += 1
    return [
        (first, min(first + group - 1, pool.count), h, who)
        for first, h, who in zip(firsts, held, letters, strict=True)
    ]


def _free_square(canvas: Canvas, x: float, y: float) -> None:
    canvas.rect(x, y, 14, 14, fill=style.PAPER, stroke=style.NEUTRAL, r=3, dash="1.2 1.8")


def _rows(pool: Pool) -> list[dict[str, Any]]:
    """A row per page, or per square where one stands for several pages."""
    if _group(pool) > 1:
        return [
            {
                "pages": f"{first}–{last}",
                "held": held,
                "free": last - first + 1 - held,
                "requests": " ".join(letters),
            }
            for first, last, held, letters in _squares(pool)
        ]
    return [
        {
            "page": p.number,
            "state": p.state,
            "requests": " ".join(p.letters),
            "locks": p.locks,
            "free list": p.free_at + 1 if p.free_at >= 0 else "",
            "tokens": " ".join(style.token_text(c[0]) for c in p.cells if c[0]),
        }
        for p in pool.pages()
    ]


def _text(title: str, facts: str, pool: Pool, limit: int = 40) -> str:
    order, held = pool.free[:25].tolist(), np.flatnonzero(pool.free_at[1:] < 0) + 1
    lines = [f"{title}: {facts}"]
    for p in pool.pages(held[:limit].tolist()):
        cells = "|".join(
            style.pad(style.shorten(style.token_text(c[0]) or "·", 8), 1) for c in p.cells
        )
        lock = f"  locked {p.locks}" if p.locks else ""
        lines.append(
            f"  page {p.number:>3}  {style.pad(' '.join(p.letters) or p.state, 8)} [{cells}]{lock}"
        )
    if len(held) > limit:
        lines.append(f"  … and {len(held) - limit} more held pages")
    more = " …" if len(order) > 24 else ""
    lines.append(
        "  free list, next first: "
        + (" ".join(map(str, order[:24])) + more if order else "(empty)")
    )
    return "\n".join(lines)
