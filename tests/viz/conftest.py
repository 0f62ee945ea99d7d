"""The running example as live objects, and a reader of SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from minikv.memory import PagedAllocator, RequestTable
from minikv.prefix import RadixCache
from minikv.viz import example
from minikv.viz.style import Drawing

SVG = "{http://www.w3.org/2000/svg}"


class Request:
    """What allocator, table and cache need to know of a request."""

    def __init__(self, tokens: list[int], row: int) -> None:
        self.token_ids, self.row = tokens, row
        self.computed = self.protected_len = self.cached_tokens = 0
        self.node, self.namespace = None, None


@pytest.fixture
def running() -> SimpleNamespace:
    """A and C run, B has finished: page size 4, 12 pages, 10 tokens of system prompt shared."""
    allocator = PagedAllocator(48, 4, device="cpu")
    table = RequestTable(4, 32)
    cache = RadixCache(4, allocator, table)
    requests = {}
    for name, tokens in example.REQUESTS.items():
        one = requests[name] = Request(tokens, table.alloc(1)[0])
        match = cache.match_prefix(tokens[:-1])
        one.node, one.protected_len, one.cached_tokens = match.node, match.length, match.length
        cache.lock(match.node)
        last = torch.tensor([int(match.slots[-1]) if match.length else -1])
        new = allocator.alloc_extend(
            torch.tensor([match.length]),
            torch.tensor([len(tokens)]),
            last,
            len(tokens) - match.length,
        )
        table.table[one.row, : len(tokens)] = torch.cat([match.slots, new]).int()
        one.computed = len(tokens)
        cache.cache_unfinished(one)
        if name == "B":
            cache.cache_finished(requests.pop("B"))
    return SimpleNamespace(allocator=allocator, table=table, cache=cache, requests=requests)


class Look:
    """Counts what a drawing shows, by its structure: marks, texts, ids."""

    def __init__(self, drawing: Drawing) -> None:
        self.root = ET.fromstring(drawing.svg)
        self.ids = [e.get("id") for e in self.root.iter() if e.get("id")]
        self.texts = [e.text or "" for e in self.root.iter(f"{SVG}text")]
        self.words = " ".join(self.texts)

    def marks(self, name: str) -> Counter[str]:
        return Counter(e.get(f"data-{name}") for e in self.root.iter() if e.get(f"data-{name}"))


@pytest.fixture
def look() -> type[Look]:
    return Look


class FakeNode:
    """A node as the pictures read it."""

    def __init__(self, key, slots, parent, namespace=None, lock=0, hits=0, use=0) -> None:
        self.key, self.slots = torch.tensor(key), torch.tensor(slots)
        self.parent, self.namespace, self.children = parent, namespace, {}
        self.lock_count, self.hit_count, self.last_use = lock, hits, use


@pytest.fixture
def big_tree() -> SimpleNamespace:
    """10,000 nodes as chats grow them: few deep conversations, many that begin alike."""
    rng = torch.Generator().manual_seed(1)
    root = FakeNode([], [], None)
    nodes, page = [root], 1
    while len(nodes) < 10_001:
        back = int(torch.randint(0, min(len(nodes), 400), (1,), generator=rng))
        parent = nodes[-1 - back] if len(nodes) % 7 else root
        pages = int(torch.randint(1, 4, (1,), generator=rng))
        key = torch.randint(0, 17, (16 * pages,), generator=rng).tolist()
        slots = list(range(page * 16, (page + pages) * 16))
        nodes.append(
            FakeNode(key, slots, parent, lock=len(nodes) % 997 == 0, hits=back % 9, use=len(nodes))
        )
        page += pages
    return SimpleNamespace(page_size=16, nodes=lambda: nodes)
