"""The one legend of every picture, and the ``Drawing`` that all of them return.

A token is a square with its text; a page is a rounded box of ``page_size`` squares with its number;
a request is a colour *and* a letter; what is computed now is solid, what is reused is hatched, what
is free is dotted, what is evicted is struck through; a lock is a padlock with its count. Logical
order stands above, physical memory below, and arrows are the page table. Colours are those of Okabe
and Ito (2008), which colour-blind readers can tell apart.

A drawing stands on its own light card, so that it reads the same in a light and in a dark notebook:
Jupyter and GitHub show SVG as an image, which cannot see the page's colours.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from minikv.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER, INK, MUTED, FAINT, SHADE = "#fdfdfb", "#1b1e23", "#59606b", "#c8ccd2", "#eef0f2"
OKABE_ITO = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "vermillion": "#D55E00",
    "yellow": "#F0E442",
}
NEUTRAL = "#8a919c"
SANS = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, 'Noto Sans CJK SC', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, 'Noto Sans Mono CJK SC', monospace"
LEGEND = {
    "plain": "token",
    "computed": "computed now",
    "reused": "reused",
    "free": "free",
    "empty": "held, empty",
    "evicted": "evicted",
    "page": "page",
    "lock": "locked by n",
    "table": "page table",
}


@dataclass(frozen=True)
class Request:
    """How one request looks everywhere: a letter, a colour, and the ink that reads on that
    colour."""

    letter: str
    colour: str
    ink: str


def luminance(colour: str) -> float:
    """Relative luminance (0 black to 1 white) of ``"#rrggbb"``, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(colour: str) -> str:
    """Black or white, whichever contrasts more with `colour`."""
    return "#000000" if (luminance(colour) + 0.05) ** 2 >= 1.05 * 0.05 else "#ffffff"


def blend(colour: str, share: float, ground: str = PAPER) -> str:
    """`share` (0 to 1) of `colour` mixed into `ground`: a pale tint without transparency."""
    pairs = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c * share + g * (1 - share)):02x}" for c, g in pairs)


def letter(index: int) -> str:
    """``0, 1, …, 25, 26`` as ``A, B, …, Z, AA``."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(65 + rest) + text
    return text


def request(who: int | str) -> Request:
    """The look of request number `who` (from 0), or of the request with this letter.

    Colours repeat after seven requests; the letters never do.

    Examples
    --------
    >>> request(1)
    Request(letter='B', colour='#E69F00', ink='#000000')
    """
    if isinstance(who, int):
        name, index = letter(who), who
    else:
        name, index = who, 0
        for char in who.upper():
            index = index * 26 + (ord(char) - 64 if "A" <= char <= "Z" else ord(char) % 26)
        index = max(index - 1, 0)
    colour = list(OKABE_ITO.values())[index % len(OKABE_ITO)]
    return Request(name, colour, ink_on(colour))


def clean(text: object) -> str:
    """`text` as XML can carry it: escaped, and characters that XML forbids or that would reorder
    the line spelt out.

    Examples
    --------
    >>> clean('<s> & "q"'), clean("a\\x00b")
    ('&lt;s&gt; &amp; &quot;q&quot;', 'a\\\\x00b')
    """
    return escape("".join(_visible(c) for c in str(text)), {'"': "&quot;"})


def _visible(char: str) -> str:
    if char.isascii() and char.isprintable():
        return char
    hidden = (
        unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        and char != "\u200d"
    )
    if not hidden:
        return char
    code = ord(char)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def token_text(text: object) -> str:
    """How a token's text is shown in its square: white space made visible, control characters spelt
    out.

    Examples
    --------
    >>> token_text(" the"), token_text("\\n"), token_text(17)
    ('·the', '↵', '17')
    """
    swapped = str(text).replace("\r\n", "↵").replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return swapped if swapped.isprintable() else "".join(_visible(c) for c in swapped)


def columns(text: str) -> int:
    """Terminal columns that `text` takes: two for CJK and emoji, none for combining marks."""
    return len(text) if text.isascii() else sum(_widths(text))


def _widths(text: str) -> Iterator[int]:
    """Columns of each character; what joins another character takes none."""
    before = " "
    for char in text:
        if (
            char < "\u0300" and before != "\u200d"
        ):  # the common case: nothing below is wide or joins
            before = char
            yield 1
            continue
        joined = char in "\u200d\ufe0f" or before == "\u200d" or unicodedata.combining(char)
        yield 0 if joined else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        before = char


def shorten(text: str, limit: int) -> str:
    """`text` cut to at most `limit` terminal columns, the cut marked by an ellipsis; marks stay
    with their letters."""
    used, end = 0, 0
    for at, width in enumerate(_widths(text)):
        used += width
        if used <= limit - 1:
            end = at + 1
        if used > limit:
            return text[:end].rstrip("\u200d") + "…"
    return text


def pad(text: object, width: int) -> str:
    """`text` filled with spaces up to `width` terminal columns."""
    return f"{text}" + " " * max(width - columns(f"{text}"), 0)


class Table(list):
    """Rows (dicts with the same keys) that print as an aligned table."""

    def __str__(self) -> str:
        if not self:
            return "(no rows)"
        names = list(self[0])
        cells = [[str(row.get(name, "")) for name in names] for row in self]
        widths = [max(columns(c) for c in column) for column in zip(names, *cells, strict=True)]
        lines = [names, ["-" * w for w in widths], *cells]
        return "\n".join(
            "  ".join(pad(c, w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Drawing:
    """A finished picture: SVG for notebooks, text for terminals, and the numbers behind it.

    Attributes
    ----------
    svg
        One ``<svg>`` element with ``role="img"``, a title and a description; it has a viewBox and
        no fixed width.
    text
        The same content for a terminal.
    title, desc
        Its name, and one sentence that says what it shows (the alt text).
    data
        Rows (dicts) of the numbers drawn.
    """

    svg: str
    text: str
    title: str
    desc: str
    data: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """SVG and text only: exporters would prefer HTML over SVG."""
        return {"image/svg+xml": self.svg, "text/plain": self.text}

    def table(self) -> Table:
        """The data as rows that print as an aligned table."""
        return Table(self.data)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a ``.svg`` file, or its text form to a ``.txt`` file, and return the
        path.

        Raises
        ------
        ArgumentError
            When the name ends in neither.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".txt"):
            raise ArgumentError(
                "path", str(path), "a drawing is saved as .svg, or as .txt for its text form"
            )
        path.write_text(self.svg if path.suffix == ".svg" else self.text + "\n", encoding="utf-8")
        return path


def check_positive(argument: str, value: Any) -> None:
    """Raise ArgumentError for what is not a finite number above 0."""
    try:
        good = 0 < value < math.inf
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ArgumentError(argument, value, "must be a number above 0")


def many(count: int, noun: str) -> str:
    """A count with its noun, in the plural where there is one.

    >>> many(1, "token"), many(1200, "token")
    ('1 token', '1,200 tokens')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def si(value: float, unit: str) -> str:
    """A number with a prefix of thousands.

    >>> si(4.02e12, "B/s"), si(750, "B"), si(7e14, "FLOP/s")
    ('4.02 TB/s', '750 B', '700 TFLOP/s')
    """
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {' kMGTP'[power].strip()}{unit}"


def legend(requests: Iterable[int | str] = ("A", "B", "C")) -> Drawing:
    """The legend itself: every mark that the pictures use, with its meaning."""
    from minikv.viz.canvas import Canvas

    canvas = Canvas("The legend of every picture", "Each mark of the pictures with its meaning.")
    who = [request(r) for r in requests]
    canvas.used.update(LEGEND)
    canvas.seen.update({r.letter: r for r in who})
    rows = [{"mark": name, "meaning": meaning} for name, meaning in LEGEND.items()]
    rows += [{"mark": r.letter, "meaning": f"request {r.letter} ({r.colour})"} for r in who]
    return canvas.finish(str(Table(rows)), rows)


def chart(
    title: str,
    xlabel: str,
    ylabel: str | Sequence[str],
    *,
    size: tuple[float, float] = (11.95, 5.4),
) -> tuple[Figure, Any]:
    """An empty Matplotlib figure in the style of the pictures, and its axes; the labels carry their
    units.

    Several `ylabel` make as many panels over one x axis, and a list of axes. The figure is not
    registered with pyplot, so nothing is shown twice and nothing needs closing.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = [ylabel] if isinstance(ylabel, str) else list(ylabel)
    with mpl.rc_context({"font.family": ["DejaVu Sans"], "font.size": 12}):
        figure = Figure(figsize=size, facecolor="none", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.25, h_pad=0.22)  # type: ignore[union-attr]
        panels = list(figure.subplots(len(names), sharex=True, squeeze=False)[:, 0])
        for axes, name in zip(panels, names, strict=True):
            axes.set_facecolor(PAPER)
            axes.set_ylabel(name, color=INK)
            axes.tick_params(colors=MUTED, labelcolor=INK)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(FAINT)
            axes.grid(True, color=SHADE, linewidth=1)
            axes.set_axisbelow(True)
            axes.set_prop_cycle(color=list(OKABE_ITO.values()))
        panels[0].set_title(title, loc="left", fontweight="bold", fontsize=15, color=INK, pad=14)
        panels[-1].set_xlabel(xlabel, color=INK)
    return figure, panels[0] if isinstance(ylabel, str) else panels


def limit_line(
    axes: Axes, value: float, label: str, *, vertical: bool = False, **text: Any
) -> None:
    """A dashed line at a limit of the machine, with its name written on it."""
    line = axes.axvline if vertical else axes.axhline
    line(value, color=OKABE_ITO["vermillion"], linestyle=(0, (6, 3)), linewidth=1.6)
    axes.annotate(
        label,
        (value, 0.98) if vertical else (0.99, value),
        xycoords=axes.get_xaxis_transform() if vertical else axes.get_yaxis_transform(),
        xytext=(6, 0) if vertical else (0, 5),
        textcoords="offset points",
        ha="left" if vertical else "right",
        va="top" if vertical else "bottom",
        color="#a34700",
        **text,
    )


def finish_chart(
    figure: Figure, desc: str, data: Sequence[dict[str, Any]] = (), text: str | None = None
) -> Drawing:
    """A figure made with :func:`chart` as a ``Drawing``: its SVG gets a title, a description and
    ids of its own."""
    import io
    import re

    import matplotlib as mpl

    from minikv.viz.canvas import next_id

    buffer = io.StringIO()
    title = figure.axes[0].get_title(loc="left")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minikv"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    body = buffer.getvalue()
    body = body[body.index("<svg") :]
    mark = next_id(body)
    body = re.sub(r'\bid="', f'id="{mark}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{mark}-", body)
    body = body.replace("'DejaVu Sans'", SANS.replace('"', "'"))
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', body)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    head = (
        f'role="img" aria-labelledby="{mark}-t {mark}-d" style="width:100%;max-width:{width:.0f}px"'
    )
    body = re.sub(
        r'<svg [^>]*?(viewBox="[^"]+")[^>]*>',
        rf'<svg {head} \1 xmlns="http://www.w3.org/2000/svg" '
        rf'xmlns:xlink="http://www.w3.org/1999/xlink"><title id="{mark}-t">{clean(title)}</title>'
        rf'<desc id="{mark}-d">{clean(desc)}</desc><rect x="0.5" y="0.5" width="{width - 1:g}" '
        rf'height="{height - 1:g}" rx="10" fill="{PAPER}" stroke="{FAINT}"/>',
        body,
        count=1,
    )
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.S)
    rows = list(data)
    return Drawing(body.strip(), text or f"{title}\n{Table(rows)}", title, desc, rows)
