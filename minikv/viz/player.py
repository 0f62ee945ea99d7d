"""The frame player: precomputed drawings, stepped through in the browser alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import anywidget
import ipywidgets
import traitlets

from minikv.errors import ArgumentError
from minikv.viz.style import Drawing
from minikv.viz.widgets import Box

STEPPER_JS = """
function render({ model, el }) {
  const button = (text, label, step) => {
    const b = document.createElement("button");
    b.className = "jupyter-button widget-button";
    b.textContent = text;
    b.title = label;
    b.setAttribute("aria-label", label);
    b.style.cssText = "width:auto;min-width:2.4em;margin:2px";
    b.onclick = () => go(model.get("value") + step);
    el.appendChild(b);
    return b;
  };
  const go = (to) => {
    model.set("value", Math.max(0, Math.min(model.get("max"), to)));
    model.save_changes();
  };
  const back = button("\\u25C0", "previous frame", -1);
  const on = button("\\u25B6", "next frame", 1);
  const at = document.createElement("span");
  at.setAttribute("role", "status");
  at.style.cssText = "margin:0 .6em;min-width:6.5em;display:inline-block;" +
    "font-variant-numeric:tabular-nums";
  el.appendChild(at);
  el.addEventListener("keydown", (e) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (e.key in steps) { go(model.get("value") + steps[e.key]); e.preventDefault(); }
    if (e.key === "Home") { go(0); e.preventDefault(); }
    if (e.key === "End") { go(model.get("max")); e.preventDefault(); }
  });
  const show = () => {
    const v = model.get("value"), max = model.get("max");
    at.textContent = `${v + 1} of ${max + 1}`;
    back.setAttribute("aria-disabled", v <= 0);
    on.setAttribute("aria-disabled", v >= max);
    back.style.opacity = v <= 0 ? 0.45 : 1;
    on.style.opacity = v >= max ? 0.45 : 1;
  };
  model.on("change:value", show);
  model.on("change:max", show);
  show();
}
export default { render };
"""


class Stepper(anywidget.AnyWidget):
    """Previous and next buttons; arrow keys, Home and End work on them too. They act in the
    browser."""

    _esm = STEPPER_JS
    value = traitlets.Int(0).tag(sync=True)
    max = traitlets.Int(0).tag(sync=True)


class Player:
    """Frames in a stack, whose index is linked in the browser to play, slider and previous/next
    buttons.

    As the value of a cell it shows a static picture first and the player below it. The player goes
    on working without a kernel: nothing of it calls Python.

    Parameters
    ----------
    frames
        Drawings, at least one; of equal width they do not jump.
    interval
        Milliseconds per frame when playing.
    static
        Which frame is the static picture, the last by default: readers of the stored page see only
        that one.

    Attributes
    ----------
    widget
        The player alone, a box of widgets.
    stack, play, slider, stepper, links
        Its parts.

    Raises
    ------
    ArgumentError
        Without frames.
    """

    def __init__(self, frames: Sequence[Drawing], *, interval: int = 900, static: int = -1) -> None:
        self.frames = list(frames)
        if not self.frames:
            raise ArgumentError("frames", frames, "give at least one drawing")
        last, names = (
            len(self.frames) - 1,
            {"interval": interval, "min": 0, "max": len(self.frames) - 1, "step": 1},
        )
        self.static = self.frames[static]
        wide = ipywidgets.Layout(width="100%")
        pages = [ipywidgets.HTML(page, layout=wide) for page in _same_height(self.frames)]
        self.stack = ipywidgets.Stack(pages, selected_index=0, layout=wide)
        self.play = ipywidgets.Play(value=0, **names)
        self.slider = ipywidgets.IntSlider(
            value=0,
            min=0,
            max=last,
            description="frame",
            readout=False,
            layout=ipywidgets.Layout(width="320px"),
        )
        self.stepper = Stepper(value=0, max=last)
        self.links = [
            ipywidgets.jslink((self.play, "value"), (self.slider, "value")),
            ipywidgets.jslink((self.stepper, "value"), (self.slider, "value")),
            ipywidgets.jslink((self.slider, "value"), (self.stack, "selected_index")),
        ]
        controls = ipywidgets.HBox(
            [self.play, self.stepper, self.slider], layout=ipywidgets.Layout(flex_flow="row wrap")
        )
        self.widget = Box(
            [controls, self.stack], f"a player that steps through {len(self.frames)} pictures"
        )

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"{self.static}\n(player of {len(self.frames)} frames)"

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import display

        display(self.static)
        display(self.widget)


def _same_height(frames: Sequence[Drawing]) -> list[str]:
    """The frames in boxes of one shape, so that the page below does not jump."""
    boxes = [re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frame.svg) for frame in frames]
    sizes = [(float(b[1]), float(b[2])) for b in boxes if b]
    width, ratio = (
        max((w for w, _ in sizes), default=860),
        max((h / w for w, h in sizes), default=0.5),
    )
    box = f"width:100%;max-width:{width:g}px;aspect-ratio:1/{ratio:.4f}"
    return [f'<div style="{box}">{frame.svg}</div>' for frame in frames]
