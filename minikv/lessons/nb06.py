"""Exercises of notebook 06: match, insert and split in a radix tree, and why an identical prompt
may hit nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.cells import word
from minikv.lessons.engine import Case, Exercise
from minikv.lessons.picture import attempt, side_by_side, stack
from minikv.lessons.states import nested, tree_state
from minikv.viz.style import Drawing

# A tree in these exercises is plain data: {"key": [...], "slots": [...], "children": {first token:
# node}}; the root's key and slots are empty.


def leaf(key: list[int], slots: list[int]) -> dict[str, Any]:
    """A node without children."""
    return {"key": list(key), "slots": list(slots), "children": {}}


def tree_of(sequences: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """The radix tree of some token sequences, built from the set of all their prefixes instead of
    by splitting."""
    root = leaf([], [])

    def grow(node: dict[str, Any], rows: list[tuple[list[int], list[int]]]) -> None:
        for first in dict.fromkeys(tokens[0] for tokens, _ in rows if tokens):
            group = [(tokens, slots) for tokens, slots in rows if tokens and tokens[0] == first]
            n = 0
            while all(len(tokens) > n and tokens[n] == group[0][0][n] for tokens, _ in group):
                n += 1
            child = leaf(group[0][0][:n], group[0][1][:n])
            node["children"][first] = child
            grow(child, [(tokens[n:], slots[n:]) for tokens, slots in group])

    grow(root, sequences)
    return root


def paths(
    node: dict[str, Any], before: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every cached prefix of a tree with the slot of its last token."""
    for token, slot in zip(node["key"], node["slots"], strict=True):
        before = (*before, token)
        yield before, slot
    for child in node["children"].values():
        yield from paths(child, before)


def _sequences(rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
    """Sequences over few tokens, so that they share prefixes; equal prefixes have equal slots."""
    known: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(count):
        tokens = rng.integers(1, 4, int(rng.integers(1, 9))).tolist()
        slots = [
            known.setdefault(tuple(tokens[: i + 1]), 100 + len(known)) for i in range(len(tokens))
        ]
        rows.append((tokens, slots))
    return rows


def _picture(case: Case, expected: Any, got: Any) -> Drawing:
    """The tree before the call, what the prompt shares with it hatched."""
    root, tokens, *slots = case.args
    shared = len(_match_oracle(root, tokens))
    note = f"insert {tokens} with slots {slots[0]}" if slots else f"look up {tokens}"
    return tree_state(
        nested(root, tokens), 1, title="The tree before the call", note=note, reused=shared
    )


def _insert_picture(case: Case, expected: Any, got: Any) -> Drawing:
    """The trees before the call, as it should be after it, and as it is."""

    def after(title: str, result: Any) -> Drawing:
        note = f"insert returned {word(result[0])}"
        return tree_state(nested(result[1]), 1, title=title, note=note)

    yours = attempt(
        lambda: after("Your tree after the call", got) if isinstance(got[1], dict) else None
    ) or attempt(lambda: side_by_side(expected, got))
    drawings = [
        _picture(case, expected, got),
        after("The tree as it should be after the call", expected),
        yours,
    ]
    return stack(*(drawing for drawing in drawings if drawing is not None))


# ------------------------------------------------------------------------------------------------------ match_prefix


def _match_oracle(root: dict[str, Any], tokens: list[int]) -> list[int]:
    """Look every prefix up in a table of all cached prefixes, shortest first."""
    table, slots = dict(paths(root)), []
    for n in range(1, len(tokens) + 1):
        if tuple(tokens[:n]) not in table:
            break
        slots.append(table[tuple(tokens[:n])])
    return slots


SMALL = tree_of([([1, 2, 3, 4], [10, 11, 12, 13]), ([1, 2, 5], [10, 11, 14]), ([7], [15])])


def _match_grid() -> Iterator[Case]:
    yield Case((leaf([], []), [1, 2]), "an empty tree")
    yield Case((SMALL, []), "an empty prompt")
    yield Case((SMALL, [9, 9]), "no child begins like this")
    yield Case((SMALL, [1, 2]), "the match ends at a node's end")
    yield Case((SMALL, [1, 2, 3]), "the match ends inside a node")
    yield Case((SMALL, [1, 2, 3, 9]), "the prompt leaves a node in its middle")
    yield Case((SMALL, [1, 9]), "it leaves the first node after one token")
    yield Case(
        (SMALL, [1, 5]),
        "it leaves the first node, and a child of that node begins with the next token",
    )
    yield Case((SMALL, [1, 2, 3, 4]), "the whole prompt is cached")
    yield Case((SMALL, [1, 2, 3, 4, 5, 6]), "the prompt goes on below a leaf")
    yield Case((SMALL, [7]), "a node of one token")


MATCH_PREFIX = Exercise(
    id="06-match-prefix",
    title="match_prefix: the longest cached prefix",
    statement=(
        "A node is a dict with `key` (tokens), `slots` (one per token) and `children` (first token of the child's key: node); "
        "the root's key is empty. Return the slots of the longest prefix of `tokens` that the tree holds. "
        "It may end inside a node. Change nothing.\n\n"
        "In a tree with one node, key `[1, 2, 3]` in slots `[10, 11, 12]`, the prompt `[1, 2, 9]` gives `[10, 11]`."
    ),
    signature="def match_prefix(root: dict, tokens: list[int]) -> list[int]",
    worked=Case((tree_of([([1, 2, 3], [10, 11, 12])]), [1, 2, 9]), "the worked case"),
    grid=_match_grid,
    random=lambda rng: Case(
        (tree_of(_sequences(rng, int(rng.integers(0, 7)))), rng.integers(1, 4, 7).tolist())
    ),
    oracle=_match_oracle,
    picture=_picture,
    hints=(
        "Walk down: which child could hold the next token?",
        "Count how many tokens of the child's key agree with what is left of the prompt; stop if not all of them do.",
        "while tokens and tokens[0] in node['children']: compare key and tokens position by position, "
        "add slots[:n], stop when n < len(key), else go on with tokens[n:] at the child.",
    ),
)

# ------------------------------------------------------------------------------------------------- insert with split


def _run_insert(function: Any, root: dict[str, Any], tokens: list[int], slots: list[int]) -> Any:
    n = function(root, tokens, slots)
    return [n, root]


def _insert_oracle(root: dict[str, Any], tokens: list[int], slots: list[int]) -> Any:
    """Collect all cached sequences, add the new one, and build the tree again from nothing."""
    table = dict(paths(root))
    present = 0
    while present < len(tokens) and tuple(tokens[: present + 1]) in table:
        present += 1
    mine = [table[tuple(tokens[: i + 1])] if i < present else slots[i] for i in range(len(tokens))]
    rows = [
        ([*prefix], [table[prefix[: i + 1]] for i in range(len(prefix))]) for prefix in _ends(root)
    ]
    return [present, tree_of([*rows, (tokens, mine)])]


def _ends(node: dict[str, Any], before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The sequences that end at some node, so that the rebuilt tree keeps the node borders that are
    there."""
    before = (*before, *node["key"])
    if node["key"]:
        yield before
    for child in node["children"].values():
        yield from _ends(child, before)


def _judge_insert(case: Case, expected: Any, got: Any) -> str | None:
    if got[0] != expected[0]:
        return f"returned {got[0]!r}; {expected[0]} tokens were already cached"
    return _tree_difference(expected[1], got[1], "the root")


def _tree_difference(expected: Any, got: Any, where: str) -> str | None:
    if not isinstance(got, dict) or set(got) != {"key", "slots", "children"}:
        return f"{where} is not a node with key, slots and children"
    for name in ("key", "slots"):
        if list(got[name]) != list(expected[name]):
            return f"{where} has {name} {list(got[name])}, expected {list(expected[name])}"
    if set(got["children"]) != set(expected["children"]):
        return f"{where} has children under {sorted(got['children'])}, expected {sorted(expected['children'])}"
    for first in sorted(expected["children"]):
        problem = _tree_difference(
            expected["children"][first], got["children"][first], f"the child {first} of {where}"
        )
        if problem:
            return problem
    return None


def _insert_grid() -> Iterator[Case]:
    yield Case((leaf([], []), [1, 2], [20, 21]), "into an empty tree")
    yield Case((SMALL, [], []), "nothing to insert")
    yield Case((SMALL, [8, 9], [20, 21]), "a new child of the root")
    yield Case(
        (SMALL, [1, 2, 3, 4, 6], [20, 21, 22, 23, 24]), "below a leaf: the rest becomes its child"
    )
    yield Case((SMALL, [1, 2, 3, 4], [20, 21, 22, 23]), "already there: nothing changes")
    yield Case((SMALL, [1, 2, 3], [20, 21, 22]), "ends inside a node: split it, add nothing")
    yield Case(
        (SMALL, [1, 2, 3, 9], [20, 21, 22, 23]),
        "leaves a leaf in its middle: split, then two children",
    )
    yield Case(
        (SMALL, [1, 9], [20, 21]), "splits a node that has children: they stay with the lower half"
    )


def _insert_random(rng: np.random.Generator) -> Case:
    tokens = rng.integers(1, 4, int(rng.integers(1, 8))).tolist()
    return Case(
        (
            tree_of(_sequences(rng, int(rng.integers(0, 7)))),
            tokens,
            list(range(500, 500 + len(tokens))),
        )
    )


INSERT_SPLIT = Exercise(
    id="06-insert-split",
    title="insert, with a split where the paths part",
    statement=(
        "A node is a dict: `key` (tokens), `slots` (one per token), `children` (first token of the child's key: child). The "
        "root's key is empty. Pages play no part here. Change the tree in place so that it holds `tokens` with `slots`, and "
        "return how many leading tokens it held already (those keep their old slots). If `tokens` differs from a node's key, or "
        "ends, partway through it, split that node: the first part keeps its place under the parent; the rest, with its slots "
        "and all old children, becomes its child. What is left of `tokens` becomes one new leaf; if nothing is left, add none.\n\n"
        "Into one node `[1, 2, 3]` / `[10, 11, 12]`, inserting `[1, 2, 9]` with slots `[20, 21, 22]` returns 2 and leaves "
        "`[1, 2]` / `[10, 11]` with two children, `[3]` / `[12]` and `[9]` / `[22]`."
    ),
    signature="def insert(root: dict, tokens: list[int], slots: list[int]) -> int",
    worked=Case((tree_of([([1, 2, 3], [10, 11, 12])]), [1, 2, 9], [20, 21, 22]), "the worked case"),
    grid=_insert_grid,
    random=_insert_random,
    oracle=_insert_oracle,
    run=_run_insert,
    alone=True,
    judge=_judge_insert,
    picture=_insert_picture,
    hints=(
        "Walk down as in match_prefix and remember how many tokens you have passed.",
        "If only n tokens of a child's key agree, make a new node of key[:n] and hang the shortened child under key[n].",
        "Split: upper = {key[:n], slots[:n], children: {key[n]: child}}; child['key'] = key[n:], child['slots'] = slots[n:]; "
        "node['children'][key[0]] = upper. Then hang a leaf for the tokens that are left, if any.",
    ),
)

# --------------------------------------------------------------------------------- why an identical prompt hits nothing


def _why_oracle(length: int, page_size: int, same_namespace: bool, cached_before: bool) -> Any:
    cached = list(range(length))[: len(range(page_size, length + 1, page_size)) * page_size]
    asked = list(range(length))[:-1]
    pages = 0
    while (pages + 1) * page_size <= min(len(cached), len(asked)):
        pages += 1
    if not same_namespace:
        return [0, "namespace"]
    if not cached_before:
        return [0, "too early"]
    return [pages * page_size, "hit" if pages else "too short"]


def _why_grid() -> Iterator[Case]:
    yield Case((3, 4, True, True), "shorter than a page")
    yield Case(
        (4, 4, True, True),
        "exactly a page: the last token is always computed, so the page cannot be used",
    )
    yield Case((5, 4, True, True), "one token more than a page")
    yield Case((8, 4, True, True), "exactly two pages: one is used")
    yield Case((2, 1, True, True), "page size 1")
    yield Case((1, 1, True, True), "a prompt of one token")
    yield Case((100, 4, False, True), "another tenant")
    yield Case((100, 4, True, False), "both arrived in one batch")
    yield Case((100, 4, False, False), "another tenant, and in one batch")


WHY_ZERO = Exercise(
    id="06-why-zero",
    title="Why did an identical prompt hit 0?",
    statement=(
        "The same prompt of `length` tokens is sent twice. The tree stores whole pages only; the second lookup asks for all "
        "tokens but the last, because at least one token must be computed to get logits. A lookup in another namespace sees "
        "nothing (`same_namespace`), and a prompt whose pages are not in the tree yet cannot be found (`cached_before`). "
        "Return `(cached tokens of the second prompt, reason)` with reason `'hit'`, `'too short'`, `'namespace'` or "
        "`'too early'`; the namespace is looked at first.\n\n"
        "With pages of 4, a prompt of 10 gives `(8, 'hit')`, and one of 4 gives `(0, 'too short')`."
    ),
    signature="def second_hit(length: int, page_size: int, same_namespace: bool, cached_before: bool) -> tuple[int, str]",
    worked=Case((10, 4, True, True), "the worked case"),
    grid=_why_grid,
    random=lambda rng: Case(
        (
            int(rng.integers(1, 60)),
            int(rng.choice([1, 2, 4, 16])),
            bool(rng.random() < 0.8),
            bool(rng.random() < 0.8),
        )
    ),
    oracle=_why_oracle,
    parts=[("cached tokens", "reason")],
    hints=(
        "How many tokens does the second lookup ask for?",
        "It asks for length - 1 tokens, and gets whole pages of them.",
        "hit = (length - 1) // page_size * page_size, and 0 when the namespace differs or nothing is in the tree yet.",
    ),
)

EXERCISES = [MATCH_PREFIX, INSERT_SPLIT, WHY_ZERO]
