"""Live pictures: controls whose changes call Python, one picture that is replaced, errors shown
beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from minikv.viz.style import Drawing

_HANDLER = "_minikv_handler"


class Box(ipywidgets.VBox):
    """A column of widgets whose text form is `words`: all that a page without JupyterLab shows of
    it."""

    def __init__(self, children: Sequence[ipywidgets.Widget], words: str) -> None:
        super().__init__(children)
        self.words = words

    def __repr__(self) -> str:
        return f"(in JupyterLab: {self.words})"


class Live:
    """A picture that follows its controls.

    Each change of a control's ``value`` draws once. Replacing the picture and the error text in
    place keeps the saved page at one size, whatever the number of redraws. Making it again with the
    same controls (a cell that is run again) takes the old one's subscriptions away, so that a
    change still draws once.

    Parameters
    ----------
    draw
        ``draw(**values) -> Drawing``, with the value of each control under its name.
    controls
        Widgets with a ``value``.

    Attributes
    ----------
    static
        The first drawing: shown before the widget, and all that a stored page keeps.
    drawing
        The present one.
    picture, errors
        Where drawing and error go: an ``HTML`` and an ``Output`` widget.
    widget
        Controls, errors and picture in one box.
    """

    def __init__(self, draw: Callable[..., Drawing], **controls: Any) -> None:
        self.draw, self.controls = draw, controls
        self.picture, self.errors = ipywidgets.HTML(), ipywidgets.Output()
        self.drawing: Drawing | None = None
        for control in controls.values():
            self._subscribe(control)
        self.redraw()
        self.static = self.drawing
        box = ipywidgets.HBox(
            list(controls.values()), layout=ipywidgets.Layout(flex_flow="row wrap")
        )
        words = "the same picture, with controls for " + ", ".join(controls)
        self.widget = Box([box, self.errors, self.picture], words)

    def _subscribe(self, control: Any) -> None:
        old = getattr(control, _HANDLER, None)
        if old is not None:
            control.unobserve(old, names="value")
        handler = self._changed
        setattr(control, _HANDLER, handler)
        control.observe(handler, names="value")

    def _changed(self, change: Any) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Draw with the present values; an error is written beside the last good picture."""
        try:
            self.show(self.draw(**{name: control.value for name, control in self.controls.items()}))
        except Exception as e:
            self.fail(e)

    def show(self, drawing: Drawing) -> None:
        """Put a drawing in place of the last one."""
        self.drawing, self.picture.value, self.errors.outputs = drawing, drawing.svg, ()

    def fail(self, error: Exception) -> None:
        """Write an error in place of the last one."""
        text = f"{type(error).__name__}: {error}\n"
        self.errors.outputs = ({"output_type": "stream", "name": "stderr", "text": text},)

    def __repr__(self) -> str:
        return f"{self.drawing}"

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import display

        if self.static is not None:
            display(self.static)
        display(self.widget)
