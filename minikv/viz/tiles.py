"""Attention tile by tile: the running maximum m, sum l and output acc; and which program loads
which slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import ints
from minikv.viz.style import Drawing

MOST_ROWS, MOST_COLUMNS = 40, 64


def steps(scores: Any, values: Any, tile: int) -> list[dict[str, Any]]:
    """The states of the online softmax of one query, one per key tile, in float64.

    Parameters
    ----------
    scores
        ``[keys]`` scaled and masked scores (-inf: masked).
    values
        ``[keys, d_v]``.
    tile
        Keys per tile.

    Returns
    -------
    list of dict
        ``start, stop, scores, m_before, m, alpha`` (what the old sum and output are multiplied by),
        ``p`` (weights of this tile), ``l`` and ``acc``; the answer is the last ``acc / l``.

    Examples
    --------
    >>> last = steps([0.0, 0.0, 0.0], [[1.0], [2.0], [6.0]], tile=2)[-1]
    >>> last["l"], (last["acc"] / last["l"]).tolist()
    (3.0, [3.0])
    """
    s, v = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    m, total, acc, done = -math.inf, 0.0, np.zeros(v.shape[1]), []
    for start in range(0, len(s), tile):
        part = s[start : start + tile]
        top = max(m, float(part.max()))
        safe = 0.0 if top == -math.inf else top  # a tile without a visible key must not make NaN
        alpha = 0.0 if m == -math.inf else math.exp(m - safe)
        p = np.exp(part - safe)
        total, acc = total * alpha + float(p.sum()), acc * alpha + p @ v[start : start + tile]
        done.append(
            {
                "start": start,
                "stop": start + len(part),
                "scores": part,
                "m_before": m,
                "m": top,
                "alpha": alpha,
                "p": p,
                "l": total,
                "acc": acc,
            }
        )
        m = top
    return done


def walk(
    scores: Any,
    values: Any,
    slots: Any = None,
    *,
    tile: int = 4,
    texts: Sequence[str] | None = None,
    who: int | str = "A",
    title: str = "Online softmax, tile by tile",
) -> list[Drawing]:
    """Frames of one query's walk over its key tiles, with the real numbers: the last frame holds
    the answer.

    Parameters
    ----------
    scores, values, tile
        As in :func:`steps`.
    slots
        ``[keys]`` slots that the keys lie in (the page table's view); positions by default.
    texts
        ``[keys]`` texts of the tokens.
    """
    states, look = steps(scores, values, tile), style.request(who)
    where = ints(slots) if slots is not None else list(range(len(np.asarray(scores))))
    frames = []
    for now in range(-1, len(states)):
        frames.append(_frame(states, now, where, texts, look, title, np.asarray(values)))
    return frames


def _frame(
    states: list[dict[str, Any]],
    now: int,
    slots: list[int],
    texts: Any,
    look: style.Request,
    title: str,
    values: Any,
) -> Drawing:
    count, keys = len(states), states[-1]["stop"]
    state = states[now] if now >= 0 else None
    facts = (
        "before the first tile"
        if state is None
        else f"tile {now + 1} of {count}: keys {state['start']} to {state['stop'] - 1}"
    )
    canvas = Canvas(
        title, f"Online softmax, {facts}: running maximum, sum and output.", subtitle=facts
    )
    cell = min(canvas.cell, 790 / keys)
    y = canvas.top + 22
    canvas.text(canvas.margin, y - 6, "keys", size=12, fill=style.MUTED)
    for t, one in enumerate(states):
        x = canvas.margin + one["start"] * cell
        kind = "computed" if t == now else "plain" if t < now else "free"
        owner = None if kind == "free" else look
        for i in range(one["stop"] - one["start"]):
            at = one["start"] + i
            masked = (
                t <= now and one["scores"][i] == -math.inf
            )  # has no weight: grey, and struck through
            mark = "empty" if masked else kind
            canvas.token(
                x + i * cell,
                y,
                texts[at] if texts else at,
                mark,
                None if masked else owner,
                size=cell,
            )
            if masked:
                canvas.line(
                    x + i * cell + 3,
                    y + cell - 3,
                    x + (i + 1) * cell - 3,
                    y + 3,
                    stroke=style.MUTED,
                )
            canvas.text(
                x + (i + 0.5) * cell,
                y + cell + 14,
                f"{slots[at]}",
                size=10,
                anchor="middle",
                fill=style.MUTED,
                mono=True,
            )
            shown = _short(one["scores"][i]) if t <= now else ""
            canvas.text(
                x + (i + 0.5) * cell,
                y + cell + 34,
                shown,
                size=11,
                anchor="middle",
                mono=True,
                fit=cell - 4,
            )
            weight = f"{one['p'][i]:.2g}" if t == now else ""
            canvas.text(
                x + (i + 0.5) * cell,
                y + cell + 52,
                weight,
                size=11,
                anchor="middle",
                mono=True,
                fit=cell - 4,
            )
        if t == now:
            width = (one["stop"] - one["start"]) * cell
            canvas.rect(x - 1, y - 2, width + 2, cell + 60, stroke=style.INK, r=6, line=1.6)
    side = canvas.margin + keys * cell + 12
    for dy, name in ((14, "slot"), (34, "score s"), (52, "weight p")):
        canvas.text(side, y + cell + dy, name, size=11, fill=style.MUTED)
    y += cell + 92
    rows = _numbers(states, now, values.shape[1])
    for i, (name, meaning, value, how) in enumerate(rows):
        top = y + i * 30
        canvas.rect(
            canvas.margin, top - 17, 812, 26, fill=style.SHADE if i % 2 == 0 else style.PAPER, r=5
        )
        canvas.text(canvas.margin + 10, top, name, weight=600, mono=True, size=13)
        canvas.text(canvas.margin + 58, top, meaning, fill=style.MUTED)
        canvas.text(canvas.margin + 250, top, value, mono=True, size=12.5, weight=600, fit=250)
        canvas.text(canvas.margin + 510, top, how, mono=True, size=11.5, fill=style.MUTED, fit=300)
    data = [{"": name, "value": value, "from": how} for name, _, value, how in rows]
    return canvas.finish(f"{title} ({facts})\n{style.Table(data)}", data, legend=False)


def _numbers(states: list[dict[str, Any]], now: int, width: int) -> list[tuple[str, str, str, str]]:
    """(name, meaning, value, how it came about) of the running numbers after tile `now` (-1: before
    the first)."""
    before = states[now - 1] if now > 0 else {"m": -math.inf, "l": 0.0, "acc": np.zeros(width)}
    names = (
        "running maximum",
        "scale of what came before",
        "running sum",
        "running output",
        "the answer",
    )
    if now < 0:
        values, how = ["-∞", "", "0", _vector(before["acc"]), ""], [""] * 5
    else:
        at, last = states[now], now == len(states) - 1
        answer = (
            at["acc"] / at["l"] if at["l"] else np.zeros(width)
        )  # no visible key: the answer is 0
        values = [
            _short(at["m"]),
            _short(at["alpha"]),
            _short(at["l"]),
            _vector(at["acc"]),
            _vector(answer),
        ]
        how = [
            f"max({_short(before['m'])}, {_short(at['scores'].max())})",
            f"exp({_short(before['m'])} − {_short(at['m'])})"
            if before["m"] > -math.inf
            else "nothing before: 0",
            f"{_short(before['l'])}·α + {_short(at['p'].sum())}",
            f"{_vector(before['acc'])}·α + p·V",
            "acc / l",
        ]
        if not last:
            values[4] = how[4] = ""
    return list(zip(("m", "α", "l", "acc", "out"), names, values, how, strict=True))


def _short(value: float) -> str:
    value = float(value)
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _vector(values: Any) -> str:
    some = values if len(values) <= 6 else values[:4]  # more would be too small to read
    return f"[{', '.join(map(_short, some))}{', …' if len(values) > 6 else ''}]"


def load_map(
    counts: Any,
    *,
    ideal: int | None = None,
    programs: Sequence[str] | None = None,
    page_size: int | None = None,
    title: str = "Loads of each program",
    unit: str = "slots",
) -> Drawing:
    """Draw a heat map of recorded loads: a row per program, a column per slot (or page).

    Parameters
    ----------
    counts
        ``[programs, slots]``: how often each program read each slot.
    ideal
        Loads that would do; the total is compared with it.
    programs
        Row names; program 0, 1, … by default.
    page_size
        When given, a line is drawn at each page boundary.
    unit
        What a column is.
    """
    grid = np.asarray(counts)
    facts = f"{grid.shape[0]} programs, {grid.shape[1]} {unit}, {int(grid.sum()):,} loads"
    facts += f" where {ideal:,} would do" if ideal is not None else ""
    canvas = Canvas(title, f"Heat map of loads: {facts}.", subtitle=facts)
    names = list(programs) if programs else [f"program {i}" for i in range(grid.shape[0])]
    rows, cols = grid.shape
    data = [
        {"program": names[r], "loads": int(grid[r].sum()), unit: int((grid[r] > 0).sum())}
        for r in range(rows)
    ]
    fold_rows, fold_cols = -(-rows // MOST_ROWS), -(-cols // MOST_COLUMNS)
    if fold_rows * fold_cols > 1:  # a cell sums a block, so that the picture stays small
        grid = np.add.reduceat(
            np.add.reduceat(grid, range(0, rows, fold_rows), 0), range(0, cols, fold_cols), 1
        )
        names, (rows, cols) = names[::fold_rows], grid.shape
        page_size = page_size // fold_cols if page_size and page_size % fold_cols == 0 else None
    top = max(int(grid.max(initial=0)), 1)
    left = canvas.margin + max(7.0 * max(map(len, names), default=0), 20) + 8
    w, h = min(40.0, (canvas.right - left) / max(cols, 1)), min(26.0, 520 / max(rows, 1))
    y0, blue = canvas.top + 22, style.OKABE_ITO["blue"]
    canvas.text(left, canvas.top + 12, f"{unit} →", size=11.5, fill=style.MUTED)
    for r in range(rows):
        if h >= 9 or r % math.ceil(10 / h) == 0:
            canvas.text(
                left - 8,
                y0 + r * h + h / 2 + 4,
                names[r],
                size=min(11.5, h + 2),
                anchor="end",
                fill=style.MUTED,
            )
        for c in range(cols):
            count = int(grid[r, c])
            if count:
                fill = style.blend(
                    blue, 0.25 + 0.75 * (count - 1) / max(top - 1, 1) if top > 1 else 0.7
                )
                canvas.rect(
                    left + c * w,
                    y0 + r * h,
                    max(w - 1, 0.6),
                    max(h - 1, 0.6),
                    fill=fill,
                    r=2 if w > 8 else 0,
                )
                if w >= 18 and h >= 14:
                    canvas.text(
                        left + c * w + w / 2 - 0.5,
                        y0 + r * h + h / 2 + 4,
                        count,
                        size=10.5,
                        anchor="middle",
                        fill=style.ink_on(fill),
                        fit=w - 2,
                    )
            elif w >= 6:
                canvas.rect(
                    left + c * w, y0 + r * h, w - 1, h - 1, fill=style.SHADE, r=2 if w > 8 else 0
                )
    bottom = y0 + rows * h
    for c in range(0, cols + 1, page_size or max(cols, 1)):
        canvas.line(
            left + c * w - 0.5, y0 - 4, left + c * w - 0.5, bottom + 3, stroke=style.INK, line=1.2
        )
    step = (page_size or 1) * math.ceil(
        cols / 12 / (page_size or 1)
    )  # numbers stand where pages begin
    for c in range(0, cols, step):
        canvas.text(
            left + c * w + w / 2,
            bottom + 16,
            c * fold_cols,
            size=10.5,
            anchor="middle",
            fill=style.MUTED,
        )
    words = "loads of one slot by one program: 1"
    if fold_rows * fold_cols > 1:
        words = f"loads in a block of {fold_rows} × {fold_cols}: 1"
    canvas.text(canvas.margin, bottom + 40, words, fill=style.MUTED)
    at = canvas.margin + 10 + 6.3 * len(words)
    if top == 1:
        canvas.rect(at, bottom + 29, 18, 14, fill=style.blend(blue, 0.7))
    else:
        for i in range(5):
            canvas.rect(
                at + 18 * i, bottom + 29, 18, 14, fill=style.blend(blue, 0.25 + 0.75 * i / 4)
            )
        canvas.text(at + 96, bottom + 40, f"{top}", fill=style.MUTED)
    return canvas.finish(f"{title}: {facts}\n{style.Table(data)}", data, legend=False)
