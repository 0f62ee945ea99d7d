"""Memory over time: what is used, what is reserved and never written, what lies in holes too small
to use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.style import Drawing

PARTS = {
    "used": ("tokens written", style.OKABE_ITO["blue"], ""),
    "internal": ("internal waste: held, never written", style.OKABE_ITO["sky"], "///"),
    "reserved": ("reserved, not written yet", style.OKABE_ITO["orange"], "\\\\\\"),
    "external": (
        "external waste: holes too small for the next request",
        style.OKABE_ITO["purple"],
        "xxx",
    ),
}


def draw(
    levels: Mapping[str, Sequence[Mapping[str, float]]],
    capacity: float,
    *,
    unit: str = "slots",
    time: str = "step",
    title: str = "Memory over time",
) -> Drawing:
    """Draw how memory is filled, one panel per policy, all over one time axis.

    Parameters
    ----------
    levels
        By policy (such as ``"contiguous"`` and ``"paged"``), a row per moment with any of ``used,
        internal, reserved, external`` in `unit`, and optionally ``time`` (its number by default).
    capacity
        All memory there is, drawn as the limit line.
    unit, time
        Units of the two axes.

    Raises
    ------
    ArgumentError
        Without any policy, or for a capacity that is no number above 0.
    """
    if not levels:
        raise ArgumentError(
            "levels", levels, "is empty; give at least one policy, with a row per moment"
        )
    style.check_positive("capacity", capacity)
    figure, panels = style.chart(title, f"time ({time})", [f"{name}\n({unit})" for name in levels],
                                 size=(11.95, 1.5 + 3.1 * len(levels)))  # fmt: skip
    rows, said = [], []
    seen = [
        part for part in PARTS if any(row.get(part) for line in levels.values() for row in line)
    ]
    for axes, (name, line) in zip(panels, levels.items(), strict=True):
        times = [row.get("time", i) for i, row in enumerate(line)]
        times = [*times, times[-1] + 1] if times else []
        floor = [0.0] * len(times)
        for part in seen:
            label, colour, hatch = PARTS[part]
            values = [float(row.get(part, 0)) for row in line]
            if not any(values):
                continue
            top = [f + v for f, v in zip(floor, [*values, *values[-1:]], strict=True)]
            axes.fill_between(
                times,
                floor,
                top,
                step="post",
                facecolor=colour if not hatch else style.blend(colour, 0.35),
                edgecolor=colour,
                hatch=hatch,
                linewidth=0.6,
                label=label,
            )
            floor = top
        axes.set_ylim(0, capacity * 1.12)
        if times:
            axes.set_xlim(times[0], times[-1])
        style.limit_line(axes, capacity, f"all memory: {capacity:,g} {unit}")
        used = sum(row.get("used", 0) for row in line)
        held = sum(sum(row.get(p, 0) for p in PARTS if p != "external") for row in line)
        peak = max((row.get("used", 0) for row in line), default=0)
        rows.append(
            {
                "policy": name,
                "moments": len(line),
                f"used ({unit}·{time})": f"{used:,g}",
                f"held ({unit}·{time})": f"{held:,g}",
                "used of held": f"{used / held:.0%}" if held else "",
                "peak used": f"{peak:,g}",
            }
        )
        said.append(f"{name}: {rows[-1]['used of held'] or 'none'} of held memory is used")
    if seen:
        handles = {
            label: h
            for axes in panels
            for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower left",
            ncols=2,
            frameon=False,
            labelcolor=style.INK,
        )
    return style.finish_chart(figure, "Memory by policy over time. " + "; ".join(said) + ".", rows)


def strip(
    segments: Iterable[Mapping[str, Any]],
    size: int,
    *,
    refused: Mapping[str, Any] | None = None,
    page_size: int | None = None,
    title: str = "Memory, slot by slot",
    note: str = "",
) -> Drawing:
    """Draw memory as a line of slots: what requests have written, what they reserved, and the holes
    between.

    Parameters
    ----------
    segments
        Each with ``who`` (letter), ``start``, ``used`` and ``reserved`` slots (the second counts
        the first).
    size
        Slots in all.
    refused
        A request that found no room: ``who`` and ``need``.
    page_size
        When given, pages are framed.
    note
        What happens at this moment.

    Raises
    ------
    ArgumentError
        For a memory, or pages, of no slots.
    """
    style.check_positive("size", size)
    if page_size is not None:
        style.check_positive("page_size", page_size)
    owner: dict[int, tuple[style.Request, bool]] = {}
    parts = [dict(s) for s in segments]
    for part in parts:
        for i in range(int(part["reserved"])):
            owner[int(part["start"]) + i] = (style.request(part["who"]), i < int(part["used"]))
    free = size - len(owner)
    runs, run = [0], 0
    for slot in range(size + 1):
        run = run + 1 if slot < size and slot not in owner else 0
        runs.append(run)
    written = sum(int(p["used"]) for p in parts)
    facts = f"{written} slots written, {len(owner)} reserved, {free} free, largest hole {max(runs)}"
    canvas = Canvas(
        title,
        f"Memory of {size} slots: {facts}. {note}",
        subtitle=f"{note} · {facts}" if note else facts,
    )
    per_row = min(size, 32)
    cell = min(40.0, (canvas.right - canvas.margin) / per_row)
    rows = -(-size // per_row)
    for slot in range(size):
        x, y = (
            canvas.margin + slot % per_row * cell,
            canvas.top + 16 + slot // per_row * (cell + 20),
        )
        look, filled = owner.get(slot, (None, False))
        kind = "free" if look is None else "computed" if filled else "empty"
        canvas.token(x, y, look.letter if look else "", kind, look, size=cell, tip=f"slot {slot}")
        if slot % max(page_size or 4, 4) == 0:
            canvas.text(
                x + cell / 2, y + cell + 12, slot, size=9.5, anchor="middle", fill=style.MUTED
            )
        if page_size and slot % page_size == 0:
            canvas.used.add("page")
            canvas.rect(
                x, y, min(page_size, size - slot) * cell, cell, stroke=style.INK, r=5, line=1.3
            )
    y = canvas.top + 16 + rows * (cell + 20) + 8
    if refused is not None:
        who = style.request(refused["who"])
        canvas.badge(canvas.margin + 10, y + 8, who)
        words = (
            f"needs {refused['need']} slots in a row; {free} are free, the largest hole has "
            f"{max(runs)}: refused"
        )
        canvas.text(canvas.margin + 28, y + 12, words, weight=600)
    canvas.reach(0, y + 14)
    data = [
        {"who": p["who"], "start": p["start"], "used": p["used"], "reserved": p["reserved"]}
        for p in parts
    ]
    text = f"{title}: {facts}\n" + "".join(
        (owner[s][0].letter if owner[s][1] else owner[s][0].letter.lower()) if s in owner else "."
        for s in range(size)
    )
    return canvas.finish(text, data)
