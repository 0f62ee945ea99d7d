"""What a failing check shows: the expected result and the learner's, cell by cell, and above them
the failing state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minikv.lessons.cells import SIDES, Line, Names, read, word
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.style import INK, MUTED, OKABE_ITO, SANS, Drawing, columns, pad, shorten

if TYPE_CHECKING:
    from minikv.lessons.engine import Case, Exercise

LINES, WIDE = 6, 26  # lines drawn, columns of a word
LOOKS: dict[str, str] = dict(zip(SIDES, (OKABE_ITO["blue"], OKABE_ITO["vermillion"]), strict=True))
NAMES: dict[str, str] = dict(
    zip(SIDES, (OKABE_ITO["blue"], "#a34700"), strict=True)
)  # darker, as text must be


def draw(task: Exercise, case: Case, expected: Any, got: Any) -> Drawing | str:
    """The picture of a failing case, or a word where a result of some strange kind cannot be
    drawn."""
    made = [attempt(lambda: task.picture and task.picture(case, expected, got))]
    if not task.alone:
        made.append(attempt(lambda: side_by_side(expected, got, names=task.parts, note=case.why)))
    found = [drawing for drawing in made if drawing is not None]
    return (
        stack(*found)
        if len(found) > 1
        else found[0]
        if found
        else f"(no picture of a {type(got).__name__})"
    )


def attempt(make: Callable[[], Drawing | None]) -> Drawing | None:
    """What `make` draws, or None when that raises."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ):  # a learner's object runs its own code when it is read, and the verdict must still come
        return None


def side_by_side(expected: Any, got: Any, *, names: Names = (), note: str = "") -> Drawing:
    """Draw `expected` and `got` cell by cell, nested ones line by line under the `names` of their
    parts."""
    every = read(expected, got, names)
    first = next((i for i, line in enumerate(every) if line.differs_at() is not None), len(every))
    start = max(0, min(first - LINES // 2, len(every) - LINES))
    place = every[first].differs_at() or 0 if first < len(every) else 0
    where = f"{every[first].name} at {place}".strip() if first < len(every) else "in no cell shown"
    canvas = Canvas(
        "Expected, and yours",
        f"The result expected and the one that came; they differ first {where}.",
        subtitle=" · ".join(filter(None, [note, "the round mark shows the first difference"])),
    )
    y, text, rows = canvas.top + 4, [canvas.title + (f" ({note})" if note else "")], []
    for at, line in list(enumerate(every))[start : start + LINES]:
        y = _draw(canvas, line, y, place if at == first else None, text, rows)
    rest = [
        f"+{n} more {words}"
        for n, words in ((start, "before"), (len(every) - start - LINES, "after"))
        if n > 0
    ]
    if rest:
        canvas.text(canvas.margin, y + 8, ", ".join(rest), fill=MUTED)
        text.append(f"  {', '.join(rest)}")
    return canvas.finish("\n".join(text), rows, legend=False)


def _draw(
    canvas: Canvas,
    line: Line,
    y: float,
    mark: int | None,
    text: list[str],
    rows: list[dict[str, Any]],
) -> float:
    """One line of the result: boxes for each side, and the mark between them; returns the y
    below."""
    at, low, x0 = mark or 0, max((mark or 0) - 7, 0), canvas.margin + 82
    seen = {side: cells[low : low + 16] for side, cells in line.cells.items() if cells is not None}
    words = {side: [shorten(word(v), WIDE) for v in cells] for side, cells in seen.items()}
    pair = [some[at - low] for some in words.values() if at - low < len(some)]
    if (
        mark is not None and len(pair) == 2 and pair[0] == pair[1]
    ):  # equal as far as they were written out
        words = {
            side: [shorten(word(v, exact=True), WIDE) for v in cells]
            for side, cells in seen.items()
        }
    wide = max(columns(w) for w in max(words.values(), key=len) or "—")
    step = max(7.8 * wide + 16, 40)
    count = max(int((canvas.right - x0 - 76) // step), 3)
    skip = max(at - low - count + 2, 0)
    low, words = low + skip, {side: some[skip : skip + count] for side, some in words.items()}
    head = " · ".join(filter(None, [line.name, f"+{low} before" if low else ""]))
    if head:
        canvas.text(
            canvas.margin, y + 14, head, size=12.5, weight=600, fit=canvas.right - canvas.margin
        )
        text.append(f"  {head}")
        y += 20
    for i in range(max(map(len, words.values())) if max(line.sizes.values()) > 1 else 0):
        canvas.text(
            x0 + i * step + step / 2 - 2, y + 10, low + i, size=9.5, anchor="middle", fill=MUTED
        )
    y += 15 if max(line.sizes.values()) > 1 else 4
    for side, some in words.items():
        canvas.text(canvas.margin, y + 20, side, fill=NAMES[side], weight=600)
        for i in range(max(len(some), at - low + 1 if mark is not None else 0) or 1):
            here, there = mark is not None and i == at - low, i < len(some)
            look = (
                {"fill": style.blend(LOOKS[side], 0.18), "stroke": LOOKS[side], "line": 3, "r": 0}
                if here
                else {}
            )
            look = {"fill": "#ffffff", "stroke": style.NEUTRAL, "r": 5, **look}
            look |= {} if there else {"dash": "1.3 3", "fill": style.PAPER}
            box = max(
                step - 4, 7.8 * columns(some[0]) + 12 if len(some) == 1 else 0
            )  # "raised ..." beside small cells
            canvas.rect(x0 + i * step, y, box, 30, **look)
            canvas.text(
                x0 + i * step + box / 2,
                y + 19.5,
                some[i] if there else "—",
                mono=True,
                anchor="middle",
                weight=600 if here else 400,
                fill=INK if there else MUTED,
                fit=box - 4,
            )
            rows.append(
                {"part": line.name, "at": low + i, "side": side, "value": some[i] if there else ""}
            )
        more = line.sizes[side] - low - len(some)
        if more > 0:
            canvas.text(x0 + len(some) * step + 4, y + 19.5, f"+{more} more", fill=MUTED)
        ends = f" +{more} more" if more > 0 else ""
        text.append(
            "  "
            + pad(side, 10)
            + " ".join(pad(w, wide) for w in some or ["(empty)"]).rstrip()
            + ends
        )
        y += 38 if mark is None else 58
    if mark is not None:
        x, middle = x0 + (at - low) * step + step / 2 - 2, y - 58 - (14 if len(words) == 2 else -44)
        canvas.add(f'<circle cx="{x:g}" cy="{middle:g}" r="10" fill="{LOOKS["yours"]}"/>')
        canvas.path(
            f"M{x - 5:g} {middle - 2:g}h10m-10 4.5h10m-3-8l-4 12", stroke="#ffffff", line=1.8
        )  # not equal
        text.append(" " * (12 + (at - low) * (wide + 1)) + "^ differs")
    return y - 12 if mark is not None and len(words) == 2 else y + 8


def stack(*drawings: Drawing) -> Drawing:
    """One drawing below the other: the state of the failing call, then where its result differs."""
    boxes = [re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', d.svg) for d in drawings]
    sizes = [(float(box[1]), float(box[2])) for box in boxes if box]
    canvas = Canvas("; ".join(d.title for d in drawings), " ".join(d.desc for d in drawings))
    canvas.parts, y = [], 0.0
    canvas.right, canvas.bottom = (
        max(w for w, _ in sizes) - canvas.margin,
        sum(h for _, h in sizes) - 18,
    )
    for one, (w, h) in zip(drawings, sizes, strict=True):
        head = (
            f'<svg y="{y:g}" width="{w:g}" height="{h:g}" viewBox="0 0 {w:g} {h:g}" '
            f'font-family="{SANS}">'
        )
        canvas.add(head + one.svg[one.svg.index(">") + 1 :])
        y += h
    return canvas.finish(
        "\n".join(d.text for d in drawings), [row for d in drawings for row in d.data]
    )
