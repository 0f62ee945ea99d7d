"""A recorded tree as frames: one picture after each event, with what it reused, added or evicted
marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minikv.viz import style, tree
from minikv.viz.style import Drawing, many

KINDS = ("match", "insert", "split", "evict")


def frames(
    recorder: Any, *, kinds: Iterable[str] = KINDS, who: Any = None, **options: Any
) -> list[Drawing]:
    """One drawing of the tree before the first event and after each event of the chosen kinds.

    Parameters
    ----------
    recorder
        What ``cache.record()`` gave.
    kinds
        Events that get a frame: also ``"lock"``, ``"unlock"`` and ``"reset"``.
    who
        ``who(event)`` gives the letter of the request behind an event. By default requests are told
        apart by their tokens: an event whose tokens continue those of an earlier one belongs to the
        same request.
    options
        Passed to :func:`minikv.viz.tree.draw`, such as ``decode``.

    Examples
    --------
    >>> from minikv.prefix import RadixCache
    >>> cache = RadixCache(page_size=1)
    >>> with cache.record() as recorder:
    ...     _ = cache.insert([1, 2, 3])
    ...     _ = cache.match_prefix([1, 2, 9])
    >>> [drawing.desc.split(".")[0] for drawing in frames(recorder)][1:]
    ['A inserts 3 tokens', 'A node splits after 2 of its tokens', 'B matches 2 of 3 tokens']
    """
    wanted, prompts, drawn, before = set(kinds), list[tuple[int, ...]](), [], None
    for frame in recorder.frames:
        event, cache = frame.event, frame.tree
        if event is None:
            drawn.append(tree.draw(cache, note="before", **options))
        elif event.kind in wanted:
            name = who(event) if who else _letter(event, prompts)
            drawn.append(_draw(event, cache, before, name, options))
        elif who is None:
            _letter(event, prompts)
        before = cache
    return drawn


def _letter(event: Any, prompts: list[tuple[int, ...]]) -> str | None:
    if event.kind not in ("match", "insert") or not event.tokens:
        return None
    for i, known in enumerate(prompts):
        short = min(len(known), len(event.tokens))
        if known[:short] == event.tokens[:short]:
            prompts[i] = max(known, event.tokens, key=len)
            return style.letter(i)
    prompts.append(event.tokens)
    return style.letter(len(prompts) - 1)


def _draw(event: Any, cache: Any, before: Any, who: str | None, options: dict[str, Any]) -> Drawing:
    here = {node.id: node for node in cache.nodes()}
    node, path = here.get(event.node), []
    while node is not None and len(node.key):
        path.append(node)
        node = node.parent
    count, name = len(event.tokens), who or "a request"
    if event.kind == "match":
        note = f"{name} matches {event.length} of {many(count, 'token')}"
        return tree.draw(cache, reused=path, who=who, note=note, **options)
    if event.kind == "insert":
        fresh = [path[0]] if path and event.slots else []
        had = f", {event.length} were there" if event.length else ""
        note = f"{name} inserts {many(count, 'token')}{had}"
        return tree.draw(
            cache, reused=path[len(fresh) :], computed=fresh, who=who, note=note, **options
        )
    if event.kind == "evict":
        gone = [n for n in before.nodes() if n.id == event.node]
        return tree.draw(
            before,
            evicted=gone,
            note=f"evicted: a leaf of {many(event.length, 'token')}",
            **options,
        )
    notes = {
        "split": f"A node splits after {event.length} of its tokens",
        "lock": "a node and all above it are locked once more",
        "unlock": "a node and all above it are unlocked once",
        "reset": "the tree is emptied",
    }
    return tree.draw(cache, note=notes[event.kind], **options)
