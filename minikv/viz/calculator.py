"""How much memory the K and V of a token take, for published model shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.style import Drawing

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Shape:
    """What of a model's shape decides the size of its cache.

    Attributes
    ----------
    layers, q_heads, kv_heads, head_dim
        As in its configuration; grouped heads (GQA) when there are fewer kv_heads than q_heads.
    params
        Parameters in all, for the size of the weights.
    weight_bytes
        Bytes per parameter as published.
    latent
        For MLA: numbers in the one row that a layer keeps per token (in place of K and V heads).
    window, window_layers
        So many layers keep only the last `window` tokens.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    params: float
    weight_bytes: float = 2.0
    latent: int = 0
    window: int = 0
    window_layers: int = 0

    @property
    def numbers_per_layer(self) -> int:
        """Numbers kept per token and layer."""
        return self.latent or 2 * self.kv_heads * self.head_dim


SHAPES = {
    "SmolLM2-135M": Shape(30, 9, 3, 64, 0.135e9),
    "SmolLM2-360M": Shape(32, 15, 5, 64, 0.362e9),
    "SmolLM2-1.7B": Shape(24, 32, 32, 64, 1.71e9),
    "Qwen3-0.6B": Shape(28, 16, 8, 128, 0.6e9),
    "Qwen3-8B": Shape(36, 32, 8, 128, 8.2e9),
    "Qwen3-14B": Shape(40, 40, 8, 128, 14.8e9),
    "Qwen3-32B": Shape(64, 64, 8, 128, 32.8e9),
    "Qwen3-235B-A22B": Shape(94, 64, 4, 128, 235e9),
    "Llama 3 8B": Shape(32, 32, 8, 128, 8.03e9),
    "Llama 3 70B": Shape(80, 64, 8, 128, 70.6e9),
    "DeepSeek-V3": Shape(61, 128, 128, 128, 671e9, weight_bytes=1.0, latent=576),
    "gpt-oss-20b": Shape(24, 64, 8, 64, 20.9e9, weight_bytes=0.66, window=128, window_layers=12),
    "gpt-oss-120b": Shape(36, 64, 8, 64, 116.8e9, weight_bytes=0.56, window=128, window_layers=18),
}
"""Published shapes: from the models' configuration files and cards."""


def kv_bytes_per_token(model: str | Shape, dtype: str = "bf16") -> float:
    """Bytes of K and V that one more token takes (layers with a full window keep nothing more).

    Examples
    --------
    >>> kv_bytes_per_token("Llama 3 8B"), kv_bytes_per_token("DeepSeek-V3")
    (131072.0, 70272.0)
    >>> kv_bytes_per_token("SmolLM2-135M", "fp32")
    46080.0
    """
    shape = _shape(model)
    return (shape.layers - shape.window_layers) * shape.numbers_per_layer * _bytes(dtype)


def kv_bytes(model: str | Shape, tokens: int, dtype: str = "bf16") -> float:
    """Bytes of K and V of one request of `tokens` tokens.

    Examples
    --------
    >>> kv_bytes("gpt-oss-20b", 128) / 128, kv_bytes("gpt-oss-20b", 1024) / 1024
    (49152.0, 27648.0)
    """
    shape = _shape(model)
    per_layer = shape.numbers_per_layer * _bytes(dtype)
    full, windowed = shape.layers - shape.window_layers, shape.window_layers
    return per_layer * (full * tokens + windowed * min(tokens, shape.window))


def _shape(model: str | Shape) -> Shape:
    if isinstance(model, Shape):
        return model
    if model not in SHAPES:
        raise ArgumentError("model", model, "is one of " + ", ".join(SHAPES))
    return SHAPES[model]


def _bytes(dtype: str) -> float:
    if dtype not in BYTES:
        raise ArgumentError("dtype", dtype, "is one of " + ", ".join(BYTES))
    return BYTES[dtype]


def _kind(shape: Shape) -> str:
    if shape.latent:
        return "MLA"
    ratio = shape.q_heads // shape.kv_heads
    kind = "MHA" if ratio == 1 else f"GQA {ratio}:1"
    return kind + (f", window {shape.window}" if shape.window else "")


def overview(
    dtype: str = "bf16", *, models: Any = None, title: str = "What one token costs"
) -> Drawing:
    """Draw the bytes per token of all shapes (or those in `models`) as bars."""
    names = list(models or SHAPES)
    costs = {name: kv_bytes(name, 1, dtype) for name in names}
    canvas = Canvas(title, f"Bytes of K and V per token in {dtype} for {len(names)} model shapes.",
                    subtitle=f"K and V of one token in all layers, {dtype}")  # fmt: skip
    left, top = canvas.margin + 150, max(costs.values())
    blue = style.OKABE_ITO["blue"]
    for i, name in enumerate(names):
        y, shape = canvas.top + 6 + i * 27, SHAPES[name]
        canvas.text(left - 10, y + 14, name, anchor="end")
        width = max(costs[name] / top * 420, 2)
        canvas.rect(
            left, y, width, 20, fill=style.OKABE_ITO["green"] if shape.latent else blue, r=3
        )
        canvas.text(left + width + 8, y + 14, f"{costs[name] / 1024:,.1f} KiB", weight=600)
        canvas.text(
            canvas.right,
            y + 14,
            f"{shape.layers} layers · {_kind(shape)}",
            size=11,
            anchor="end",
            fill=style.MUTED,
        )
    rows = [
        {
            "model": name,
            "layers": SHAPES[name].layers,
            "kind": _kind(SHAPES[name]),
            "bytes per token": int(costs[name]),
        }
        for name in names
    ]
    return canvas.finish(f"{title} ({dtype})\n{style.Table(rows)}", rows, legend=False)


def draw(
    model: str = "Llama 3 8B",
    context: int = 8192,
    batch: int = 16,
    dtype: str = "bf16",
    memory: float = 80.0,
    *,
    title: str = "Weights and cache in one memory",
) -> Drawing:
    """Draw how weights and the K and V of a batch share a device's memory.

    Parameters
    ----------
    model
        A name of ``SHAPES``.
    context
        Tokens per request.
    batch
        Requests.
    dtype
        Of K and V: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
    memory
        Device memory in GB (10^9 bytes).
    """
    shape = _shape(model)
    weights, one = shape.params * shape.weight_bytes / 1e9, kv_bytes(shape, context, dtype) / 1e9
    cache, room = one * batch, memory - shape.params * shape.weight_bytes / 1e9
    fits = int(room / one) if room > 0 and one else 0
    verdict = (
        f"{fits:,} requests of {context:,} tokens fit"
        if room > 0
        else "the weights alone do not fit"
    )
    facts = f"{model}, {_kind(shape)}, K and V in {dtype} · {verdict}"
    canvas = Canvas(
        title,
        f"{facts}: weights {weights:.3g} GB, cache {cache:.3g} GB of {memory:g} GB.",
        subtitle=facts,
    )
    wide, y = 812.0, canvas.top + 34
    scale = wide / max(memory, weights + cache)
    blue, orange = style.OKABE_ITO["blue"], style.OKABE_ITO["orange"]
    x = canvas.margin
    canvas.rect(x, y, memory * scale, 46, fill=style.PAPER, stroke=style.MUTED, r=5, dash="1.3 3")
    canvas.rect(x, y, max(weights * scale, 1.5), 46, fill=style.NEUTRAL, r=4)
    fitting = min(cache, max(memory - weights, 0))
    canvas.rect(x + weights * scale, y, max(fitting * scale, 1.5), 46, fill=blue, r=4)
    if cache > fitting:
        canvas.rect(
            x + (weights + fitting) * scale, y, (cache - fitting) * scale, 46, fill=orange, r=4
        )
    if batch > 1 and cache * scale / batch > 3:
        for i in range(1, batch):
            at = x + (weights + one * i) * scale
            canvas.line(at, y + 1, at, y + 45, stroke=style.PAPER, line=0.8)
    limit = x + memory * scale
    canvas.line(
        limit, y - 12, limit, y + 58, stroke=style.OKABE_ITO["vermillion"], line=2, dash="6 3"
    )
    canvas.text(limit, y - 18, f"memory {memory:g} GB", anchor="end", fill="#a34700")
    over = weights + cache > memory
    giga = 1e9
    lines = [
        (
            "weights",
            weights * giga,
            f"{shape.params / 1e9:g} billion × {shape.weight_bytes:g} bytes",
        ),
        ("K and V, one token", kv_bytes(shape, 1, dtype), _formula(shape, dtype)),
        (f"K and V, one request of {context:,}", one * giga, _windows(shape, context)),
        (f"K and V, batch of {batch:,}", cache * giga, f"{batch:,} × {style.si(one * giga, 'B')}"),
        ("over the limit" if over else "free", abs(memory - weights - cache) * giga, verdict),
    ]
    rows = [
        {"what": what, "size": f"{size:,.0f} B" if size < 1e6 else style.si(size, "B"), "how": how}
        for what, size, how in lines
    ]
    marks = {0: style.NEUTRAL, 3: blue, 4: orange if over else ""}
    for i, row in enumerate(rows):
        line = y + 92 + i * 25
        if marks.get(i):
            canvas.rect(x, line - 11, 14, 14, fill=marks[i], r=3)
        elif i == 4:
            canvas.rect(
                x, line - 11, 14, 14, fill=style.PAPER, stroke=style.MUTED, r=3, dash="1.3 2"
            )
        canvas.text(x + 24, line, row["what"], fit=230)
        canvas.text(x + 350, line, row["size"], anchor="end", weight=600)
        canvas.text(x + 374, line, row["how"], size=11.5, fill=style.MUTED, fit=436)
    if over:
        canvas.text(x + 8, y + 66, "does not fit", weight=600, fill="#a34700")
    canvas.reach(0, y + 200)
    return canvas.finish(f"{title}: {facts}\n{style.Table(rows)}", rows, legend=False)


def _formula(shape: Shape, dtype: str) -> str:
    inner = (
        f"one row of {shape.latent}"
        if shape.latent
        else f"2 × {shape.kv_heads} heads × {shape.head_dim}"
    )
    return f"{shape.layers} layers × {inner} × {BYTES[dtype]:g} bytes"


def _windows(shape: Shape, context: int) -> str:
    if not shape.window:
        return f"{context:,} × one token"
    full, short = shape.layers - shape.window_layers, min(context, shape.window)
    return f"{full} layers keep {context:,}, {shape.window_layers} keep {short}"


def widget(model: str = "Llama 3 8B", memory: float = 80.0) -> Any:
    """The calculator: choose a model, context, batch and dtype, and see the memory; a static
    picture comes first."""
    import ipywidgets as w

    from minikv.viz.widgets import Live

    look = {"style": {"description_width": "70px"}, "layout": w.Layout(width="270px")}
    return Live(
        draw,
        model=w.Dropdown(options=list(SHAPES), value=model, description="model", **look),
        dtype=w.Dropdown(options=list(BYTES), value="bf16", description="K, V in", **look),
        context=w.SelectionSlider(
            options=[2**i for i in range(7, 18)],
            value=8192,
            description="context",
            continuous_update=False,
            **look,
        ),
        batch=w.SelectionSlider(
            options=[2**i for i in range(10)],
            value=16,
            description="batch",
            continuous_update=False,
            **look,
        ),
        memory=w.Dropdown(
            options=[8.0, 16.0, 24.0, 48.0, 80.0, 141.0, 192.0, 640.0, 1128.0],
            value=memory,
            description="GB",
            **look,
        ),
    )
