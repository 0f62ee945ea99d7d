"""The map of the house: which room holds what, what stands on what, and which tier this machine
runs."""

from __future__ import annotations

from minikv.device import tier
from minikv.viz.canvas import Canvas
from minikv.viz.style import INK, MUTED, OKABE_ITO, PAPER, SHADE, Drawing, blend

ROOMS = [
    ("engine", 7, "requests in, text out: scheduler, sampler, the loop", "08"),
    ("speculative", 6, "drafts of several tokens, verified in one step", ""),
    ("models", 5, "the decoder that produces K, V and logits; weights, tokenizers", "01 02"),
    ("prefix", 4, "radix cache: which tokens have K and V", "06 07"),
    ("attention", 4, "reads K and V through the page table", "05"),
    ("memory", 3, "pages, request rows, the KV pool", "03 04"),
    ("graphs", 2, "records any step once, replays it", ""),
    ("kernels", 1, "the one import of Triton; launches, copies to the device", ""),
    ("device", 0, "which GPU or CPU, which tier; errors, callers' numbers", "00"),
]
BESIDE = [
    ("viz", "pictures"),
    ("measure", "times, counts"),
    ("lessons", "exercises"),
]
NOT_BUILT = {"speculative"}
TIERS = [
    ("cuda", "G", "compiled Triton kernels on a GPU"),
    ("interpreter", "I", "PyTorch on the CPU; Triton kernels interpreted where asked"),
    ("torch", "T", "PyTorch on the CPU, no Triton"),
]
ROW, LEFT, WIDE, SIDE = 46, 30, 680, 110


def draw() -> Drawing:
    """The rooms of minikv from the ground up, each with its notebooks, and what stands beside them;
    this machine's tier is marked."""
    here = tier()
    canvas = Canvas(
        "The house, read from the ground floor up",
        "Floors 0 to 7, from device at the bottom to engine at the top; viz, measure and lessons "
        f"stand beside them; this machine runs tier {here}.",
        subtitle="A room uses only rooms below it. Numbers on the right are the notebooks that "
        "visit it.",
    )
    first = y = canvas.top + 4
    for name, floor, holds, notebooks in ROOMS:
        # Two rooms share floor 4: neither uses the other, so they stand side by side.
        twin = floor == 4
        x = LEFT + 22 + (WIDE / 2 - 7 if name == "attention" else 0)
        _room(canvas, x, y, WIDE / 2 - 15 if twin else WIDE - 22, name, holds, notebooks)
        canvas.text(LEFT + 8, y + 24, str(floor), size=13.5, anchor="middle", fill=MUTED)
        if name != "prefix":
            y += ROW
    _beside(canvas, first, y - 8)
    y = _tiers(canvas, y + 14, here)
    rows = [
        {"floor": floor, "room": name, "holds": holds, "notebooks": notebooks}
        for name, floor, holds, notebooks in ROOMS
    ]
    lines = [f"floor {r['floor']}  {r['room']:<12} {r['holds']}" for r in rows]
    lines.append(f"beside the floors: {', '.join(f'{n} ({what})' for n, what in BESIDE)}")
    lines.append(f"this machine: tier {here}")
    return canvas.finish("\n".join(lines), rows, legend=False)


def _room(
    canvas: Canvas, x: float, y: float, w: float, name: str, holds: str, notebooks: str
) -> None:
    """One room; the outline of a room that is not built yet is dashed."""
    fill, dash = blend(OKABE_ITO["sky"], 0.16), ""
    if name in NOT_BUILT:
        fill, dash = PAPER, "5 3"
        holds += " (not built yet)"
    canvas.rect(x, y, w, ROW - 8, fill=fill, stroke=OKABE_ITO["blue"], r=6, dash=dash)
    canvas.text(x + 12, y + 16, name, size=13.5, weight=600)
    canvas.text(x + 12, y + 31, holds, size=11, fill=MUTED, fit=w - 24)
    canvas.text(x + w - 12, y + 16, notebooks, size=11.5, mono=True, anchor="end", fill=INK)


def _beside(canvas: Canvas, top: float, bottom: float) -> None:
    """What may use every floor: a tower beside them."""
    tall = (bottom - top + 8) / len(BESIDE)
    for i, (name, what) in enumerate(BESIDE):
        x, y = LEFT + WIDE + 10, top + i * tall
        canvas.rect(x, y, SIDE, tall - 8, fill=SHADE, stroke=MUTED, r=6)
        canvas.text(x + SIDE / 2, y + tall / 2 - 6, name, size=13.5, weight=600, anchor="middle")
        canvas.text(x + SIDE / 2, y + tall / 2 + 10, what, size=11, fill=MUTED, anchor="middle")


def _tiers(canvas: Canvas, y: float, here: str) -> float:
    """The three tiers, with this machine's marked; returns the y below them."""
    wide = WIDE + 10 + SIDE
    canvas.text(LEFT, y + 4, "Tiers", size=13.5, weight=600)
    y += 14
    for name, sign, meaning in TIERS:
        mine = name == here
        fill, edge = (OKABE_ITO["yellow"], INK) if mine else (SHADE, "none")
        canvas.rect(LEFT, y, wide, 28, fill=fill, stroke=edge, r=6)
        canvas.text(LEFT + 12, y + 19, f"{sign}  {name}", size=12.5, weight=600, fill=INK)
        canvas.text(LEFT + 150, y + 19, meaning, size=11.5, fill=INK if mine else MUTED)
        if mine:
            look = {"size": 11.5, "weight": 600, "anchor": "end", "halo": PAPER}
            canvas.text(LEFT + wide - 12, y + 19, "this machine", **look)
        y += 33
    return y
