"""Which query sees which key: the attention triangle, its cached part, windows and tree masks."""

from __future__ import annotations

from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Texts, ints
from minikv.viz.style import Drawing

MOST = 40
MEANING = {
    "computed": "computed now",
    "reused": "with K and V from the cache",
    "plain": "computed before",
    "free": "masked, or not there yet",
}


def draw(
    new_len: int,
    prefix_len: int = 0,
    *,
    causal: bool = True,
    sliding_window: int = -1,
    mask: Any = None,
    row: int | None = None,
    tile: tuple[int, int] | None = None,
    tokens: Any = None,
    decode: Any = None,
    who: int | str = "A",
    title: str = "Attention triangle",
) -> Drawing:
    """Draw the grid of queries (rows) and keys (columns) of one request.

    A pair that is computed is solid, a key that came from the cache is hatched, a pair that is
    masked is dotted.

    Parameters
    ----------
    new_len, prefix_len
        Tokens computed now, and tokens whose K and V are already in the cache.
    causal, sliding_window
        As in ``extend_attention``: a key is seen when it is not in the future and at most
        `sliding_window` tokens back.
    mask
        Bool ``[new_len, prefix_len + new_len]`` that replaces causality, as for a draft tree.
    row
        Only this new token's row is drawn as computed now; the earlier ones are shown as done
        before.
    tile
        (queries, keys) per tile: tiles are framed, and those without a visible pair are marked as
        skipped.
    tokens, decode
        Ids of all tokens, and their texts.
    who
        The request's letter.

    Raises
    ------
    ArgumentError
        When the mask has another shape.
    """
    total, look, texts = prefix_len + new_len, style.request(who), Texts(decode)
    seen = visible(new_len, prefix_len, causal, sliding_window, mask)
    ids = ints(tokens) if tokens is not None else []
    pairs = sum(map(sum, seen))
    facts = (
        f"{new_len} queries × {total} keys ({prefix_len} cached): {pairs} of {new_len * total} "
        "pairs are computed"
    )
    if row is not None:
        facts = f"row {row} is computed now: {sum(seen[row])} of {total} keys are seen"
    if total > MOST:
        raise ArgumentError("new_len", new_len, f"draw at most {MOST} keys; show a smaller request")
    canvas = Canvas(title, f"Attention of one request: {facts}.", subtitle=facts)
    cell = min(34.0, 560 / max(total, 1))
    x0, y0 = canvas.margin + 100, canvas.top + 66
    label = [texts(ids[i]) if i < len(ids) else str(i) for i in range(total)]
    canvas.text(x0, canvas.top + 8, "keys, by position", size=12, fill=style.MUTED)
    canvas.text(canvas.margin, y0 - 8, "queries", size=12, fill=style.MUTED)
    for k in range(total):
        at = k - prefix_len
        kind = (
            "reused"
            if at < (0 if row is None else row)
            else "computed"
            if row is None or at == row
            else "free"
        )
        canvas.token(x0 + k * cell, canvas.top + 20, label[k], kind, look, size=cell)
    for q in range(new_len):
        y = y0 + q * cell
        now = row is None or q == row
        kind = "computed" if now else "plain" if row is not None and q < row else "free"
        canvas.token(x0 - cell - 10, y, label[prefix_len + q], kind, look, size=cell)
        canvas.text(
            x0 - cell - 18,
            y + cell / 2 + 4,
            prefix_len + q,
            size=10.5,
            anchor="end",
            fill=style.MUTED,
        )
        for k in range(total):
            kind = "free" if not seen[q][k] or (row is not None and q > row) else "plain"
            if kind == "plain" and now:
                kind = (
                    "reused"
                    if k < prefix_len or (row is not None and k < prefix_len + q)
                    else "computed"
                )
            _pair(canvas, x0 + k * cell, y, cell, kind, look)
    bottom = y0 + new_len * cell
    skipped = 0
    if tile:
        skipped = _tiles(canvas, seen, tile, x0, y0, cell)
        words = (
            "1 tile without a visible pair is"
            if skipped == 1
            else f"{skipped} tiles without a visible pair are"
        )
        canvas.text(x0, bottom + 20, f"{words} skipped", fill=style.MUTED)
    x, y = x0 + total * cell + 24, y0
    for kind, words in MEANING.items():
        if kind in canvas.used:
            canvas.legend_square(x, y, kind, look)
            canvas.text(x + 26, y + 13, words, fill=style.MUTED)
            y += 26
    data = [
        {"query": prefix_len + q, "keys seen": "".join("x" if s else "." for s in line)}
        for q, line in enumerate(seen)
    ]
    return canvas.finish(f"{title}: {facts}\n{style.Table(data)}", data, legend=False)


def visible(
    new_len: int, prefix_len: int, causal: bool, sliding_window: int, mask: Any
) -> list[list[bool]]:
    """For each query, which keys it sees."""
    total = prefix_len + new_len
    if mask is not None:
        rows = [
            [bool(v) for v in line] for line in (mask.tolist() if hasattr(mask, "tolist") else mask)
        ]
        if len(rows) != new_len or any(len(r) != total for r in rows):
            raise ArgumentError(
                "mask", f"{len(rows)} rows", f"needs {new_len} rows of {total} keys"
            )
    else:
        rows = [[not causal or k <= prefix_len + q for k in range(total)] for q in range(new_len)]
    if sliding_window >= 0:
        rows = [
            [s and prefix_len + q - k <= sliding_window for k, s in enumerate(r)]
            for q, r in enumerate(rows)
        ]
    return rows


def _pair(canvas: Canvas, x: float, y: float, cell: float, kind: str, look: style.Request) -> None:
    """One query–key pair: a smaller mark than a token, so that the grid stays calm."""
    canvas.used.add(kind)
    canvas.add(f'<g data-pair="{kind}">')
    a, w = cell * 0.08, cell * 0.84
    if kind == "computed":
        canvas.rect(x + a, y + a, w, w, fill=look.colour, r=2)
    elif kind == "reused":
        canvas.hatch(x + a, y + a, w, w, look.colour, step=5)
        canvas.rect(x + a, y + a, w, w, stroke=look.colour, r=2)
    elif kind == "plain":
        canvas.rect(x + a, y + a, w, w, fill=style.blend(look.colour, 0.22), r=2)
    else:
        canvas.rect(x + a, y + a, w, w, stroke=style.FAINT, r=2, dash="1.3 2.6", line=1.2)
    canvas.add("</g>")


def _tiles(
    canvas: Canvas, seen: list[list[bool]], tile: tuple[int, int], x0: float, y0: float, cell: float
) -> int:
    """Frames of the tiles; returns how many have no visible pair."""
    skipped = 0
    for q in range(0, len(seen), tile[0]):
        for k in range(0, len(seen[0]), tile[1]):
            part = [line[k : k + tile[1]] for line in seen[q : q + tile[0]]]
            w, h = len(part[0]) * cell, len(part) * cell
            x, y = x0 + k * cell, y0 + q * cell
            needed = any(map(any, part))
            skipped += not needed
            canvas.rect(
                x,
                y,
                w,
                h,
                stroke=style.INK if needed else style.NEUTRAL,
                line=1.8 if needed else 1.2,
                r=2,
            )
            if not needed:
                canvas.line(
                    x + 3,
                    y + h - 3,
                    x + w - 3,
                    y + 3,
                    stroke=style.OKABE_ITO["vermillion"],
                    line=1.5,
                )
    return skipped
