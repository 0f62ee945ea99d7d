"""The primitives that pictures are made of: token squares, page boxes, padlocks, arrows, and the
card they stand on.

Only plain shapes with their own attributes are used: no style sheet, pattern or marker that another
figure on the same page could clash with. The only ids are those of title and description.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from minikv.viz import style
from minikv.viz.style import (
    FAINT,
    INK,
    LEGEND,
    MONO,
    MUTED,
    NEUTRAL,
    PAPER,
    SANS,
    Drawing,
    Request,
    clean,
)

_count = itertools.count(1)


def next_id(content: str) -> str:
    """An id prefix that no other figure has: of this process by its number, of other pages by its
    content."""
    return f"k{hashlib.sha1(content.encode('utf-8', 'replace')).hexdigest()[:6]}-{next(_count)}"


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """A card that pictures are drawn on; it grows with what is drawn, so nothing is cut off.

    Parameters
    ----------
    title, desc
        Name and one-sentence alt text.
    width
        Smallest width in pixels. Pictures of equal width show their squares at equal size.
    subtitle
        A muted line under the title.
    """

    cell = 40

    def __init__(self, title: str, desc: str, *, width: float = 860, subtitle: str = "") -> None:
        self.title, self.desc = title, desc
        self.parts: list[str] = []
        self.right, self.bottom, self.margin = width - 24.0, 40.0, 24.0
        self.used: set[str] = set()
        self.seen: dict[str, Request] = {}
        self.text(self.margin, 31, title, size=16, weight=600)
        self.top = 54.0
        if subtitle:
            self.text(
                self.margin, 51, subtitle, size=12.5, fill=MUTED, fit=self.right - self.margin
            )
            self.top = 74.0

    def reach(self, x: float, y: float) -> None:
        """Make the card large enough for the point (x, y)."""
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)

    def add(self, part: str) -> None:
        self.parts.append(part)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        r: float = 0,
        line: float = 1,
        dash: str = "",
        tip: str = "",
    ) -> None:
        """A rectangle with rounding `r`; `tip` is shown when the pointer rests on it."""
        self.reach(x + w, y + h)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' rx="{number(r)}"' if r else ""
        if stroke != "none":
            more += f' stroke="{stroke}" stroke-width="{line:g}"'
        end = f"><title>{clean(tip)}</title></rect>" if tip else "/>"
        box = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        self.add(f'<rect {box} fill="{fill}"{more}{end}')

    def path(
        self, d: str, *, stroke: str = MUTED, fill: str = "none", line: float = 1.5, dash: str = ""
    ) -> None:
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self.add(
            f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{line:g}" '
            f'stroke-linecap="round"{more}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, **look: Any) -> None:
        self.reach(max(x1, x2), max(y1, y2))
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", **look)

    def text(
        self,
        x: float,
        y: float,
        text: object,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        weight: int = 400,
        mono: bool = False,
        halo: str = "",
        fit: float = 0,
    ) -> None:
        """One line of text with its baseline at y.

        `fit` is the room in pixels: the letters shrink to 8 px, then the line is cut with an
        ellipsis.
        """
        shown = "".join(style._visible(c) for c in str(text))
        per = (0.602 if mono else 0.59) * (1.04 if weight > 500 else 1)
        if fit:
            size = min(size, max(8.0, fit / (max(style.columns(shown), 1) * per)))
            shown = style.shorten(shown, max(int(fit / (size * per) + 0.05), 1))
        wide = style.columns(shown) * size * per
        self.reach(x + {"start": wide, "middle": wide / 2, "end": 0}[anchor], y + size * 0.3)
        look = f' font-family="{MONO}"' if mono else ""
        look += f' text-anchor="{anchor}"' if anchor != "start" else ""
        look += f' font-weight="{weight}"' if weight != 400 else ""
        if halo:
            look += (
                f' stroke="{halo}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
            )
        spot = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
        self.add(f'<text {spot} fill="{fill}"{look}>{clean(shown)}</text>')

    def token(
        self,
        x: float,
        y: float,
        text: object = "",
        kind: str = "plain",
        who: Request | None = None,
        *,
        size: float | None = None,
        tip: str = "",
    ) -> None:
        """A token's square; `kind` is ``plain``, ``computed``, ``reused``, ``free``, ``empty``
        (held, not written) or ``evicted``."""
        s = self.cell if size is None else size
        colour = who.colour if who else NEUTRAL
        self.used.add(kind)
        if who:
            self.seen.setdefault(who.letter, who)
        shown = style.token_text(text)
        r, x0, y0, w = 3, x + 1.5, y + 1.5, s - 3
        self.add(f'<g data-token="{kind}">')
        if kind == "computed":
            self.rect(x0, y0, w, w, fill=colour, stroke=colour, r=r, tip=tip)
        elif kind == "reused":
            self.rect(x0, y0, w, w, fill=PAPER, r=r, tip=tip)
            self.hatch(x0, y0, w, w, colour)
            self.rect(x0, y0, w, w, stroke=colour, r=r, line=1.5)
        elif kind == "free":
            self.rect(x0, y0, w, w, fill=PAPER, stroke=MUTED, r=r, line=1.3, dash="1.3 3", tip=tip)
        elif kind == "empty":
            fill, edge = (style.blend(colour, 0.18), colour) if who else (PAPER, FAINT)
            self.rect(x0, y0, w, w, fill=fill, stroke=edge, r=r, tip=tip)
        elif kind == "evicted":
            self.rect(x0, y0, w, w, fill=style.SHADE, stroke=NEUTRAL, r=r, tip=tip)
        else:
            tint = style.blend(colour, 0.22) if who else "#ffffff"
            self.rect(x0, y0, w, w, fill=tint, stroke=colour, r=r, line=1.2, tip=tip)
        if shown:
            fill = (
                (who.ink if who else INK)
                if kind == "computed"
                else MUTED
                if kind in ("free", "evicted")
                else INK
            )
            if kind == "computed" and not who:
                fill = style.ink_on(NEUTRAL)
            halo = PAPER if kind == "reused" else ""
            self.text(
                x + s / 2,
                y + s / 2 + 4,
                shown,
                size=min(13, s * 0.38),
                anchor="middle",
                mono=True,
                fill=fill,
                halo=halo,
                fit=w - 2,
            )
        if kind == "evicted":
            self.line(
                x0 + 2, y0 + w - 2, x0 + w - 2, y0 + 2, stroke=style.OKABE_ITO["vermillion"], line=2
            )
        self.add("</g>")

    def hatch(self, x: float, y: float, w: float, h: float, colour: str, step: float = 6) -> None:
        """Diagonal lines over a box, drawn as one path."""
        d, t = "", step * 0.75
        while t < w + h:
            x1, y1 = (x + t, y) if t <= w else (x + w, y + t - w)
            x2, y2 = (x, y + t) if t <= h else (x + t - h, y + h)
            d += f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"
            t += step
        self.add(f'<path d="{d}" stroke="{colour}" stroke-width="1.6" opacity="0.6" fill="none"/>')

    def page_box(
        self, count: int, size: float | None = None, down: bool = False
    ) -> tuple[float, float]:
        """Width and height of the box of a page of `count` squares, side by side or (`down`) one
        below the other."""
        s = self.cell if size is None else size
        return (s + 8, count * s + 23) if down else (count * s + 8, s + 23)

    def page(
        self,
        x: float,
        y: float,
        page: object,
        count: int,
        *,
        size: float | None = None,
        down: bool = False,
        free: bool = False,
        note: str = "",
        stroke: str = INK,
    ) -> tuple[float, float]:
        """A page's rounded box with its number; returns where its first square goes."""
        w, h = self.page_box(count, size, down)
        self.used.add("page")
        self.add(f'<g data-page="{clean(page)}">')
        if free:
            self.rect(x, y, w, h, fill=PAPER, stroke=MUTED, r=7, line=1.2, dash="1.3 3.2")
        else:
            self.rect(x, y, w, h, fill="#ffffff", stroke=stroke, r=7, line=1.4)
        ink = MUTED if free else INK
        if w > 80:
            self.text(x + 8, y + 14, f"page {page}", size=10.5, weight=600, fill=ink)
        else:
            self.text(
                x + w / 2, y + 14, page, size=11, weight=600, fill=ink, anchor="middle", fit=w - 6
            )
        if note:
            self.text(x + w - 8, y + 14, note, size=10.5, anchor="end", fill=MUTED)
        self.add("</g>")
        return x + 4, y + 19

    def padlock(self, x: float, y: float, count: int) -> float:
        """A padlock with its count, its base line at y; returns the x after it."""
        self.used.add("lock")
        self.add(f'<g data-lock="{count}">')
        self.path(
            f"M{number(x + 2.5)} {number(y - 6)}v-3a3.5 3.5 0 0 1 7 0v3", stroke=INK, line=1.7
        )
        self.rect(x, y - 6.5, 12, 8, fill=INK, r=1.8)
        self.text(x + 15.5, y + 1, count, size=11.5, weight=600)
        self.add("</g>")
        return x + 20 + 7 * len(str(count))

    def badge(self, x: float, y: float, who: Request, *, r: float = 9.5) -> None:
        """A request's letter in its colour, centred at (x, y)."""
        self.seen.setdefault(who.letter, who)
        self.reach(x + r, y + r)
        self.add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" fill="{who.colour}"/>')
        self.text(
            x,
            y + r * 0.4,
            who.letter,
            size=r * 1.22,
            anchor="middle",
            weight=600,
            fill=who.ink,
            fit=2 * r,
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = MUTED, dash: str = ""
    ) -> None:
        """A curved arrow that leaves and arrives vertically: logical order above, memory below."""
        self.used.add("table")
        middle = (y1 + y2) / 2
        tip = y2 - 5
        self.path(
            f"M{number(x1)} {number(y1)}C{number(x1)} {number(middle)} {number(x2)} "
            f"{number(middle)} "
            f"{number(x2)} {number(tip)}",
            stroke=colour,
            line=1.8,
            dash=dash,
        )
        self.add(f'<path d="M{number(x2 - 4)} {number(tip - 2)}h8l-4 7z" fill="{colour}"/>')
        self.reach(x2 + 4, y2)

    def _legend(self, y: float) -> None:
        """One line that explains the marks this picture used, and the letters of its requests."""
        shown = [k for k in LEGEND if k in self.used]
        if self.used != set(LEGEND):  # a plain token explains itself beside the others
            shown = [
                k for k in shown if k != "plain" or not self.used & {"computed", "reused"}
            ] or shown
        x, neutral = self.margin, Request("", NEUTRAL, INK)
        width = self.right

        def room(length: float) -> None:
            nonlocal x, y
            if x + length > width and x > self.margin:
                x, y = self.margin, y + 26

        used, seen = set(self.used), dict(self.seen)
        for kind in shown:
            words = LEGEND[kind]
            length = 32 + 6.3 * len(words) + 10
            room(length)
            self.add(f'<g data-legend="{kind}">')
            if kind == "page":
                self.rect(x, y - 10, 24, 16, fill="#ffffff", stroke=INK, r=5, line=1.4)
                self.text(x + 12, y + 2, "n", size=9.5, anchor="middle", weight=600)
            elif kind == "lock":
                self.padlock(x + 1, y + 2, "n")  # type: ignore[arg-type]
            elif kind == "table":
                self.line(x + 1, y - 2, x + 18, y - 2, stroke=MUTED, line=1.8)
                self.add(f'<path d="M{number(x + 17)} {number(y - 6)}v8l7-4z" fill="{MUTED}"/>')
            else:
                self.legend_square(x + 4, y - 11, kind, neutral)
            self.text(x + 30, y + 2.5, words, size=11.5, fill=MUTED)
            self.add("</g>")
            x += length
        for who in sorted(seen.values(), key=lambda r: (len(r.letter), r.letter)):
            length = 26 + 6.3 * (8 + len(who.letter)) + 10
            room(length)
            self.badge(x + 10, y - 2, who)
            self.text(x + 25, y + 2.5, f"request {who.letter}", size=11.5, fill=MUTED)
            x += length
        self.used, self.seen = used, seen
        self.bottom = max(self.bottom, y + 10)

    def legend_square(self, x: float, y: float, kind: str, who: Request) -> None:
        before = len(self.parts)
        self.token(x, y, "", kind, who, size=18)
        self.parts[before:] = [
            part.replace("data-token", "data-mark") for part in self.parts[before:]
        ]

    def finish(
        self, text: str, data: list[dict[str, Any]] | None = None, *, legend: bool = True
    ) -> Drawing:
        """Draw the legend line, close the card and return the drawing."""
        if legend and (self.used or self.seen):
            y = self.bottom + 30
            self.line(self.margin, y - 18, self.right, y - 18, stroke=FAINT, line=1)
            self._legend(y + 3)
        width, height = self.right + self.margin, self.bottom + 18
        body = "".join(self.parts)
        mark = next_id(body)
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} '
            f'{number(height)}" role="img" '
            f'aria-labelledby="{mark}-t {mark}-d" style="width:100%;max-width:{number(width)}px" '
            f'font-family="{SANS}"><title id="{mark}-t">{clean(self.title)}</title>'
            f'<desc id="{mark}-d">{clean(self.desc)}</desc>'
            f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" '
            'rx="10" '
            f'fill="{PAPER}" stroke="{FAINT}"/>{body}</svg>'
        )
        return Drawing(svg, text, self.title, self.desc, data or [])
