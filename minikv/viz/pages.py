"""The page map: physical memory page by page, and the page table that leads a request's tokens to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Holder, Texts, holders, ints
from minikv.viz.style import Drawing

COLUMNS = 13  # pages side by side at full size
DETAIL_PAGES, DETAIL_SLOTS, SMALL_SQUARES = 65, 8, 600


@dataclass
class Page:
    """One page as drawn: who holds it, what its slots show, where it stands in the free list (-1: it is held)."""

    number: int
    free_at: int = -1
    letters: list[str] = field(default_factory=list)
    cached: bool = False
    locks: int = 0
    cells: list[tuple[str, str, style.Request | None]] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "free" if self.free_at >= 0 else "cached" if self.cached else "held"


def read(allocator: Any, requests: Any = None, cache: Any = None, table: Any = None, decode: Any = None) -> list[Page]:
    """All pages of `allocator` but page 0, with what is known about each of their slots (not in a large pool)."""
    size, text, detail = allocator.page_size, Texts(decode), _detailed(allocator)
    unknown = "plain" if requests is None and cache is None else "empty"
    pages = [Page(n, cells=[("", unknown, None)] * (size * detail)) for n in range(allocator.num_pages + 1)]
    for order, n in enumerate(ints(allocator.free_pages)):
        pages[n].free_at = order
        pages[n].cells = [("", "free", None)] * (size * detail)
    for node in cache.nodes() if cache is not None else ():
        for token, slot in zip(ints(node.key), ints(node.slots), strict=False):
            page = pages[slot // size]
            page.cached, page.locks = True, max(page.locks, node.lock_count)
            if detail:
                page.cells[slot % size] = (text(token), "plain", None)
    for one in holders(requests, table):
        for i, slot in enumerate(one.slots):
            page = pages[slot // size]
            if page.number == 0:
                continue
            if one.letter not in page.letters:
                page.letters.append(one.letter)
            if not detail:
                continue
            shown, kind, who = page.cells[slot % size]
            shown = text(one.tokens[i]) if i < len(one.tokens) else shown
            if i >= one.reused and kind != "computed":
                kind, who = "computed", one.look
            elif who is None:
                kind, who = "reused", one.look
            page.cells[slot % size] = (shown, kind, who)
    return pages[1:]


def _detailed(allocator: Any) -> bool:
    """Whether each slot can be drawn."""
    return allocator.num_pages < DETAIL_PAGES and allocator.page_size <= DETAIL_SLOTS


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
        Requests that hold slots, as a list or a dict by letter: objects with ``token_ids``, ``computed``, ``row``
        (and `table`), or lists of slots.
    cache
        A ``RadixCache``; its pages are marked as cached, with their locks.
    table
        The ``RequestTable`` in which the requests' slots stand.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    """
    pages = read(allocator, requests, cache, table, decode)
    free = sum(p.state == "free" for p in pages)
    cached = sum(p.cached for p in pages)
    facts = f"{len(pages)} pages of {allocator.page_size} slots: {len(pages) - free} held, {free} free"
    facts += f", {cached} of the held ones in the cache" if cached else ""
    desc = f"Physical memory as {facts}."
    canvas = Canvas(title, desc, subtitle=f"{facts} · page 0 takes the writes of padding and is never handed out")
    if _detailed(allocator):
        place(canvas, pages, canvas.top)
    else:
        _small(canvas, pages)
    return canvas.finish(_text(title, facts, pages), _rows(pages))


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
    """Draw one request's logical order above, physical memory below, and the page table as arrows between them.

    Parameters
    ----------
    who
        Letter of the request whose page table is drawn; the first one by default.
    allocator, requests, cache, table, decode
        As in :func:`draw`.
    """
    found = {h.letter: h for h in holders(requests, table)}
    one = found[who or next(iter(found))]
    size = allocator.page_size
    pages = read(allocator, requests, cache, table, decode)
    title = title or f"Page table of request {one.letter}"
    blocks = [one.slots[i : i + size] for i in range(0, len(one.slots), size)]
    numbers = [block[0] // size for block in blocks]
    desc = f"Request {one.letter}'s {len(one.slots)} tokens in logical order, and the pages {numbers} that hold them."
    canvas = Canvas(title, desc, subtitle="logical order above, physical memory below, arrows are the page table")
    cell = min(40.0, (812 - 12 * len(blocks)) / max(len(one.slots) + len(blocks) * 0.2, 1))
    y, x = canvas.top + 4, canvas.margin
    starts = _logical(canvas, one, blocks, x, y, max(cell, 12), decode)
    strip = canvas.page_box(size, max(cell, 12))[1]
    keep = [p for p in pages if p.number in set(numbers)] if len(pages) > COLUMNS else pages
    boxes = place(canvas, keep, y + strip + 92)
    note = {"size": 11.5, "fill": style.MUTED, "anchor": "end", "halo": style.PAPER}
    canvas.text(canvas.right, y + strip + 82, "physical memory", **note)
    for start, n in zip(starts, numbers, strict=True):
        canvas.arrow(start, y + strip + 2, boxes[n][0], boxes[n][1], colour=one.look.colour)
    rows = [{"block": b, "tokens": len(blocks[b]), "page": n, "first slot": n * size} for b, n in enumerate(numbers)]
    return canvas.finish(f"{title}\n{style.Table(rows)}", rows)


def mimebundle(allocator: Any) -> dict[str, str]:
    """What an allocator shows as the value of a notebook cell: SVG and text."""
    return draw(allocator)._repr_mimebundle_()


def _logical(
    canvas: Canvas, one: Holder, blocks: list[list[int]], x: float, y: float, cell: float, decode: Any
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
    """Draw pages as columns of slots, side by side; returns the middle of the upper edge of each."""
    boxes, x0 = {}, canvas.margin
    w, h = canvas.page_box(len(pages[0].cells) if pages else 1, down=True)
    per_row = max(min(COLUMNS, len(pages)), 1)
    gap = min((canvas.right - canvas.margin - per_row * w) / max(per_row - 1, 1), 18)
    for i, page in enumerate(pages):
        x, top = x0 + i % per_row * (w + gap), y + i // per_row * (h + 46)
        cx, cy = canvas.page(x, top, page.number, len(page.cells), down=True, free=page.free_at >= 0)
        for k, (shown, kind, who) in enumerate(page.cells):
            slot = page.number * len(page.cells) + k
            canvas.token(cx, cy + k * canvas.cell, shown, kind, who, tip=f"slot {slot}: {shown or kind}")
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
            canvas.text(x, y + 32, f"+{len(page.letters) - 3} more", size=9.5, anchor="middle", fill=style.MUTED)
            return
    if page.cached:
        words, low = "cached", y + (34 if page.letters else 15)
        if page.locks:
            canvas.padlock(x - 14, low, page.locks)
        else:
            canvas.text(x, low, words, size=10.5, anchor="middle", fill=style.MUTED)


def _small(canvas: Canvas, pages: list[Page]) -> None:
    """Large pools: one small square per page, or per group of pages when there are very many."""
    group = -(-len(pages) // SMALL_SQUARES)
    per_row, step = 50, 16.2
    for i in range(0, len(pages), group):
        some, k = pages[i : i + group], i // group
        x, y = canvas.margin + k % per_row * step, canvas.top + k // per_row * step
        held = [p for p in some if p.state != "free"]
        share = len(held) / len(some)
        _free_square(canvas, x, y)
        if held:
            letters = [p.letters[0] for p in held if p.letters]
            who = style.request(max(set(letters), key=letters.count)) if letters else None
            if who:
                canvas.seen.setdefault(who.letter, who)
            tall = max(14 * share, 2)
            canvas.rect(x, y + 14 - tall, 14, tall, fill=who.colour if who else style.NEUTRAL, r=3)
            if who and group == 1:
                canvas.text(x + 7, y + 10.5, who.letter, size=9, weight=600, fill=who.ink, anchor="middle", fit=14)
    words = "one square is one page" if group == 1 else f"one square is {group} pages, filled as far as they are held"
    y = canvas.bottom + 24
    canvas.text(canvas.margin, y, words, fill=style.MUTED)
    x = canvas.margin + 24 + 6.3 * len(words)
    grey = [p for p in pages if p.state != "free" and not p.letters]
    if grey:
        canvas.rect(x, y - 11, 14, 14, fill=style.NEUTRAL, r=3)
        what = "held: in the cache" if all(p.cached for p in grey) else "held, no request named"
        canvas.text(x + 20, y, what, fill=style.MUTED)
        x += 44 + 6.3 * len(what)
    if len(grey) < len(pages):
        _free_square(canvas, x, y - 11)
        canvas.text(x + 20, y, "free", fill=style.MUTED)


def _free_square(canvas: Canvas, x: float, y: float) -> None:
    canvas.rect(x, y, 14, 14, fill=style.PAPER, stroke=style.NEUTRAL, r=3, dash="1.2 1.8")


def _rows(pages: list[Page]) -> list[dict[str, Any]]:
    return [
        {
            "page": p.number,
            "state": p.state,
            "requests": " ".join(p.letters),
            "locks": p.locks,
            "free list": p.free_at + 1 if p.free_at >= 0 else "",
            "tokens": " ".join(style.token_text(c[0]) for c in p.cells if c[0]),
        }
        for p in pages
    ]


def _text(title: str, facts: str, pages: list[Page], limit: int = 40) -> str:
    order = [p.number for p in sorted((p for p in pages if p.free_at >= 0), key=lambda p: p.free_at)]
    lines = [f"{title}: {facts}"]
    held = [p for p in pages if p.state != "free"]
    for p in held[:limit]:
        cells = "|".join(style.pad(style.shorten(style.token_text(c[0]) or "·", 8), 1) for c in p.cells)
        lock = f"  locked {p.locks}" if p.locks else ""
        lines.append(f"  page {p.number:>3}  {style.pad(' '.join(p.letters) or p.state, 8)} [{cells}]{lock}")
    if len(held) > limit:
        lines.append(f"  … and {len(held) - limit} more held pages")
    more = " …" if len(order) > 24 else ""
    lines.append("  free list, next first: " + (" ".join(map(str, order[:24])) + more if order else "(empty)"))
    return "\n".join(lines)
