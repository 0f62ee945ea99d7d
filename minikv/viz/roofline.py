"""The roofline: how fast a kernel can be at most, given how many operations it does per byte it
reads.

The idea is the roofline model of Williams, Waterman and Patterson (2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from minikv.viz import style
from minikv.viz.style import Drawing


def draw(
    points: Iterable[Mapping[str, Any]],
    *,
    bandwidth: float,
    peak: float,
    title: str = "Roofline",
    where: str = "this machine",
) -> Drawing:
    """Draw the roof of a machine and dots of work under it.

    Parameters
    ----------
    points
        Each with ``name``, ``intensity`` (operations per byte) and, when measured, ``flops``
        (operations per second); without it the dot stands on the roof, hollow: a prediction.
    bandwidth
        Bytes per second that memory delivers.
    peak
        Operations per second that the arithmetic units deliver.
    where
        What machine these limits belong to.

    Raises
    ------
    ArgumentError
        For a limit, an intensity or a speed that is no number above 0: the axes are logarithmic.
    """
    work = [dict(p) for p in points]
    style.check_positive("bandwidth", bandwidth)
    style.check_positive("peak", peak)
    for point in work:
        style.check_positive("intensity", point["intensity"])
        if point.get("flops") is not None:
            style.check_positive("flops", point["flops"])
    ridge = peak / bandwidth
    low = min([p["intensity"] for p in work] + [ridge]) / 4
    high = max([p["intensity"] for p in work] + [ridge]) * 8
    figure, axes = style.chart(title, "arithmetic intensity (FLOP per byte)", "speed (GFLOP/s)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    roof = [low, ridge, high]
    axes.plot(
        roof,
        [min(peak, x * bandwidth) / 1e9 for x in roof],
        color=style.OKABE_ITO["vermillion"],
        linewidth=2.2,
    )
    note = {"color": "#a34700", "textcoords": "offset points"}
    axes.annotate(
        f"arithmetic limit {style.si(peak, 'FLOP/s')}",
        (high, peak / 1e9),
        xytext=(-4, 6),
        ha="right",
        **note,
    )
    axes.annotate(
        f"memory limit {style.si(bandwidth, 'B/s')}",
        (low, low * bandwidth / 1e9),
        xytext=(8, -4),
        va="top",
        **note,
    )
    slowest = min([p["flops"] for p in work if p.get("flops")] + [low * bandwidth])
    bottom, top = slowest / 1e9 / 3, peak / 1e9 * 3
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    rows, taken = (
        [],
        [(590.0, 290.0 * _share(peak / 1e9, bottom, top) + 4, 735.0)],
    )  # the text over the flat roof
    for i, point in enumerate(work):
        limit = min(peak, point["intensity"] * bandwidth)
        speed = point.get("flops")
        look = style.request(i)
        face = style.PAPER if speed is None else look.colour
        y = (limit if speed is None else speed) / 1e9
        axes.plot(
            [point["intensity"]],
            [y],
            "o",
            markersize=10,
            color=look.colour,
            markerfacecolor=face,
            markeredgewidth=2,
        )
        at = 735 * _share(point["intensity"], low, high), 290 * _share(y, bottom, top)
        shift, side = _room(*at, len(point["name"]) * 6.4, taken)
        axes.annotate(
            point["name"],
            (point["intensity"], y),
            xytext=shift,
            textcoords="offset points",
            color=style.INK,
            ha=side,
        )
        bound = "memory" if point["intensity"] < ridge else "arithmetic"
        rows.append(
            {
                "name": point["name"],
                "FLOP/byte": _three_digits(point["intensity"]),
                "limit": style.si(limit, "FLOP/s"),
                "measured": "" if speed is None else style.si(speed, "FLOP/s"),
                "share of limit": "" if speed is None else f"{speed / limit:.0%}",
                "bound by": bound,
            }
        )
    desc = (
        f"Roofline of {where}: memory {style.si(bandwidth, 'B/s')}, arithmetic "
        f"{style.si(peak, 'FLOP/s')}; "
        + "; ".join(
            f"{r['name']} at {r['FLOP/byte']} FLOP per byte is bound by {r['bound by']}"
            for r in rows
        )
    )
    return style.finish_chart(figure, desc + ".", rows)


def _share(value: float, low: float, high: float) -> float:
    """Where `value` lies between the ends of a logarithmic axis: 0 to 1."""
    return math.log(value / low) / math.log(high / low)


def _room(
    x: float, y: float, width: float, taken: list[tuple[float, float, float]]
) -> tuple[tuple[float, float], str]:
    """Offset and alignment of a label beside the dot at x, y (points) that leaves the labels in
    `taken` readable."""
    tries = [
        ((9, -15), "left"),
        ((-9, -15), "right"),
        ((9, 6), "left"),
        ((9, -32), "left"),
        ((-9, -32), "right"),
    ]
    for (dx, dy), side in tries:
        start = x + dx - (width if side == "right" else 0)
        if start >= 0 and all(
            abs(y + dy - v) > 14 or start > right or start + width < left
            for left, v, right in taken
        ):
            break
    else:
        (dx, dy), side = tries[0]
        start = x + dx
    taken.append((start, y + dy, start + width))
    return (dx, dy), side


def _three_digits(number: float) -> str:
    """``0.502``, ``22.2``, ``3,960``: three digits that count, without an exponent."""
    return f"{float(f'{number:.3g}'):,.0f}" if abs(number) >= 100 else f"{number:.3g}"
