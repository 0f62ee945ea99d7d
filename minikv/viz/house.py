"""The map of the house: which room holds what, what stands on what, and which tier this machine
runs."""

from __future__ import annotations

from minikv.device import tier
from minikv.viz.canvas import Canvas
from minikv.viz.style import INK, MUTED, OKABE_ITO, PAPER, SHADE, Drawing, blend

ROOMS = [
    ("engine", "5", "requests in, text out: scheduler, sampler, the loop", "08"),
    ("graphs", "4", "record a decode step once, replay it", ""),
    ("models", "3", "the decoder that produces K, V and logits", "01 02"),
    ("prefix", "2", "radix cache: which tokens have K and V already", "06 07"),
    ("attention", "2", "read K and V through the page table", "05"),
    ("memory", "1", "pages, request rows, the KV pool", "03 04"),
    ("device", "0", "which GPU or CPU, which tier", "00"),
]
TIERS = [
    ("cuda", "G", "compiled Triton kernels on a GPU"),
    ("interpreter", "I", "PyTorch on the CPU; Triton kernels interpreted where asked"),
    ("torch", "T", "PyTorch on the CPU, no Triton"),
]
ROW, LEFT, WIDE = 46, 30, 800


def draw() -> Drawing:
    """The rooms of minikv from the ground up, each with its notebooks; this machine's tier is
    marked."""
    here = tier()
    canvas = Canvas(
        "The house, read from the ground floor up",
        "Seven rooms on six floors, from device at the bottom to engine at the top; this machine "
        f"runs tier {here}.",
        subtitle=(
            "A room uses only rooms below it. Numbers on the right are the notebooks that visit it."
        ),
    )
    y, rows = canvas.top + 4, []
    for name, floor, holds, notebooks in ROOMS:
        # Two rooms share floor 2: neither uses the other, so they stand side by side.
        twin = floor == "2"
        x = LEFT + (WIDE / 2 + 4 if name == "attention" else 0)
        w = WIDE / 2 - 4 if twin else WIDE
        canvas.rect(
            x, y, w, ROW - 8, fill=blend(OKABE_ITO["sky"], 0.16), stroke=OKABE_ITO["blue"], r=6
        )
        canvas.text(x + 12, y + 16, name, size=13.5, weight=600)
        canvas.text(x + 12, y + 31, holds, size=11, fill=MUTED, fit=w - 110)
        canvas.text(x + w - 12, y + 23, notebooks, size=11.5, mono=True, anchor="end", fill=INK)
        if name != "prefix":
            y += ROW
        rows.append({"floor": int(floor), "room": name, "holds": holds, "notebooks": notebooks})
    y += 14
    canvas.text(LEFT, y + 4, "Tiers", size=13.5, weight=600)
    y += 14
    for name, sign, meaning in TIERS:
        mine = name == here
        fill, edge = (OKABE_ITO["yellow"], INK) if mine else (SHADE, "none")
        canvas.rect(LEFT, y, WIDE, 28, fill=fill, stroke=edge, r=6)
        canvas.text(LEFT + 12, y + 19, f"{sign}  {name}", size=12.5, weight=600, fill=INK)
        canvas.text(LEFT + 150, y + 19, meaning, size=11.5, fill=INK if mine else MUTED)
        if mine:
            canvas.text(
                LEFT + WIDE - 12,
                y + 19,
                "this machine",
                size=11.5,
                weight=600,
                anchor="end",
                halo=PAPER,
            )
        y += 33
    lines = [f"floor {r['floor']}  {r['room']:<10} {r['holds']}" for r in rows]
    lines.append("beside the floors: viz (pictures), measure (benchmarks), lessons (exercises)")
    lines.append(f"this machine: tier {here}")
    canvas.text(
        LEFT,
        y + 14,
        "Beside the floors: viz draws, measure times, lessons check exercises.",
        size=11.5,
        fill=MUTED,
    )
    return canvas.finish("\n".join(lines), rows, legend=False)
