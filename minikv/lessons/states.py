"""The state in which a call failed, drawn with the package's own pictures: what a learner's
function was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from minikv.viz import batch, memory_over_time, order, pages, style, tree
from minikv.viz.style import Drawing


def page_state(
    free: list[int], page_size: int, held: Sequence[tuple[list[int], int]], who: int, title: str
) -> Drawing:
    """The page table of request `who`, or the page map when that request holds nothing.

    Parameters
    ----------
    free
        The free list, next page first.
    held
        For each request the slots it holds, from the beginning of a page, and how many of them it
        held before.
    """
    top = max([*free, *(slot // page_size for slots, _ in held for slot in slots), 1])
    allocator = SimpleNamespace(page_size=page_size, num_pages=top, free_pages=free)
    requests = [SimpleNamespace(token_ids=[], slots=slots, reused=old) for slots, old in held]
    if who < len(requests) and requests[who].slots:
        return pages.page_table(allocator, requests, who=style.letter(who), title=title)
    return pages.draw(allocator, requests=requests, title=title)


def alloc_state(
    free: list[int],
    prefix: list[int],
    last: list[int],
    counts: list[int],
    expected: Any,
    page_size: int,
    wrong: int,
) -> Drawing:
    """Pages after a right call with `counts` new slots a request; drawn is the request of new slot
    number `wrong`."""
    (slots, left), held, who, done = expected, [], 0, 0
    for i, count in enumerate(counts):
        page = last[i] // page_size * page_size
        before = list(range(page, last[i] + 1)) if prefix[i] % page_size else []
        who = i if slots is not None and done <= wrong < done + count else who
        held.append(([*before, *(slots or [])[done : done + count]], len(before)))
        done += count
    if slots is None:
        return page_state(
            free, page_size, held, len(held), "Too few free pages for the whole batch"
        )
    old = held[who][1] if held else 0
    title = f"Where the new tokens of request {style.letter(who)} belong" + (
        ", from its last page on" if old else ""
    )
    return page_state(left, page_size, held, who, title)


def tree_state(
    nodes: Iterable[dict[str, Any]],
    page_size: int,
    *,
    title: str,
    note: str,
    reused: int | None = None,
    texts: Any = None,
) -> Drawing:
    """A radix tree of plain nodes, parents first.

    Parameters
    ----------
    nodes
        Each with ``key``; perhaps ``slots``, ``up`` (number of its parent, none under the root),
        ``locks``, ``last_use``, ``reused`` (it lies on the matched path) and ``evicted``.
    reused
        How many tokens of the matched path are hatched.
    """
    drawn: list[SimpleNamespace] = []
    marks: dict[str, Any] = {"reused": [], "evicted": []}
    root = SimpleNamespace(parent=None, key=[])
    for node in nodes:
        up, slots = node.get("up"), node.get("slots")
        drawn.append(
            SimpleNamespace(
                key=node["key"],
                slots=None if slots is None else np.array(slots),
                hit_count=0,
                namespace=None,
                parent=root if up is None else drawn[up],
                lock_count=node.get("locks", 0),
                last_use=node.get("last_use", 0),
            )
        )
        for mark, some in marks.items():
            some += [drawn[-1]] if node.get(mark) else []
    cache = SimpleNamespace(page_size=page_size, nodes=lambda: drawn)
    return tree.draw(
        cache, decode=texts, title=title, note=note, reused_tokens=reused, who="A", **marks
    )


def nested(root: dict[str, Any], matched: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """The nodes of a tree of dicts for :func:`tree_state`, those on the path of the prompt
    `matched` marked."""
    stack, count = [(child, None, list(matched)) for child in root["children"].values()], 0
    while stack and count < 200:  # a learner's tree may be a ring
        node, up, prompt = stack.pop(0)
        hit = bool(prompt) and node["key"][0] == prompt[0]
        yield {"key": node["key"], "slots": node["slots"], "up": up, "reused": hit}
        whole = hit and node["key"] == prompt[: len(node["key"])]
        rest = prompt[len(node["key"]) :] if whole else []
        stack += [(child, count, rest) for child in node["children"].values()]
        count += 1


def cache_state(
    rows: Iterable[list[int]], prompt: list[int], page_size: int, title: str
) -> Drawing:
    """A live radix cache that holds `rows`, with what a lookup of `prompt` finds hatched."""
    from minikv.prefix import RadixCache  # here, as it loads torch, which no other check needs

    cache = RadixCache(page_size)
    for row in rows:
        cache.insert(row)
    match, path = cache.match_prefix(prompt), []
    node = match.node
    while node is not None and node.parent is not None:
        path, node = [node, *path], node.parent
    note = (
        f"looked up: {style.shorten(str(prompt), 60)}, found: "
        f"{style.many(len(match.slots), 'token')}"
    )
    return tree.draw(cache, title=title, note=note, reused=path, who="A")


def memory_state(
    capacity: int, trace: Iterable[Any], starts: Iterable[Any], title: str, note: str = ""
) -> Drawing:
    """A strip of memory before the last alloc of `trace`, which was given `starts`; a refused one
    is said to be so."""
    held, asked = {}, None
    given = iter(starts)
    for event in trace:
        if asked is not None and asked[2] is not None:
            held[asked[0]] = asked
        asked = None
        if event[0] == "alloc":
            asked = (str(event[1]), int(event[2]), next(given))
        else:
            held.pop(str(event[1]), None)
    parts = [
        {"who": who, "start": at, "used": size, "reserved": size} for who, size, at in held.values()
    ]
    refused = (
        {"who": asked[0], "need": asked[1]} if asked is not None and asked[2] is None else None
    )
    return memory_over_time.strip(parts, capacity, refused=refused, title=title, note=note)


def events(got: Any, most: int = 200) -> list[tuple[Any, ...]]:
    """The leading events of a learner's trace that are such."""
    found = []
    for event in islice(got, most) if isinstance(got, list | tuple) else ():
        whole = isinstance(event, list | tuple) and len(event) in (2, 3) and type(event[1]) is str
        if not whole or event[0] != ("alloc" if len(event) == 3 else "free"):
            break
        if len(event) == 3 and (type(event[2]) is not int or event[2] < 1):
            break
        found.append(tuple(event))
    return found


def batch_state(arrays: dict[str, list[int]], page_size: int) -> Drawing:
    """The ragged batch as a strip, each new token with its position."""
    title = "The batch of this call, as it should be laid out"
    return batch.draw(
        arrays["qo_indptr"],
        arrays["kv_indptr"],
        arrays["kv_indices"],
        tokens=arrays["positions"],
        page_size=page_size,
        title=title,
    )


def order_state(prompts: list[list[int]], chosen: list[int], least: int, title: str) -> Drawing:
    """Prompts in the order `chosen`, what each finds of the one before it hatched."""
    runs, before = {}, []
    for index in chosen:
        shared = 0
        while (
            shared < min(len(prompts[index]), len(before))
            and prompts[index][shared] == before[shared]
        ):
            shared += 1
        before = prompts[index]
        runs[style.letter(index)] = SimpleNamespace(token_ids=before, cached_tokens=shared)
    return order.draw(runs, least=least, title=title)
