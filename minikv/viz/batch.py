"""The ragged batch: requests of different lengths laid end to end, and the three index arrays that
find them again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Texts, ints
from minikv.viz.style import Drawing

MOST = 64


def draw(
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    *,
    tokens: Any = None,
    decode: Any = None,
    letters: Any = None,
    page_size: int | None = None,
    title: str = "A ragged batch",
) -> Drawing:
    """Draw a batch as one strip of new tokens, with ``qo_indptr``, ``kv_indptr`` and ``kv_indices``
    under it.

    Parameters
    ----------
    qo_indptr
        ``[n + 1]``: where each request's new tokens begin in the strip.
    kv_indptr
        ``[n + 1]``: where each request's cached slots begin in `kv_indices`.
    kv_indices
        Slots of the cached tokens of all requests, end to end.
    tokens
        Ids of the new tokens, end to end; their positions in the strip by default.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    letters
        Letter of each request; A, B, C … by default.
    page_size
        When given, slots of one page are framed together.
    """
    qo, kv, slots = ints(qo_indptr), ints(kv_indptr), ints(kv_indices)
    if len(qo) != len(kv):
        raise ArgumentError(
            "kv_indptr",
            kv,
            f"has {len(kv)} entries, qo_indptr has {len(qo)}: both need one per request, and one",
        )
    names = list(letters) if letters is not None else [style.letter(i) for i in range(len(qo) - 1)]
    looks, texts = [style.request(name) for name in names], Texts(decode)
    ids = ints(tokens) if tokens is not None else None
    facts = f"{len(names)} requests, {qo[-1]} new tokens, {len(slots)} cached slots"
    canvas = Canvas(
        title, f"A ragged batch: {facts}, laid end to end with their index arrays.", subtitle=facts
    )
    cell = max(min(40.0, 800 / max(qo[-1], len(slots), 1)), 12)
    y = canvas.top + 16
    y = _strip(canvas, "new tokens (q, k, v)", qo, looks, cell, y, "computed",
               lambda i: texts(ids[i]) if ids is not None and i < len(ids) else i)  # fmt: skip
    y = _pointers(canvas, "qo_indptr", qo, looks, cell, y)
    y += 30
    y = _strip(
        canvas,
        "kv_indices: slots of the cached prefixes",
        kv,
        looks,
        cell,
        y,
        "reused",
        lambda i: slots[i],
    )
    if page_size:
        _pages(canvas, kv, slots, page_size, cell, y - cell)
    y = _pointers(canvas, "kv_indptr", kv, looks, cell, y)
    rows = [
        {
            "request": name,
            "new tokens": f"{qo[i]}..{qo[i + 1]}",
            "cached slots": f"{kv[i]}..{kv[i + 1]}",
            "prefix": kv[i + 1] - kv[i],
            "extend": qo[i + 1] - qo[i],
        }
        for i, name in enumerate(names)
    ]
    arrays = (
        f"qo_indptr  {qo}\nkv_indptr  {kv}\nkv_indices "
        f"{slots[:MOST]}{' …' if len(slots) > MOST else ''}"
    )
    return canvas.finish(f"{title}: {facts}\n{style.Table(rows)}\n{arrays}", rows)


def of_batch(batch: Any, table: Any, **options: Any) -> Drawing:
    """Draw a live engine ``Batch`` with the slots that its requests' rows in `table` hold before
    the step."""
    prefix, seq, rows = ints(batch.prefix_lens), ints(batch.seq_lens), ints(batch.rows)
    qo, kv, slots = [0], [0], []
    for row, before, after in zip(rows, prefix, seq, strict=True):
        qo.append(qo[-1] + after - before)
        kv.append(kv[-1] + before)
        slots += ints(table.table[row, :before])
    return draw(qo, kv, slots, tokens=batch.token_ids, **options)


def _strip(
    canvas: Canvas,
    name: str,
    ptr: list[int],
    looks: Any,
    cell: float,
    y: float,
    kind: str,
    text: Any,
) -> float:
    canvas.text(canvas.margin, y, name, size=12.5, weight=600)
    y += 32
    for i, look in enumerate(looks):
        for j in range(ptr[i], min(ptr[i + 1], MOST)):
            canvas.token(
                canvas.margin + j * cell, y, text(j) if cell > 16 else "", kind, look, size=cell
            )
        middle = canvas.margin + (ptr[i] + min(ptr[i + 1], MOST)) / 2 * cell
        if ptr[i] < ptr[i + 1] and ptr[i] < MOST:
            canvas.badge(middle, y - 11, look, r=8)
    if ptr[-1] > MOST:
        canvas.text(
            canvas.margin + MOST * cell + 4,
            y + cell / 2,
            f"… {ptr[-1] - MOST} more",
            fill=style.MUTED,
        )
    return y + cell


def _pointers(
    canvas: Canvas, name: str, ptr: list[int], looks: Any, cell: float, y: float
) -> float:
    """The entries of an indptr array, each pointing up to where its request begins."""
    used: dict[int, int] = {}
    for i, at in enumerate(ptr):
        if at > MOST:
            continue
        x = canvas.margin + at * cell
        nudge = used.get(
            at, 0
        )  # an empty request begins where the next one does: their entries stand side by side
        used[at] = nudge + 1
        colour = looks[i].colour if i < len(looks) else style.MUTED
        canvas.path(f"M{x:.1f} {y + 18:.1f}V{y + 4:.1f}", stroke=colour, line=2)
        canvas.path(
            f"M{x - 4:.1f} {y + 8:.1f}L{x:.1f} {y + 3:.1f}L{x + 4:.1f} {y + 8:.1f}",
            stroke=colour,
            line=2,
        )
        left = x - 13 + nudge * 27
        canvas.rect(left, y + 19, 26, 19, fill="#ffffff", stroke=colour, r=3, line=1.5)
        canvas.text(left + 13, y + 32.5, at, size=11.5, anchor="middle", mono=True, fit=24)
    end = canvas.margin + min(ptr[-1], MOST) * cell + 20 + 27 * (used.get(ptr[-1], 1) - 1)
    canvas.text(end, y + 33, name, size=12.5, weight=600)
    return y + 46


def _pages(
    canvas: Canvas, kv: list[int], slots: list[int], page_size: int, cell: float, y: float
) -> None:
    """Frames around neighbouring slots of one page."""
    for a, b in pairwise(kv):
        for i in range(a, min(b, MOST), page_size):
            run = min(page_size, b - i, MOST - i)
            canvas.used.add("page")
            canvas.rect(
                canvas.margin + i * cell - 0.5,
                y - 0.5,
                run * cell + 1,
                cell + 1,
                stroke=style.INK,
                r=6,
                line=1.3,
            )
