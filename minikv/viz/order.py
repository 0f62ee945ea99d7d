"""An order of requests: what each found in the cache, and what it had to compute."""

from __future__ import annotations

from typing import Any

from minikv.viz import style
from minikv.viz.canvas import Canvas
from minikv.viz.live import Texts, ints
from minikv.viz.style import Drawing

MOST = 48


def draw(
    requests: Any,
    *,
    decode: Any = None,
    least: int | None = None,
    title: str = "An order of requests",
) -> Drawing:
    """Draw prompts in the order in which they ran: reused tokens hatched, computed ones solid.

    Parameters
    ----------
    requests
        Requests that have run, as a list (letters follow the order) or a dict by letter: objects
        with ``token_ids`` and ``cached_tokens``; of one with a ``prompt_len`` only the prompt is
        drawn.
    decode
        Tokenizer, function of a list of ids, or texts by id.
    least
        Fewest tokens that any order has to compute, written beside the total.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> a = SimpleNamespace(token_ids=[1, 2, 3], cached_tokens=0)
    >>> b = SimpleNamespace(token_ids=[1, 2], cached_tokens=1)
    >>> print(draw({"A": a, "B": b}, least=4))
    An order of requests: 2 requests, 4 of 5 tokens computed; no order needs fewer than 4
    request  tokens  reused  computed
    -------  ------  ------  --------
    A        3       0       3
    B        2       1       1
    """
    pairs = requests.items() if hasattr(requests, "items") else enumerate(requests)
    texts, runs, rows = Texts(decode), [], []
    for who, item in pairs:
        tokens = ints(item.token_ids)[: getattr(item, "prompt_len", None)]
        look, reused = style.request(who), min(int(item.cached_tokens or 0), len(tokens))
        runs.append((look, tokens, reused))
        computed = len(tokens) - reused
        rows.append(
            {"request": look.letter, "tokens": len(tokens), "reused": reused, "computed": computed}
        )
    total, every = sum(row["computed"] for row in rows), sum(row["tokens"] for row in rows)
    facts = f"{len(rows)} requests, {total:,} of {every:,} tokens computed"
    facts += "" if least is None else f"; no order needs fewer than {least:,}"
    canvas = Canvas(title, f"Prompts in the order in which they ran: {facts}.", subtitle=facts)
    longest = min(max((len(tokens) for _, tokens, _ in runs), default=1), MOST)
    cell = min(40.0, 640 / max(longest, 1))
    y, x0 = canvas.top + 6, canvas.margin + 40
    for look, tokens, reused in runs:
        canvas.badge(canvas.margin + 12, y + cell / 2, look)
        for i, token in enumerate(tokens[:MOST]):
            shown = texts(token) if cell > 16 else ""
            canvas.token(
                x0 + i * cell, y, shown, "reused" if i < reused else "computed", look, size=cell
            )
        words = f"{len(tokens) - reused} computed"
        words = f"… {len(tokens) - MOST} more, {words}" if len(tokens) > MOST else words
        canvas.text(x0 + min(len(tokens), MOST) * cell + 14, y + cell / 2 + 4, words, weight=600)
        y += cell + 8
    return canvas.finish(f"{title}: {facts}\n{style.Table(rows)}", rows)
