"""Exercises of notebook 07: whole pages, locks, eviction from the leaves, and duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.engine import Case, Exercise
from minikv.lessons.states import cache_state, tree_state
from minikv.viz.style import Drawing, shorten

# -------------------------------------------------------------------------------------------------- page floor rule


def _floor_oracle(key: list[int], tokens: list[int], page_size: int) -> int:
    """Cut both into pages and count equal ones from the left."""
    pages = [tuple(key[i : i + page_size]) for i in range(0, len(key), page_size)]
    asked = [tuple(tokens[i : i + page_size]) for i in range(0, len(tokens), page_size)]
    count = 0
    while (
        count < min(len(pages), len(asked))
        and len(asked[count]) == page_size
        and pages[count] == asked[count]
    ):
        count += 1
    return count * page_size


def _floor_grid() -> Iterator[Case]:
    key = [1, 2, 3, 4, 5, 6, 7, 8]
    yield Case((key, [], 4), "an empty prompt")
    yield Case((key, [1, 2, 3], 4), "shorter than a page")
    yield Case((key, [1, 2, 3, 4], 4), "exactly a page")
    yield Case((key, [1, 2, 3, 4, 5], 4), "a page and one token")
    yield Case((key, [1, 2, 3, 9, 5, 6, 7, 8], 4), "the last token of the first page differs")
    yield Case(
        (key, [1, 2, 3, 4, 5, 9, 7, 8], 4), "a token in the middle of the second page differs"
    )
    yield Case(
        (key, [9, 2, 3, 4, 5, 6, 7, 8], 4), "the first token differs: later pages do not count"
    )
    yield Case((key, [*key, 9, 9, 9, 9], 4), "the prompt goes on")
    yield Case((key, [1, 2, 3], 1), "page size 1")
    yield Case(([], [1, 2, 3, 4], 4), "an empty key")


def _floor_random(rng: np.random.Generator) -> Case:
    p = int(rng.choice([1, 2, 4, 16]))
    key = rng.integers(1, 3, p * int(rng.integers(0, 5))).tolist()
    tokens = [
        *key[: int(rng.integers(0, len(key) + 1))],
        *rng.integers(1, 3, int(rng.integers(0, 2 * p))).tolist(),
    ]
    return Case((key, tokens, p))


PAGE_FLOOR = Exercise(
    id="07-page-floor",
    title="The page floor rule",
    statement=(
        "A node's key holds whole pages. How many tokens of `tokens` match it? Only whole pages count: a page that agrees in "
        "part cannot be shared. With key `[1, 2, 3, 4, 5, 6, 7, 8]` and pages of 4, `[1, 2, 3, 4, 5, 6, 9]` matches 4."
    ),
    signature="def matched_tokens(key: list[int], tokens: list[int], page_size: int) -> int",
    worked=Case(([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9], 4), "the worked case"),
    grid=_floor_grid,
    random=_floor_random,
    oracle=_floor_oracle,
    picture=lambda case, expected, got: cache_state(
        [case.args[0]], case.args[1], case.args[2], "The node's pages, and what a prompt can share"
    ),
    hints=(
        "Count the tokens that agree from the left first.",
        "Stop at the first token that differs; what follows does not count even if it agrees.",
        "n // page_size * page_size rounds n down to whole pages.",
    ),
)

# ------------------------------------------------------------------------------------------------ fully cached prompt


def _plan_oracle(tokens: list[int], cached: list[list[int]], page_size: int) -> Any:
    best = max((_floor_oracle(row, tokens[:-1], page_size) for row in cached), default=0)
    return [best, len(tokens) - best]


def _plan_grid() -> Iterator[Case]:
    yield Case(
        ([1, 2, 3, 4], [[1, 2, 3, 4]], 4),
        "everything is cached, in exactly one page: nothing of it can be used",
    )
    yield Case(
        ([1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3, 4, 5, 6, 7, 8]], 4),
        "everything is cached in two pages",
    )
    yield Case(([1, 2, 3, 4, 5], [[1, 2, 3, 4]], 4), "all but one token cached")
    yield Case(([1, 2, 3], [[1, 2, 3]], 1), "page size 1, fully cached")
    yield Case(([7], [[7]], 1), "a prompt of one token, cached")
    yield Case(([1, 2, 3], [], 4), "an empty cache")
    yield Case(
        ([1, 2, 3, 4, 5, 6], [[1, 2, 9, 9], [1, 2, 3, 4], [1, 9, 9, 9]], 4),
        "the longest of several",
    )


def _plan_random(rng: np.random.Generator) -> Case:
    p = int(rng.choice([1, 2, 4]))
    tokens = rng.integers(1, 3, int(rng.integers(1, 14))).tolist()
    rows = [
        [*tokens[: p * int(rng.integers(0, 4))], *rng.integers(1, 3, 8).tolist()]
        for _ in range(int(rng.integers(0, 4)))
    ]
    return Case((tokens, [row[: len(row) // p * p] for row in rows], p))


PLAN_PREFILL = Exercise(
    id="07-fully-cached",
    title="The fully cached prompt",
    statement=(
        "To get logits the model must run at least one token, also when the cache holds the whole prompt. So a scheduler looks "
        "up all tokens but the last. Given the cached sequences (whole pages each), return `(cached tokens used, tokens to run)`. "
        "With pages of 4 and `[1, 2, 3, 4, 5, 6, 7, 8]` cached, the same prompt again gives `(4, 4)`, not `(8, 0)`."
    ),
    signature="def plan_prefill(tokens: list[int], cached: list[list[int]], page_size: int) -> tuple[int, int]",
    worked=Case(([1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3, 4, 5, 6, 7, 8]], 4), "the worked case"),
    grid=_plan_grid,
    random=_plan_random,
    oracle=_plan_oracle,
    picture=lambda case, expected, got: cache_state(
        case.args[1],
        case.args[0][:-1],
        case.args[2],
        "The cached pages, and what this prompt can use",
    ),
    parts=[("cached", "to run")],
    judge=lambda case, expected, got: (
        None
        if isinstance(got, tuple | list) and list(got) == expected
        else f"returned {got!r}, expected {tuple(expected)} = (cached, to run)"
    ),
    hints=(
        "What would happen with zero tokens to run?",
        "Match tokens[:-1] with the page floor rule against each cached sequence and take the longest.",
        "cached = max of matched_tokens(row, tokens[:-1], page_size); the rest runs.",
    ),
)

# ----------------------------------------------------------------------------------------------- leaf-first eviction


def _evict_oracle(nodes: list[dict[str, Any]], num_tokens: int) -> list[str]:
    """Look at all nodes again for every single eviction."""
    left, gone, freed = {n["name"]: n for n in nodes}, [], 0
    while freed < num_tokens:
        parents = {n["parent"] for n in left.values()}
        leaves = [n for n in left.values() if n["name"] not in parents and n["locks"] == 0]
        if not leaves:
            break
        oldest = min(leaves, key=lambda n: n["last_use"])
        freed += oldest["tokens"]
        gone.append(oldest["name"])
        del left[oldest["name"]]
    return gone


def _node(name: str, parent: str | None, tokens: int, locks: int, last_use: int) -> dict[str, Any]:
    return {"name": name, "parent": parent, "tokens": tokens, "locks": locks, "last_use": last_use}


CHAIN = [
    _node("a", None, 4, 0, 1),
    _node("b", "a", 4, 0, 5),
    _node("c", "b", 4, 0, 6),
    _node("d", None, 4, 0, 9),
]


def _evict_grid() -> Iterator[Case]:
    yield Case((CHAIN, 0), "nothing to evict")
    yield Case(([], 8), "an empty tree")
    yield Case((CHAIN, 4), "the oldest node has children: a leaf goes first")
    yield Case((CHAIN, 8), "a parent that lost its last child is a leaf")
    yield Case((CHAIN, 9), "at least so many tokens: one leaf more")
    yield Case((CHAIN, 100), "more than there is: everything goes")
    yield Case(
        ([_node("a", None, 4, 1, 1), _node("b", "a", 4, 1, 2), _node("c", None, 4, 0, 3)], 8),
        "a locked path stays",
    )
    yield Case(
        ([_node("a", None, 4, 1, 1), _node("b", "a", 4, 0, 2)], 8),
        "an unlocked leaf under a locked parent",
    )
    yield Case(([_node("a", None, 4, 1, 1)], 4), "only locked nodes: nothing can go")


def _evict_random(rng: np.random.Generator) -> Case:
    nodes: list[dict[str, Any]] = []
    uses = rng.permutation(20)
    for i in range(int(rng.integers(1, 12))):
        parent = (
            None
            if not nodes or rng.random() < 0.4
            else nodes[int(rng.integers(len(nodes)))]["name"]
        )
        nodes.append(_node(chr(97 + i), parent, 4 * int(rng.integers(1, 4)), 0, int(uses[i])))
    by_name = {n["name"]: n for n in nodes}
    for n in nodes:
        if rng.random() < 0.15:  # a lock counts on the whole path to the root
            at: dict[str, Any] | None = n
            while at is not None:
                at["locks"] += 1
                at = by_name.get(at["parent"])
    return Case((nodes, int(rng.integers(0, 40))))


def _evict_picture(case: Case, expected: Any, got: Any) -> Drawing:
    """The tree before the call; what has to go is struck through."""
    nodes, num_tokens = case.args
    number = {node["name"]: i for i, node in enumerate(nodes)}
    plain = [
        {
            **n,
            "key": [number[n["name"]]] * n["tokens"],
            "up": number.get(n["parent"]),
            "evicted": n["name"] in expected,
        }
        for n in nodes
    ]
    order = ", in this order" if len(expected) > 1 else ""
    note = (
        f"evict {num_tokens} tokens: {shorten(', '.join(expected) or 'nothing', 40)} must go{order}"
    )
    return tree_state(plain, 4, title="The tree before the call", note=note, texts=list(number))


EVICT = Exercise(
    id="07-evict-leaves",
    title="Evict from the leaves, and never what is locked",
    statement=(
        "Each node is a dict with `name`, `parent` (a name, None under the root), `tokens`, `locks` and `last_use` (a counter). "
        "Free at least `num_tokens` tokens: again and again remove the least recently used node that has no children left and "
        "no locks; stop when enough is freed or no such node is left. Return the names in the order of removal.\n\n"
        "With `a` (used at 1) the parent of `b` (used at 5), both of 4 tokens, evicting 4 tokens removes `['b']`: "
        "`a` is older, but its child still needs it."
    ),
    signature="def evict(nodes: list[dict], num_tokens: int) -> list[str]",
    worked=Case(([_node("a", None, 4, 0, 1), _node("b", "a", 4, 0, 5)], 4), "the worked case"),
    grid=_evict_grid,
    random=_evict_random,
    oracle=_evict_oracle,
    picture=_evict_picture,
    hints=(
        "Which nodes may go at all? Find them again after each removal.",
        "A leaf is a node whose name is nobody's parent among the nodes still there.",
        "while freed < num_tokens: leaves = [unlocked, childless]; if none: stop; remove min(leaves, key=last_use).",
    ),
)

# -------------------------------------------------------------------------------------------------- duplicate insert


def _duplicate_oracle(row: list[int], tree: list[int], protected: int) -> Any:
    """Compare slot by slot: where the tree has another slot than the request, the request's own
    copy is free."""
    new_row = [tree[i] if i < len(tree) else slot for i, slot in enumerate(row)]
    free = [
        slot for i, slot in enumerate(row) if i < len(tree) and i >= protected and tree[i] != slot
    ]
    return [free, new_row]


def _duplicate_grid() -> Iterator[Case]:
    yield Case(
        ([8, 9, 10, 11], [8, 9, 10, 11], 0),
        "the tree took the request's own slots: nothing to free",
    )
    yield Case(
        ([8, 9, 10, 11], [4, 5, 6, 7], 0), "another request was first: all four are duplicates"
    )
    yield Case(
        ([4, 5, 6, 7, 12, 13, 14, 15], [4, 5, 6, 7, 20, 21, 22, 23], 4),
        "the first page was shared from the start",
    )
    yield Case(
        ([8, 9, 10, 11, 12, 13], [4, 5, 6, 7], 0), "the unaligned tail stays the request's own"
    )
    yield Case(([4, 5, 6, 7, 12], [4, 5, 6, 7], 4), "nothing new")
    yield Case(([12, 13], [], 0), "shorter than a page")
    yield Case(
        ([8, 9, 10, 11, 12, 13, 14, 15], [4, 5, 6, 7, 12, 13, 14, 15], 0),
        "the second page is the request's own",
    )
    yield Case(
        ([4, 5, 6, 7, 12, 13], [20, 21, 22, 23], 4),
        "a borrowed page was moved: its old slots are the mover's",
    )
    yield Case(
        ([4, 5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 28, 29, 30, 31], 4),
        "a borrowed page was moved, and the next page is a duplicate",
    )


def _duplicate_random(rng: np.random.Generator) -> Case:
    pages = (rng.permutation(30) + 1).tolist()
    count = int(rng.integers(0, 6))
    mine, theirs = pages[:count], pages[count : 2 * count]
    protected = int(rng.integers(0, count + 1))
    first_own = int(rng.integers(protected, count + 1))
    mine[:protected] = theirs[:protected]
    theirs[first_own:] = mine[first_own:]
    if protected and rng.random() < 0.3:  # a borrowed page was moved meanwhile
        theirs[int(rng.integers(protected))] = pages[-2]
    tail = [pages[-1] * 4 + i for i in range(int(rng.integers(0, 4)))]
    spread = lambda some: [page * 4 + i for page in some for i in range(4)]  # noqa: E731
    return Case(([*spread(mine), *tail], spread(theirs), protected * 4))


DUPLICATE = Exercise(
    id="07-duplicate-insert",
    title="Two requests computed the same pages",
    statement=(
        "A request has finished a chunk and its tokens were inserted into the tree. `row` has the request's slots, one per "
        "token. `tree` has the slots that the tree now holds for the first `len(tree)` tokens, the whole pages. At each position "
        "the tree either took the request's own slot (equal: the tree owns it, do not free it) or already had another request's "
        "slot (different: the request's copy is a duplicate, free it). The first `protected` slots were borrowed from the tree: "
        "never free them, even where the tree has moved a page to other slots meanwhile (who moves a page frees the old one). "
        "Return `(free, new_row)`: the duplicates in row order, and `tree` followed by the unchanged tail of `row`.\n\n"
        "`row = [8, 9, 10, 11, 12]`, `tree = [4, 5, 6, 7]`, `protected = 0` gives `([8, 9, 10, 11], [4, 5, 6, 7, 12])`. With pages of "
        "2, `row = [4, 5, 8, 9, 12, 13, 14]`, `tree = [4, 5, 6, 7, 12, 13]`, `protected = 2` gives `([8, 9], [4, 5, 6, 7, 12, 13, 14])`."
    ),
    signature="def adopt(row: list[int], tree: list[int], protected: int) -> tuple[list[int], list[int]]",
    worked=Case(([8, 9, 10, 11, 12], [4, 5, 6, 7], 0), "the worked case"),
    grid=_duplicate_grid,
    random=_duplicate_random,
    oracle=_duplicate_oracle,
    parts=[("free", "new row")],
    judge=lambda case, expected, got: (
        None
        if isinstance(got, tuple | list) and [list(part) for part in got] == expected
        else f"returned {got!r}, expected {tuple(expected)} = (free, new row)"
    ),
    hints=(
        "Compare row and tree position by position.",
        "Where they differ, the tree's slot wins and the request's own slot is free, but never one before `protected`.",
        "new_row = tree + row[len(tree):]; free = [own for own, theirs in zip(row, tree) if own != theirs], from protected on.",
    ),
)

EXERCISES = [PAGE_FLOOR, PLAN_PREFILL, EVICT, DUPLICATE]
