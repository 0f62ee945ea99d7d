"""Request rows: the table that gives, for each token of a request, the slot of its K and V."""

from __future__ import annotations

from typing import Any

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Holder, Texts, holders, ints
from minikv.viz.style import Drawing

MOST_ROWS, MOST_TOKENS = 24, 16


def draw(
    table: Any,
    *,
    requests: Any = None,
    decode: Any = None,
    page_size: int | None = None,
    title: str = "Request table",
) -> Drawing:
    """Draw the rows of a request table: under each token's square stands its slot.

    Parameters
    ----------
    table
        A ``RequestTable``.
    requests
        The requests that own the rows, as a list or a dict by letter (objects with ``token_ids``,
        ``computed`` and ``row``). Without them the rows that hold anything are shown, with slots
        only.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    page_size
        When given, the slots of one page are framed together.
    """
    rows = _rows(table, requests)
    lines, width = table.table.shape[0] - 1, table.table.shape[1]
    facts = (
        f"{len(rows)} of {lines} rows in use, room for {width:,} tokens each; row 0 is reserved "
        "for padding"
    )
    canvas = Canvas(title, f"The request table: {facts}.", subtitle=facts)
    texts, y = Texts(decode), canvas.top + 14
    for one in rows[:MOST_ROWS]:
        _row(canvas, one, texts, page_size, y)
        y += 92 if page_size else 72
    if len(rows) > MOST_ROWS:
        canvas.text(canvas.margin, y + 14, f"+{len(rows) - MOST_ROWS} more rows", fill=style.MUTED)
    if not rows:
        canvas.text(canvas.margin, y + 14, "no row is in use", fill=style.MUTED)
    data = [
        {"request": one.letter, "row": one.row, "tokens": len(one.slots), "slots": _runs(one.slots)}
        for one in rows
    ]
    return canvas.finish(f"{title}: {facts}\n{style.Table(data)}", data)


def block_table(
    requests: Any, page_size: int, *, table: Any = None, title: str = "Block table"
) -> Drawing:
    """Draw the block table: a row per request, a column per logical block, in each the page that
    holds it.

    Parameters
    ----------
    requests
        As in :func:`draw`, or lists of slots.
    page_size
        Slots per page.
    """
    found = holders(requests, table)
    rows = [
        (one, [one.slots[i] // page_size for i in range(0, len(one.slots), page_size)])
        for one in found
    ]
    longest = max((len(pages) for _, pages in rows), default=0)
    counts: dict[int, int] = {}
    for _, pages in rows:
        for page in pages:
            counts[page] = counts.get(page, 0) + 1
    shared = sum(n > 1 for n in counts.values())
    facts = (
        f"{len(rows)} requests, up to {longest} blocks of {page_size} tokens, {shared} pages shared"
    )
    canvas = Canvas(title, f"Block table: {facts}.", subtitle=facts)
    w, h = min(70.0, 740 / max(longest, 1)), 34
    for block in range(longest):
        x = canvas.margin + 48 + block * w
        canvas.text(
            x + w / 2,
            canvas.top + 8,
            f"block {block}",
            size=10.5,
            anchor="middle",
            fill=style.MUTED,
            fit=w - 2,
        )
    for i, (one, pages) in enumerate(rows):
        y = canvas.top + 18 + i * (h + 8)
        canvas.badge(canvas.margin + 12, y + h / 2, one.look)
        for block, page in enumerate(pages):
            x = canvas.margin + 48 + block * w
            reused = (block + 1) * page_size <= one.reused
            canvas.used.update(["page", "reused" if reused else "computed"])
            canvas.add(f'<g data-page="{page}">')
            canvas.rect(x + 3, y, w - 6, h, fill=style.PAPER if reused else one.look.colour, r=7)
            if reused:
                canvas.hatch(x + 4, y + 1, w - 8, h - 2, one.look.colour)
            canvas.rect(x + 3, y, w - 6, h, stroke=one.look.colour, r=7, line=1.6)
            ink, halo = (style.INK, style.PAPER) if reused else (one.look.ink, "")
            canvas.text(
                x + w / 2,
                y + 22,
                page,
                weight=600,
                anchor="middle",
                fill=ink,
                halo=halo,
                fit=w - 10,
            )
            canvas.add("</g>")
    data = [
        {"request": one.letter, **{f"block {b}": p for b, p in enumerate(pages)}}
        for one, pages in rows
    ]
    for row in data:
        row.update({f"block {b}": row.get(f"block {b}", "") for b in range(longest)})
    return canvas.finish(f"{title}: {facts}\n{style.Table(data)}", data)


def mimebundle(table: Any) -> dict[str, str]:
    """What a request table shows as the value of a notebook cell: SVG and text."""
    return draw(table)._repr_mimebundle_()


def _rows(table: Any, requests: Any) -> list[Holder]:
    if requests is not None:
        return [one for one in holders(requests, table) if one.slots]
    rows = []
    for number, line in enumerate(table.table.tolist()):
        last = max((i + 1 for i, slot in enumerate(line) if slot), default=0)
        if number and last:
            rows.append(Holder(style.request(len(rows)), line[:last], [], 0, number))
    return rows


def _row(canvas: Canvas, one: Holder, texts: Texts, page_size: int | None, y: float) -> None:
    canvas.badge(canvas.margin + 12, y + 26, one.look)
    canvas.text(canvas.margin + 28, y + 30, f"row {one.row}" if one.row else "", fill=style.MUTED)
    most = MOST_TOKENS if len(one.slots) > MOST_TOKENS else len(one.slots)
    cell, x0, kind = canvas.cell, canvas.margin + 84, "computed" if one.tokens else "plain"
    if page_size:
        for i in range(0, most, page_size):
            run = min(page_size, most - i)
            canvas.page(
                x0 + i * cell + 12 * (i // page_size) - 4, y - 14, one.slots[i] // page_size, run
            )
    for i in range(most):
        x = x0 + i * cell + (12 * (i // page_size) if page_size else 0)
        shown = texts(one.tokens[i]) if i < len(one.tokens) else ""
        canvas.token(x, y + 5, shown, kind if i >= one.reused else "reused", one.look)
        canvas.text(
            x + cell / 2,
            y + 59,
            one.slots[i],
            size=10,
            anchor="middle",
            fill=style.MUTED,
            mono=True,
        )
    if most < len(one.slots):
        x = x0 + most * cell + (12 * (most // page_size) if page_size else 0) + 6
        canvas.text(x, y + 30, f"… {len(one.slots) - most:,} more", fill=style.MUTED)


def _runs(slots: list[int]) -> str:
    """Slots as runs of neighbours.

    >>> _runs([4, 5, 6, 7, 20, 21])
    '4–7 20–21'
    """
    runs: list[list[int]] = []
    for slot in ints(slots):
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    shown = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:8]]
    return " ".join(shown) + (" …" if len(runs) > 8 else "")
