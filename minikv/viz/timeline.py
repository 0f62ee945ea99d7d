"""A server's time: what each request was doing at each step, and how full the pool was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.style import Drawing

MOST_LANES = 26


def draw(
    events: Iterable[Mapping[str, Any]], *, by: str = "step", title: str = "A server's time"
) -> Drawing:
    """Draw the Gantt chart of an engine's event log over the level of its pool.

    Parameters
    ----------
    events
        The records of ``minikv.engine``'s ``EventLog``: add, admit, step, retract, finish.
    by
        ``"step"``: one unit per step (the same in every run), or ``"time"``: seconds.
    """
    spans, levels, names, marks = _read(list(events), by)
    shown = list(names)[:MOST_LANES]
    unit = "step" if by == "step" else "time (s)"
    labels = ["requests", "pool (tokens)"] if levels else ["requests"]
    figure, panels = style.chart(
        title, unit, labels, size=(11.95, 2.6 + 0.32 * len(shown) + (2.4 if levels else 0))
    )
    lanes = panels[0]
    if levels:
        from matplotlib.gridspec import GridSpec

        grid = GridSpec(2, 1, figure=figure, height_ratios=[max(0.32 * len(shown) + 0.8, 1.6), 2.4])
        for i, panel in enumerate(panels):
            panel.set_subplotspec(grid[i])
    seen: set[str] = set()
    for i, name in enumerate(shown):
        look = style.request(i)
        for start, stop, kind in spans.get(name, ()):
            face = {
                "prefill": look.colour,
                "decode": style.blend(look.colour, 0.4),
                "wait": style.PAPER,
            }[kind]
            lanes.barh(
                i,
                stop - start,
                left=start,
                height=0.72,
                facecolor=face,
                linewidth=1,
                edgecolor=style.NEUTRAL if kind == "wait" else look.colour,
                linestyle=":" if kind == "wait" else "-",
            )
            seen.add(kind)
        for at, kind in marks.get(name, ()):
            shape, colour = (
                ("X", style.OKABE_ITO["vermillion"]) if kind == "retracted" else ("|", style.INK)
            )
            lanes.plot(
                [at],
                [i],
                shape,
                color=colour,
                markersize=11,
                markeredgewidth=1.6 if shape == "|" else 0.5,
            )
            seen.add(kind)
    lanes.set_yticks(
        range(len(shown)), [f"{style.letter(i)} · {name}" for i, name in enumerate(shown)]
    )
    lanes.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    lanes.grid(False, axis="y")
    _key(lanes, seen)
    if levels:
        times = [level["at"] for level in levels]
        running = [level["size"] - level["available"] - level["evictable"] for level in levels]
        cached = [r + level["evictable"] for r, level in zip(running, levels, strict=True)]
        blue = style.OKABE_ITO["blue"]
        panels[1].fill_between(times, running, step="pre", facecolor=blue, label="held by requests")
        panels[1].fill_between(
            times,
            running,
            cached,
            step="pre",
            facecolor=style.blend(blue, 0.25),
            edgecolor=blue,
            hatch="///",
            linewidth=0.5,
            label="cached, evictable",
        )
        size = levels[0]["size"]
        panels[1].set_ylim(0, size * 1.16)
        style.limit_line(panels[1], size, f"pool: {size:,} tokens")
        panels[1].legend(loc="upper left", frameon=False, ncols=2, labelcolor=style.INK)
    rows = []
    for i, name in enumerate(names):
        total = {
            k: sum(b - a for a, b, kind in spans.get(name, ()) if kind == k)
            for k in ("wait", "prefill", "decode")
        }
        retractions = sum(kind == "retracted" for _, kind in marks.get(name, ()))
        rows.append(
            {
                "letter": style.letter(i),
                "request": name,
                **{k: f"{v:.4g}" for k, v in total.items()},
                "retracted": retractions,
            }
        )
    more = f" (the first {MOST_LANES} shown)" if len(names) > MOST_LANES else ""
    desc = f"What {len(names)} requests{more} did over {unit}, and the level of the pool below."
    return style.finish_chart(figure, desc, rows)


def _read(log: list[Mapping[str, Any]], by: str) -> tuple[dict, list[dict], list, dict]:
    """Spans (start, stop, kind) and marks per request, pool levels per step, and the requests in
    order of arrival."""
    zero = log[0]["t"] if log else 0.0
    now, step = 0.0, 0
    spans: dict[Any, list[tuple[float, float, str]]] = {}
    marks: dict[Any, list[tuple[float, str]]] = {}
    waiting: dict[Any, float] = {}
    levels: list[dict] = []
    names: list[Any] = []
    for e in log:
        here = step if by == "step" else e["t"] - zero
        kind, who = e["event"], e.get("id")
        if kind == "add":
            names.append(who)
            waiting[who] = here
        elif kind == "admit" and who in waiting:
            start = waiting.pop(who)
            if here > start:
                spans.setdefault(who, []).append((start, here, "wait"))
        elif kind == "retract":
            marks.setdefault(who, []).append((here, "retracted"))
            waiting[who] = here
        elif kind == "finish":
            marks.setdefault(who, []).append((here, "finished"))
        elif kind == "step":
            step += 1
            stop = step if by == "step" else e["t"] - zero
            begin = step - 1 if by == "step" else now
            for one, what in [
                *((i, "prefill") for i, _ in e["extends"]),
                *((i, "decode") for i, _ in e["decodes"]),
            ]:
                line = spans.setdefault(one, [])
                if line and line[-1][2] == what and line[-1][1] == begin:
                    line[-1] = (line[-1][0], stop, what)
                else:
                    line.append((begin, stop, what))
            levels.append({"at": stop, **{k: e[k] for k in ("available", "evictable", "size")}})
            now = stop
        if kind != "step":
            now = max(now, here) if by == "time" else now
    if levels:
        levels.insert(0, {**levels[0], "at": 0})
    return spans, levels, names, marks


def _key(axes: Any, seen: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colour = style.NEUTRAL
    every = {
        "wait": Patch(facecolor=style.PAPER, edgecolor=colour, linestyle=":", label="waits"),
        "prefill": Patch(facecolor=colour, edgecolor=colour, label="prefill"),
        "decode": Patch(facecolor=style.blend(colour, 0.4), edgecolor=colour, label="decode"),
        "retracted": Line2D(
            [], [], marker="X", linestyle="", color=style.OKABE_ITO["vermillion"], label="retracted"
        ),
        "finished": Line2D(
            [], [], marker="|", linestyle="", color=style.INK, markersize=11, label="finished"
        ),
    }
    axes.legend(
        handles=[h for k, h in every.items() if k in seen],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        ncols=5,
        labelcolor=style.INK,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def lanes(
    spans: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    unit: str = "µs",
    title: str = "Lanes",
    desc: str = "",
) -> Drawing:
    """Draw work on parallel lanes (CPU and GPU, or the SMs of a chip) over one time axis.

    Parameters
    ----------
    spans
        By lane, its pieces of work (start, stop, label); equal labels get equal colours.
    unit
        Unit of time.
    """
    stop = max((b for line in spans.values() for _, b, _ in line), default=1.0)
    kinds = list(dict.fromkeys(label for line in spans.values() for *_, label in line))
    busy = {name: sum(b - a for a, b, _ in line) / stop for name, line in spans.items()}
    facts = ", ".join(f"{name} {share:.0%} busy" for name, share in list(busy.items())[:6])
    canvas = Canvas(
        title, desc or f"{len(spans)} lanes over {stop:,.4g} {unit}: {facts}.", subtitle=facts
    )
    left = canvas.margin + min(max(7.2 * max((len(n) for n in spans), default=0), 30) + 12, 160)
    tall = 30 if len(spans) <= 16 else 14
    scale = (canvas.right - left) / stop
    y = canvas.top + 6
    for name, line in spans.items():
        canvas.text(
            left - 10,
            y + tall / 2 + 4,
            name,
            anchor="end",
            fill=style.MUTED,
            fit=left - canvas.margin - 12,
        )
        canvas.line(left, y + tall, canvas.right, y + tall, stroke=style.SHADE, line=1)
        for start, end, label in line:
            look = style.request(kinds.index(label))
            width = max((end - start) * scale - 1, 1)
            canvas.rect(
                left + start * scale,
                y + 2,
                width,
                tall - 4,
                fill=look.colour,
                r=3,
                tip=f"{label}: {start:g}–{end:g} {unit}",
            )
            if width > 14 and tall > 20:
                canvas.text(
                    left + start * scale + width / 2,
                    y + tall / 2 + 4,
                    label,
                    size=11,
                    anchor="middle",
                    fill=look.ink,
                    fit=width - 4,
                )
        y += tall + 4
    for i in range(6):
        x = left + i / 5 * (canvas.right - left)
        canvas.line(x, y, x, y + 4, stroke=style.NEUTRAL)
        canvas.text(
            x,
            y + 17,
            f"{stop * i / 5:,.4g}",
            size=10.5,
            anchor="middle" if i < 5 else "end",
            fill=style.MUTED,
        )
    canvas.text(
        (left + canvas.right) / 2,
        y + 34,
        f"time ({unit})",
        size=11.5,
        anchor="middle",
        fill=style.MUTED,
    )
    x, y = canvas.margin, y + 58
    for i, label in enumerate(kinds[:12]):
        wide = 34 + 7 * len(label)
        if x + wide > canvas.right:
            x, y = canvas.margin, y + 22
        canvas.rect(x, y - 11, 16, 14, fill=style.request(i).colour, r=3)
        canvas.text(x + 22, y, label, size=11.5, fill=style.MUTED)
        x += wide
    data = [
        {"lane": n, "start": a, "stop": b, "what": label}
        for n, line in spans.items()
        for a, b, label in line
    ]
    return canvas.finish(f"{title}: {facts}\n{style.Table(data)}", data, legend=False)
