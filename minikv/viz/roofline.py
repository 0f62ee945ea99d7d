"""The roofline: how fast a kernel can be at most, given how many operations it does per byte it reads.

The idea is the roofline model of Williams, Waterman and Patterson (2009).
"""

from __future__ import annotations

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
        Each with ``name``, ``intensity`` (operations per byte) and, when measured, ``flops`` (operations per second);
        without it the dot stands on the roof, hollow: a prediction.
    bandwidth
        Bytes per second that memory delivers.
    peak
        Operations per second that the arithmetic units deliver.
    where
        What machine these limits belong to.
    """
    work = [dict(p) for p in points]
    ridge = peak / bandwidth
    low = min([p["intensity"] for p in work] + [ridge]) / 4
    high = max([p["intensity"] for p in work] + [ridge]) * 8
    figure, axes = style.chart(title, "arithmetic intensity (FLOP per byte)", "speed (GFLOP/s)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    roof = [low, ridge, high]
    axes.plot(roof, [min(peak, x * bandwidth) / 1e9 for x in roof], color=style.OKABE_ITO["vermillion"], linewidth=2.2)
    note = {"color": "#a34700", "textcoords": "offset points"}
    axes.annotate(
        f"arithmetic limit {style.si(peak, 'FLOP/s')}", (high, peak / 1e9), xytext=(-4, 6), ha="right", **note
    )
    axes.annotate(
        f"memory limit {style.si(bandwidth, 'B/s')}", (low, low * bandwidth / 1e9), xytext=(8, -4), va="top", **note
    )
    rows = []
    for i, point in enumerate(work):
        limit = min(peak, point["intensity"] * bandwidth)
        speed = point.get("flops")
        look = style.request(i)
        face = style.PAPER if speed is None else look.colour
        y = (limit if speed is None else speed) / 1e9
        axes.plot(
            [point["intensity"]], [y], "o", markersize=10, color=look.colour, markerfacecolor=face, markeredgewidth=2
        )
        axes.annotate(
            point["name"], (point["intensity"], y), xytext=(9, -15), textcoords="offset points", color=style.INK
        )
        bound = "memory" if point["intensity"] < ridge else "arithmetic"
        rows.append({
            "name": point["name"], "FLOP/byte": f"{point['intensity']:.3g}", "limit": style.si(limit, "FLOP/s"),
            "measured": "" if speed is None else style.si(speed, "FLOP/s"),
            "share of limit": "" if speed is None else f"{speed / limit:.0%}", "bound by": bound,
        })  # fmt: skip
    axes.set_xlim(low, high)
    slowest = min([p["flops"] for p in work if p.get("flops")] + [low * bandwidth])
    axes.set_ylim(slowest / 1e9 / 3, peak / 1e9 * 3)
    desc = (
        f"Roofline of {where}: memory {style.si(bandwidth, 'B/s')}, arithmetic {style.si(peak, 'FLOP/s')}; "
        + "; ".join(f"{r['name']} at {r['FLOP/byte']} FLOP per byte is bound by {r['bound by']}" for r in rows)
    )
    return style.finish_chart(figure, desc + ".", rows)
