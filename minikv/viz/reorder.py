"""Letters in a row that can be put into another order, by mouse, by touch or by keyboard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anywidget
import traitlets

from minikv.errors import ArgumentError
from minikv.viz import style

REORDER_JS = """
function render({ model, el }) {
  const row = document.createElement("div");
  row.setAttribute("role", "list");
  row.style.cssText = "display:flex;gap:6px;align-items:center;" +
    "margin:4px 18px 4px 2px;touch-action:none";
  const label = document.createElement("span");
  label.textContent = model.get("description");
  label.style.cssText = "margin-right:4px";
  el.replaceChildren(row);
  let order = [...model.get("value")], held = -1;

  function paint(focus = -1) {
    row.replaceChildren(label, ...order.map((name, at) => {
      const b = document.createElement("button");
      const [colour, ink] = model.get("looks")[name];
      b.textContent = name;
      b.title = "drag it, or move it with the left and right arrow keys";
      b.setAttribute("aria-label", `${name}, place ${at + 1} of ${order.length}: ` +
        `left and right arrow keys move it`);
      b.style.cssText = `min-width:34px;height:34px;border-radius:17px;border:2px solid transparent;
        cursor:grab;font:600 15px system-ui,sans-serif;touch-action:none;
        background:${colour};color:${ink}`;
      if (at === held) b.style.border = "2px solid var(--jp-ui-font-color1, currentColor)";
      b.addEventListener("keydown", (e) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
        if (!step) return;
        e.preventDefault();
        e.stopPropagation();
        move(at, Math.max(0, Math.min(order.length - 1, at + step)), true);
        save();
      });
      return b;
    }));
    if (focus >= 0) row.querySelectorAll("button")[focus].focus();
  }
  function move(from, to, focus) {
    order.splice(to, 0, ...order.splice(from, 1));
    paint(focus ? to : -1);
  }
  function save() {
    model.set("value", [...order]);
    model.save_changes();
  }
  const under = (e) => [...row.querySelectorAll("button")].findIndex((b) => {
    const r = b.getBoundingClientRect();
    return e.clientX >= r.left && e.clientX <= r.right &&
      e.clientY >= r.top - 30 && e.clientY <= r.bottom + 30;
  });
  row.addEventListener("pointerdown", (e) => {
    held = under(e);
    if (held >= 0) row.setPointerCapture(e.pointerId);
  });
  row.addEventListener("pointermove", (e) => {
    const to = held < 0 ? -1 : under(e);
    if (to < 0 || to === held) return;
    const from = held;
    held = to;
    move(from, to, false);
  });
  const drop = () => {
    if (held < 0) return;
    const at = held;
    held = -1;
    paint(at);
    if (order.join() !== model.get("value").join()) save();
  };
  row.addEventListener("pointerup", drop);
  row.addEventListener("pointercancel", drop);
  model.on("change:value", () => {
    if (order.join() === model.get("value").join()) return;
    order = [...model.get("value")];
    paint();
  });
  paint();
}
export default { render };
"""


class Reorder(anywidget.AnyWidget):
    """Requests' letters in an order that the reader changes.

    Parameters
    ----------
    letters
        The letters in their first order, each once.
    description
        A word before them.

    Attributes
    ----------
    value
        The present order, a list of letters; another order of the same letters may be assigned.

    Raises
    ------
    ArgumentError
        When a letter comes twice.

    Examples
    --------
    >>> control = Reorder("CAB")
    >>> control.value = ["A", "B", "C"]
    >>> control.value
    ['A', 'B', 'C']
    """

    _esm = REORDER_JS
    value = traitlets.List(traitlets.Unicode()).tag(sync=True)
    looks = traitlets.Dict().tag(sync=True)
    description = traitlets.Unicode("").tag(sync=True)

    def __init__(self, letters: Iterable[str], description: str = "order") -> None:
        names = list(letters)
        if len(set(names)) < len(names):
            raise ArgumentError("letters", names, "each letter may stand there once")
        looks = {name: [style.request(name).colour, style.request(name).ink] for name in names}
        super().__init__(value=names, looks=looks, description=description)

    @traitlets.validate("value")
    def _same_letters(self, proposal: Any) -> list[str]:
        if self.looks and sorted(proposal["value"]) != sorted(self.looks):
            raise ArgumentError(
                "value", proposal["value"], f"is not an order of {' '.join(self.looks)}"
            )
        return proposal["value"]
