"""The radix cache beside a plain Python tree that compares token by token over lists: time, growth
and bytes."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch

from minikv.measure.table import table
from minikv.measure.timing import Timing, measure
from minikv.prefix import RadixCache

PAGE, LONG, PROMPT = 16, 100_000, 4_000
SYSTEM, DOCUMENT, QUESTION = (
    2_048,
    1_904,
    48,
)  # tokens of the three nodes that a prompt of 4,000 crosses
WIDEST = 49_152  # vocabulary


class PlainNode:
    """A node of lists."""

    def __init__(
        self, key: list[int], slots: list[int], parent: PlainNode | None, use: int = 0
    ) -> None:
        self.key, self.slots, self.parent, self.use = key, slots, parent, use
        self.children: dict[tuple[int, ...], PlainNode] = {}


class PlainTree:
    """The tree as it is first written: lists of tokens compared one by one, and an evictor that
    scans the tree."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.clock, self.root = page_size, 0, PlainNode([], [], None)

    def match_prefix(self, tokens: list[int]) -> tuple[list[list[int]], PlainNode, int]:
        """Slots of each node, the last node, and the length."""
        self.clock += 1
        size, at, parts, length = self.page_size, self.root, [], 0
        while child := at.children.get(tuple(tokens[:size])):
            same = 0
            for mine, other in zip(child.key, tokens, strict=False):
                if mine != other:
                    break
                same += 1
            same -= same % size
            if same < len(child.key):
                child = self._split(child, same)
            child.use = self.clock
            parts.append(child.slots)
            length += same
            tokens, at = tokens[same:], child
        return parts, at, length

    def _split(self, node: PlainNode, n: int) -> PlainNode:
        above, size = node.parent, self.page_size
        assert above is not None
        upper = PlainNode(node.key[:n], node.slots[:n], above, node.use)
        above.children[tuple(upper.key[:size])] = upper
        node.key, node.slots, node.parent = node.key[n:], node.slots[n:], upper
        upper.children[tuple(node.key[:size])] = node
        return upper

    def insert(self, tokens: list[int], slots: list[int]) -> int:
        _, node, n = self.match_prefix(tokens)
        whole = len(tokens) - len(tokens) % self.page_size
        if n < whole:
            leaf = PlainNode(tokens[n:whole], slots[n:whole], node, self.clock)
            node.children[tuple(leaf.key[: self.page_size])] = leaf
        return n

    def evict(self, num_tokens: int) -> int:
        """Least recently used leaves, found by looking at the whole tree."""
        leaves, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.parent:
                leaves.append((node.use, id(node), node))
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < num_tokens:
            node = heapq.heappop(leaves)[2]
            above = node.parent
            freed += len(node.key)
            del above.children[tuple(node.key[: self.page_size])]
            if not above.children and above.parent:
                heapq.heappush(leaves, (above.use, id(above), above))
        return freed


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Measure the tree on the host, where it lives whatever the device of the pool.

    Returns
    -------
    dict
        ``rows`` (microseconds, ratio to the plain tree, the floor we set ourselves; `nodes` are
        those that the prompt crosses), ``growth`` (microseconds by number of nodes and by prompt
        length), ``memory`` (bytes per cached token, growth of a fresh process).
    """
    rng = np.random.default_rng(0)
    rows = [*_long_prompt(rng, quick), *_many_nodes(rng, quick)]
    print(f"page size {PAGE}, host, microseconds, 10th percentiles; plain: lists, token by token")
    print(table(rows))
    growth = _growth(rng, quick)
    print(
        f"\nmatch of a cached prompt: {PROMPT} tokens in trees of more and more nodes; more and "
        "more tokens"
    )
    print(table(growth))
    memory = [
        {"tree": shape, "bytes per token": bytes_per_token(shape), "limit": 32}
        for shape in ("flat", "chains")
    ]
    memory.append(
        {"tree": "plain, flat", "bytes per token": bytes_per_token("plain"), "limit": None}
    )
    print(
        "\ngrowth of a fresh process: 1,000,000 tokens in nodes of 50 (8 for the token and 8 for "
        "its slot are data)"
    )
    print(table(memory))
    return {"rows": rows, "growth": growth, "memory": memory}


def _row(
    what: str, ours: Timing, plain: Timing, floor: int | None, nodes: int | None = None
) -> dict[str, Any]:
    low = {
        "ours": ours.low * 1e6,
        "plain": plain.low * 1e6,
    }  # other work on the machine only ever adds time
    return {"what": what, "nodes": nodes, **low, "ratio": plain.low / ours.low, "floor": floor}


def _tokens(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, WIDEST, n)


def _long_prompt(rng: np.random.Generator, quick: bool) -> Iterable[dict[str, Any]]:
    """One prompt of 100,000 tokens; requests bring arrays to us, lists to the plain tree."""
    samples = 5 if quick else 20
    ours, plain = RadixCache(PAGE), PlainTree(PAGE)
    prompt, slots = _tokens(rng, LONG), np.arange(LONG)
    ours.insert(prompt, slots)
    plain.insert(prompt.tolist(), slots.tolist())
    asked = prompt.tolist()  # other int objects than the tree's, as from a tokenizer
    yield _row(
        f"match {LONG:,} cached tokens",
        measure(lambda: ours.match_prefix(prompt).slots, samples=samples),
        measure(lambda: plain.match_prefix(asked), samples=samples),
        50,
        1,
    )
    slot_tensor, slot_list = torch.from_numpy(slots), slots.tolist()
    for cached, floor in ((LONG * 9 // 10, 20), (0, None)):
        prompts = [
            np.concatenate([prompt[:cached], _tokens(rng, LONG - cached)])
            for _ in range(samples + 2)
        ]
        lists = [p.tolist() for p in prompts]
        yield _row(
            f"insert {LONG:,} tokens, {cached:,} cached",
            _each(lambda tokens: ours.insert(tokens, slot_tensor), prompts),
            _each(lambda tokens: plain.insert(tokens, slot_list), lists),
            floor,
        )


def _each(call: Callable[[Any], object], inputs: list[Any]) -> Timing:
    """Time of one call on each input; the first is a warm-up."""
    left = iter([inputs[0], *inputs])  # measure() calls twice before the first sample
    return measure(lambda: call(next(left)), warmup=1, samples=len(inputs) - 1, min_seconds=0)


def _chats(rng: np.random.Generator, nodes: int) -> list[np.ndarray]:
    """Prompts of 4,000 tokens: a system prompt, a document, a question; together about `nodes`
    nodes."""
    prompts: list[np.ndarray] = []
    asked = max(1, nodes // 100)
    while len(prompts) < nodes - 2:
        system = _tokens(rng, SYSTEM)
        for _ in range(25):
            document = np.concatenate([system, _tokens(rng, DOCUMENT)])
            prompts += [np.concatenate([document, _tokens(rng, QUESTION)]) for _ in range(asked)]
            if len(prompts) >= nodes - 2:
                break
    return prompts


def _many_nodes(rng: np.random.Generator, quick: bool) -> Iterable[dict[str, Any]]:
    """A tree of 1 million tokens in 20,000 nodes."""
    samples = 5 if quick else 20
    ours, plain = RadixCache(PAGE), PlainTree(PAGE)
    prompts = _chats(rng, 20_000)[:19_896]
    slots = np.arange(PROMPT)
    slot_list = slots.tolist()
    for prompt in prompts:
        ours.insert(prompt, slots)
        plain.insert(prompt.tolist(), slot_list)
    talk = _tokens(rng, PROMPT)
    for n in range(50, PROMPT + 1, 50):  # a conversation that was cached 80 times
        ours.insert(talk[:n], slots)
        plain.insert(talk[:n].tolist(), slot_list)
    count = sum(1 for _ in ours.nodes())
    name = f"match {PROMPT:,} of {ours.total_size:,} tokens in {count:,} nodes"
    some = [prompts[i] for i in rng.permutation(len(prompts))[:20]]
    lists = [prompt.tolist() for prompt in some]
    crossed = len(ours.match_prefix(some[0]).parts)
    for what, floor, mine, theirs in (
        (name, 30, lambda p: ours.match_prefix(p), lambda p: plain.match_prefix(p)),
        (
            "  and its slots in one piece",
            None,
            lambda p: ours.match_prefix(p).slots,
            lambda p: list(chain.from_iterable(plain.match_prefix(p)[0])),
        ),
    ):
        timing = measure(lambda f=mine: [f(p) for p in some], samples=samples)
        by_lists = measure(lambda f=theirs: [f(p) for p in lists], samples=samples)
        yield _row(what, _per(timing, len(some)), _per(by_lists, len(some)), floor, crossed)
    asked = talk.tolist()
    yield _row(
        "  a prompt of many small nodes",
        measure(lambda: ours.match_prefix(talk), samples=samples),
        measure(lambda: plain.match_prefix(asked), samples=samples),
        None,
        len(ours.match_prefix(talk).parts),
    )
    leaves, scans = (200, 5) if quick else (1000, 30)
    yield _row(
        # as a server does: when a step is short of pages
        f"evict {leaves:,} leaves, a call each: per leaf",
        _per(_once(lambda: [ours.evict(1) for _ in range(leaves)]), leaves),
        _per(_once(lambda: [plain.evict(1) for _ in range(scans)]), scans),
        20,
    )
    yield _row(
        f"evict {leaves:,} leaves in one call: per leaf",
        _per(_once(lambda: ours.evict(leaves * QUESTION)), leaves),
        _per(_once(lambda: plain.evict(leaves * QUESTION)), leaves),
        None,
    )


def _once(call: Callable[[], object]) -> Timing:
    started = time.perf_counter()
    call()
    return Timing.of([time.perf_counter() - started])


def _per(timing: Timing, n: int) -> Timing:
    return Timing(timing.median / n, timing.low / n, timing.high / n, timing.samples)


def _growth(rng: np.random.Generator, quick: bool) -> list[dict[str, Any]]:
    """Time of a match by the size of the tree, and by the length of the prompt."""
    rows = []
    for nodes in (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000):
        cache = RadixCache(PAGE)
        prompts = _chats(rng, nodes)
        for prompt in prompts:
            cache.insert(prompt)
        some = [prompts[i] for i in rng.integers(0, len(prompts), 20)]
        count, crossed = sum(1 for _ in cache.nodes()), len(cache.match_prefix(some[0]).parts)
        timing = measure(lambda c=cache, s=some: [c.match_prefix(p) for p in s])
        rows.append(
            {
                "nodes in the tree": count,
                "crossed": crossed,
                "tokens": PROMPT,
                "us": _per(timing, 20).low * 1e6,
            }
        )
    for tokens in (1_024, 4_096, 16_384, 65_536):
        cache, prompt = RadixCache(PAGE), _tokens(rng, tokens)
        cache.insert(prompt)
        timing = measure(lambda c=cache, p=prompt: c.match_prefix(p).slots)
        rows.append(
            {"nodes in the tree": 1, "crossed": 1, "tokens": tokens, "us": timing.low * 1e6}
        )
    return rows


def bytes_per_token(shape: str, tokens: int = 1_000_000) -> float:
    """Growth of a fresh process per token cached at 50 tokens a node and page size 1.

    Parameters
    ----------
    shape
        ``"flat"`` (every node right below the root), ``"chains"`` (of 50 nodes each), ``"plain"``
        (flat, plain tree).
    tokens
        How many are cached.
    """
    code = f"from minikv.measure.bench_cache import _grow; print(_grow({shape!r}, {tokens}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _grow(shape: str, tokens: int) -> float:
    import psutil

    rng, process = np.random.default_rng(0), psutil.Process()
    tree: Any = PlainTree(1) if shape == "plain" else RadixCache(1)
    slots = np.arange(2_500)
    as_given = (lambda x: x.tolist()) if shape == "plain" else (lambda x: x)
    tree.insert(as_given(_tokens(rng, 50)), as_given(slots))
    before = process.memory_info().rss
    for first in range(0, tokens, 2_500):
        chain = _tokens(rng, 2_500)
        for n in range(50, 2_501, 50):
            piece = chain[:n] if shape == "chains" else chain[n - 50 : n]
            tree.insert(as_given(piece), as_given(slots + first))
    return (process.memory_info().rss - before) / tokens
