"""What is drawn of a radix tree: its nodes read once, long chains and crowded siblings folded, and
its text form."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minikv.viz import style
from minikv.viz.live import Texts, holders, ints
from minikv.viz.style import many


@dataclass(eq=False)
class Item:
    """A node of the tree as drawn.

    An item without a node is the root of a namespace; one with `folded` above 0 stands for that
    many nodes.
    """

    node: Any = None
    parent: Item | None = None
    namespace: Any = None
    index: int = 0
    tokens: int = 0
    subtree_tokens: int = 0
    subtree_nodes: int = 1
    folded: int = 0
    owners: list[str] = field(default_factory=list)
    children: list[Item] = field(default_factory=list)

    @property
    def key(self) -> list[int]:
        return ints(self.node.key)

    @property
    def locks(self) -> int:
        return int(self.node.lock_count) if self.node is not None else 0

    @property
    def hits(self) -> int:
        return int(self.node.hit_count)

    @property
    def last_use(self) -> int:
        return int(getattr(self.node, "last_use", 0))

    def pages(self, page_size: int) -> list[int]:
        """Page numbers in the order of the key; empty when the node has no slots."""
        slots = self.node.slots
        return ints(slots[::page_size] // page_size) if slots is not None and len(slots) else []

    def copy(self, parent: Item | None) -> Item:
        """The item alone, under another parent."""
        return Item(
            self.node,
            parent,
            self.namespace,
            self.index,
            self.tokens,
            self.subtree_tokens,
            self.subtree_nodes,
            self.folded,
            self.owners,
        )


def walk(item: Item) -> Iterator[Item]:
    """`item` and everything below it, parents first, without recursion: chat trees are deep."""
    stack = [item]
    while stack:
        at = stack.pop()
        yield at
        stack.extend(reversed(at.children))


def read(cache: Any, requests: Any = None) -> list[Item]:
    """Read every node of `cache` once, into one root per namespace (the default namespace first).

    `requests` (objects with a ``node``) become the owners of the nodes on the path to their node.
    """
    nodes = [n for n in cache.nodes() if n.parent is not None and len(n.key)]
    items = {id(n): Item(n, index=i, tokens=len(n.key)) for i, n in enumerate(nodes)}
    roots: dict[Any, Item] = {}
    for node in nodes:
        item = items[id(node)]
        item.parent = items.get(id(node.parent))
        if item.parent is None:
            space = getattr(node, "namespace", None)
            item.parent = roots.setdefault(
                (type(space), space), Item(namespace=space, index=len(roots))
            )
        item.parent.children.append(item)
    ordered = sorted(roots.values(), key=lambda r: (r.namespace is not None, r.index)) or [Item()]
    for root in ordered:
        every = list(walk(root))
        for item in every:
            item.namespace = root.namespace
        for item in reversed(every):
            item.subtree_tokens = item.tokens + sum(c.subtree_tokens for c in item.children)
            item.subtree_nodes = (item.node is not None) + sum(
                c.subtree_nodes for c in item.children
            )
    sources = (requests.values() if hasattr(requests, "values") else requests) or ()
    for holder, source in zip(holders(requests), sources, strict=True):
        at = items.get(id(getattr(source, "node", None)))
        while at is not None and at.node is not None:
            at.owners.append(holder.letter)
            at = at.parent
    return ordered


def fold(roots: list[Item], max_nodes: int, max_siblings: int, max_chain: int = 5) -> list[Item]:
    """A copy of the forest with at most about `max_nodes` nodes.

    Locked and heavy subtrees are opened first. Each place where something is left out holds one
    item that stands for it: the middle of a long chain of single children, siblings beyond
    `max_siblings`, whatever the budget cut.
    """
    kept: list[Item] = []
    queue: list[tuple[tuple[bool, int], int, Item, Item]] = []
    rest: dict[int, tuple[Item, list[Item]]] = {}
    budget = max_nodes

    def weight(item: Item) -> tuple[bool, int]:
        return (item.locks == 0, -item.subtree_tokens)

    def opened(item: Item, copy: Item) -> None:
        ranked = sorted(item.children, key=weight)
        some = ranked if len(ranked) <= max_siblings + 1 else ranked[:max_siblings]
        rest[id(copy)] = (copy, ranked[len(some) :])
        for child in some:
            heapq.heappush(queue, (weight(child), child.index, child, copy))

    for root in roots[: max_siblings + 1]:
        kept.append(root.copy(None))
        opened(root, kept[-1])
    while queue:
        _, _, item, parent = heapq.heappop(queue)
        if budget <= 0:
            rest[id(parent)][1].append(item)
            continue
        chain = [item]
        while len(chain[-1].children) == 1:
            chain.append(chain[-1].children[0])
        budget -= 1
        copy = item.copy(parent)
        parent.children.append(copy)
        if len(chain) > max_chain:
            gap = _gap(chain[1:-1], copy, [i.tokens for i in chain[1:-1]], len(chain) - 2)
            copy.children.append(gap)
            item, copy = chain[-1], chain[-1].copy(gap)
            gap.children.append(copy)
            budget -= 1
        opened(item, copy)
    for copy, items in rest.values():
        copy.children.sort(key=lambda c: c.index)
        if items:
            copy.children.append(
                _gap(
                    items,
                    copy,
                    [i.subtree_tokens for i in items],
                    sum(i.subtree_nodes for i in items),
                )
            )
    if len(roots) > len(kept):
        out = roots[len(kept) :]
        gap = Item(
            folded=sum(r.subtree_nodes for r in out), tokens=sum(r.subtree_tokens for r in out)
        )
        gap.namespace = f"{len(out)} more namespaces"
        kept.append(gap)
    return kept


def _gap(items: list[Item], parent: Item, tokens: list[int], count: int) -> Item:
    return Item(items[0].node, parent, parent.namespace, items[0].index, sum(tokens), folded=count)


def label(item: Item, texts: Texts, limit: int) -> str:
    """The node's tokens as one line of at most `limit` columns; only as many tokens are decoded as
    can be seen."""
    return style.shorten(style.token_text(texts.joined(item.node.key[: limit + 1])), limit)


def gap_text(item: Item) -> str:
    """What stands for nodes that are not drawn."""
    return (
        f"+{item.folded:,} more node{'s' if item.folded > 1 else ''}, {many(item.tokens, 'token')}"
    )


def as_text(head: str, roots: list[Item], texts: Texts, page_size: int) -> str:
    """The tree for a terminal."""
    lines = [head]
    for root in roots:
        lines.append("root" if root.namespace is None else f"namespace {root.namespace!r}")
        if root.folded:
            lines[-1] = f"… {root.namespace}: {gap_text(root)}"
        stack = [(kid, "", kid is root.children[-1]) for kid in reversed(root.children)]
        while stack:
            item, indent, last = stack.pop()
            words = f"… {gap_text(item)}" if item.folded else _line(item, texts, page_size)
            lines.append(indent + ("└─ " if last else "├─ ") + words)
            below = indent + ("   " if last else "│  ")
            stack.extend((kid, below, kid is item.children[-1]) for kid in reversed(item.children))
    return "\n".join(lines)


def _line(item: Item, texts: Texts, page_size: int) -> str:
    pages = item.pages(page_size)
    shown = " ".join(map(str, pages[:6])) + (" …" if len(pages) > 6 else "")
    facts = [
        many(item.tokens, "token"),
        f"pages {shown}" if pages else "no slots",
        many(item.hits, "hit"),
    ]
    facts += [f"locked {item.locks}"] if item.locks else []
    facts += [f"used {item.last_use}"]
    facts += ["requests " + " ".join(item.owners)] if item.owners else []
    return f"[{label(item, texts, 40)}]  " + ", ".join(facts)
