"""Exercises of notebook 05: the online softmax, and attention through a page table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.compare import first_difference, plain
from minikv.lessons.engine import Case, Exercise

INF = float("inf")


def _judge_numbers(case: Case, expected: Any, got: Any) -> str | None:
    got = plain(got)
    if "nan" in repr(got):
        return f"the result holds NaN: {got!r:.80}, expected {plain(expected)!r:.80}"
    return first_difference(expected, got)


def _softmax_oracle(scores: Any, values: Any) -> Any:
    """All scores at once, in float64; scores of -inf have no weight, and without any weight the
    result is 0."""
    scores, values = np.asarray(scores, dtype=np.float64), np.asarray(values, dtype=np.float64)
    seen = np.isfinite(scores)
    if not seen.any():
        return [0.0] * values.shape[1]
    weights = np.exp(scores[seen] - scores[seen].max())
    return (weights @ values[seen] / weights.sum()).tolist()


def _two_tiles_oracle(scores1: Any, values1: Any, scores2: Any, values2: Any) -> Any:
    return _softmax_oracle(np.concatenate([scores1, scores2]), np.concatenate([values1, values2]))


def _tiles(scores1: list[float], scores2: list[float], why: str = "") -> Case:
    n = len(scores1) + len(scores2)
    values = np.arange(2.0 * n).reshape(n, 2)
    return Case(
        (np.array(scores1), values[: len(scores1)], np.array(scores2), values[len(scores1) :]), why
    )


def _tiles_grid() -> Iterator[Case]:
    yield _tiles([0.0, 0.0], [0.0, 0.0], "equal scores: the mean of all values")
    yield _tiles(
        [0.0, 1.0], [5.0, 2.0], "the second tile has the larger maximum: rescale what came before"
    )
    yield _tiles([5.0, 2.0], [0.0, 1.0], "the first tile has the larger maximum")
    yield _tiles([1000.0, 999.0], [998.0, 1001.0], "large scores: exp would overflow")
    yield _tiles([-1000.0, -999.0], [-998.0, -1001.0], "very small scores: exp would vanish")
    yield _tiles([1.0, -INF], [2.0, 3.0], "a masked key")
    yield _tiles([-INF, -INF], [2.0, 3.0], "the first tile is masked altogether: -inf minus -inf")
    yield _tiles([2.0, 3.0], [-INF, -INF], "the second tile is masked altogether")
    yield _tiles([-INF], [-INF], "every key is masked: the result is 0")
    yield _tiles([3.0], [1.0], "tiles of one key")


def _tiles_random(rng: np.random.Generator) -> Case:
    a, b = (rng.normal(size=int(rng.integers(1, 9))) * 10 for _ in range(2))
    a[rng.random(len(a)) < 0.2] = -INF
    b[rng.random(len(b)) < 0.2] = -INF
    return Case((a, rng.normal(size=(len(a), 3)), b, rng.normal(size=(len(b), 3))))


ONLINE = Exercise(
    id="05-online-softmax",
    title="The online softmax over two tiles",
    statement=(
        "`scores1` `[n1]` and `values1` `[n1, d]` are the first tile, then comes the second (NumPy arrays, float64). Return "
        "softmax(all scores) times all values, shape `[d]`, but look at one tile at a time: keep a running maximum `m`, a "
        "running sum `l` and an accumulator `acc`, and rescale them when the maximum grows. A score of -inf is a masked key; "
        "with no key left the result is 0. The check sees only the result, so one softmax over everything passes, too: the "
        "walk is on your word.\n\n"
        "Scores `[0, 0]` with values `[[2], [4]]` leave `m = 0`, `l = 2`, `acc = [6]`. Then the score `[1]` with value "
        "`[[10]]` raises `m` to 1, so both are first multiplied by e⁻¹ = 0.368: `l = 0.736 + 1`, `acc = [2.207 + 10]`, and the "
        "result is `[7.03]`."
    ),
    signature="def two_tiles(scores1: np.ndarray, values1: np.ndarray, scores2: np.ndarray, values2: np.ndarray) -> np.ndarray",
    worked=Case(
        tuple(map(np.array, ([0.0, 0.0], [[2.0], [4.0]], [1.0], [[10.0]]))), "the worked case"
    ),
    grid=_tiles_grid,
    random=_tiles_random,
    oracle=_two_tiles_oracle,
    judge=_judge_numbers,
    hints=(
        "Start with m = -inf, l = 0, acc = 0 and treat both tiles by the same four lines.",
        "m_new = max(m, tile max); the old l and acc are multiplied by exp(m - m_new).",
        "If m_new is still -inf, skip the tile: -inf minus -inf is NaN. At the end return acc / l, or 0 when l is 0.",
    ),
)

# ------------------------------------------------------------------------------------------------------ paged decode


def _paged_oracle(
    q: Any, k_pool: Any, v_pool: Any, pages: list[int], length: int, page_size: int
) -> Any:
    """Collect the keys and values of each head one slot at a time, then attend in float64."""
    heads, kv_heads, out = q.shape[0], k_pool.shape[1], []
    slots = [page * page_size + i for page in pages for i in range(page_size)][:length]
    for h in range(heads):
        g = h * kv_heads // heads
        keys = np.array([k_pool[s, g] for s in slots]).reshape(length, q.shape[1])
        values = np.array([v_pool[s, g] for s in slots]).reshape(length, q.shape[1])
        out.append(_softmax_oracle(keys @ q[h] / np.sqrt(q.shape[1]), values))
    return out


def _paged_case(
    seed: int, length: int, page_size: int, heads: int = 2, kv_heads: int = 1, why: str = ""
) -> Case:
    rng = np.random.default_rng(seed)
    d, pages = 4, (rng.permutation(9) + 1)[: -(-length // page_size)].tolist()
    k, v = (np.full((10 * page_size, kv_heads, d), np.nan) for _ in range(2))
    for slot in [page * page_size + i for page in pages for i in range(page_size)][:length]:
        k[slot], v[slot] = rng.normal(size=(2, kv_heads, d))
    return Case((rng.normal(size=(heads, d)), k, v, pages, length, page_size), why)


def _paged_grid() -> Iterator[Case]:
    yield _paged_case(1, 1, 4, why="one token: its own value")
    yield _paged_case(2, 3, 4, why="one token fewer than a page; the rest of the page holds NaN")
    yield _paged_case(3, 4, 4, why="exactly a page")
    yield _paged_case(4, 5, 4, why="one token in the second page")
    yield _paged_case(5, 5, 1, why="page size 1")
    yield _paged_case(6, 9, 4, heads=4, kv_heads=2, why="four query heads share two KV heads")
    yield _paged_case(7, 0, 4, why="no token at all: zeros")


PAGED_DECODE = Exercise(
    id="05-paged-decode",
    title="Decode through a page table",
    statement=(
        "`q` `[heads, d]` is one new query; `k_pool`, `v_pool` `[slots, kv_heads, d]` are the pools of everybody (NumPy arrays, "
        "float64); `pages` is the request's page table row, a list, and `length` its number of tokens. Return the attention "
        "output `[heads, d]` with scale 1/sqrt(d). Query heads share KV heads in groups: head h reads KV head h * kv_heads // heads. "
        "Slots that hold no token of this request may contain anything, NaN included. No tokens: zeros."
    ),
    signature="def paged_decode(q: np.ndarray, k_pool: np.ndarray, v_pool: np.ndarray, pages: list[int], length: int, page_size: int) -> np.ndarray",
    worked=_paged_case(0, 6, 4, why="the worked case: six tokens in two pages"),
    grid=_paged_grid,
    random=lambda rng: _paged_case(
        int(rng.integers(1 << 30)),
        int(rng.integers(1, 20)),
        int(rng.choice([4, 8])),
        heads=2 * (groups := int(rng.integers(1, 3))),
        kv_heads=groups,
    ),
    oracle=_paged_oracle,
    parts=[[f"head {i}" for i in range(4)]],
    judge=_judge_numbers,
    rounds=20,
    hints=(
        "First list the slots of the request's tokens, in order (exercise 04-slots-of).",
        "k_pool[slots] gathers them: [length, kv_heads, d]. Cut to `length` before you compute anything.",
        "For each head h: scores = k[:, g] @ q[h] / sqrt(d), softmax, times v[:, g], with g = h * kv_heads // heads.",
    ),
)

EXERCISES = [ONLINE, PAGED_DECODE]
