"""Exercises of notebook 01: one step with a cache, and what a broken cache looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.compare import first_difference
from minikv.lessons.engine import Case, Exercise

Matrix = Any


def _attend(query: Any, keys: Any, values: Any) -> Any:
    """Plain softmax attention of one query in float64."""
    scores = (
        np.asarray(keys, dtype=np.float64)
        @ np.asarray(query, dtype=np.float64)
        / np.sqrt(len(query))
    )
    weights = np.exp(scores - scores.max())
    return weights @ np.asarray(values, dtype=np.float64) / weights.sum()


def _requests_oracle(requests: list[Matrix], wq: Matrix, wk: Matrix, wv: Matrix) -> list[list[Any]]:
    """The full forward of every request at once: no cache, every position sees all positions up to
    itself."""
    outputs = []
    for tokens in requests:
        q, k, v = tokens @ wq, tokens @ wk, tokens @ wv
        outputs.append([_attend(q[t], k[: t + 1], v[: t + 1]).tolist() for t in range(len(tokens))])
    return outputs


def _run_steps(
    function: Any, requests: list[Matrix], wq: Matrix, wk: Matrix, wv: Matrix
) -> list[list[Any]]:
    """Feed each request token by token, with an empty cache of its own."""
    outputs = []
    for tokens in requests:
        cache: dict[str, list[Any]] = {"k": [], "v": []}
        outputs.append([np.asarray(function(x, cache, wq, wk, wv)).tolist() for x in tokens])
    return outputs


def _judge_steps(case: Case, expected: Any, got: Any) -> str | None:
    for r, (want, have) in enumerate(zip(expected, got, strict=False)):
        for t, (a, b) in enumerate(zip(want, have, strict=False)):
            problem = first_difference(a, b, where=f"request {r + 1}, position {t}: the output")
            if problem:
                return problem
    return None


def _weights(rng: np.random.Generator, d: int) -> tuple[Matrix, Matrix, Matrix]:
    wq, wk, wv = (rng.integers(-2, 3, (d, d)).astype(float) for _ in range(3))
    return wq, wk, wv


def _steps_case(seed: int, lengths: list[int], d: int, why: str) -> Case:
    rng = np.random.default_rng(seed)
    requests = [rng.integers(-2, 3, (n, d)).astype(float) for n in lengths]
    return Case((requests, *_weights(rng, d)), why)


def _steps_grid() -> Iterator[Case]:
    yield _steps_case(1, [1], 4, "one token sees only itself")
    yield _steps_case(2, [2], 4, "the second token sees both")
    yield _steps_case(3, [5], 4, "every position of a longer request")
    yield _steps_case(4, [3, 4], 4, "a second request, which must not see the first")
    yield _steps_case(5, [3], 1, "head size 1")


STEP = Exercise(
    id="01-step",
    title="One step with a cache",
    statement=(
        "`x` is the new token's vector, shape `[d]`; `wq`, `wk`, `wv` are `[d, d]` and a projection is `x @ wq`. `cache` is "
        "`{'k': [], 'v': []}` of this request, empty before its first token. Add this token's k and v to the cache, and return "
        "the attention output of its q over the whole cache: softmax(q·k / sqrt(d)) times v. The check feeds whole requests "
        "token by token and compares every position with the full forward.\n\n"
        "With one token in the cache the softmax has one entry, so the first output is simply `x @ wv`."
    ),
    signature="def step(x: np.ndarray, cache: dict[str, list], wq: np.ndarray, wk: np.ndarray, wv: np.ndarray) -> np.ndarray",
    worked=_steps_case(0, [2], 2, "the worked case"),
    grid=_steps_grid,
    random=lambda rng: _steps_case(
        int(rng.integers(1 << 30)),
        rng.integers(1, 7, int(rng.integers(1, 4))).tolist(),
        int(rng.choice([2, 4, 8])),
        "",
    ),
    oracle=_requests_oracle,
    run=_run_steps,
    judge=_judge_steps,
    parts=[[f"request {i}," for i in range(1, 5)], [f"position {i}" for i in range(8)]],
    rounds=20,
    hints=(
        "Project first, append second, attend third. Does the new token see itself?",
        "keys = np.stack(cache['k']) has one row per token so far, the new one included.",
        "s = keys @ q / sqrt(d); w = exp(s - s.max()); return w @ values / w.sum().",
    ),
)

# -------------------------------------------------------------------------------------------- which token is missing


def _missing_oracle(query: Any, keys: Any, values: Any, output: Any) -> int | None:
    n = len(keys)
    if np.allclose(_attend(query, keys, values), output, atol=1e-6):
        return None
    for j in range(n):
        rest = [i for i in range(n) if i != j]
        if rest and np.allclose(_attend(query, keys[rest], values[rest]), output, atol=1e-6):
            return j
    return None


def _missing_case(seed: int, n: int, dropped: int | None, why: str) -> Case:
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=4), rng.normal(size=(n, 4)), rng.normal(size=(n, 4))
    rest = [i for i in range(n) if i != dropped]
    return Case((q, k, v, _attend(q, k[rest], v[rest])), why)


def _missing_grid() -> Iterator[Case]:
    yield _missing_case(1, 4, None, "a healthy cache")
    yield _missing_case(2, 4, 3, "the newest token is missing")
    yield _missing_case(3, 4, 1, "a token in the middle is missing")
    yield _missing_case(4, 2, 0, "two tokens, the first is missing")
    yield _missing_case(5, 1, None, "a single token")


MISSING = Exercise(
    id="01-missing-token",
    title="Find the token that the cache lost",
    statement=(
        "A cache has a bug: one token's k and v were never stored, so attention ran over the others. Given the query, all keys "
        "and values that should be there (`[n, d]`) and the output that came, return the index of the lost token, or None if "
        "none is lost.\n\n"
        "With two equal keys the weights are 1/2 each. If the values are `[2.0]` and `[6.0]`, the right output is `[4.0]`; an "
        "output of `[6.0]` means that token 0 was lost. A cache that drops token 0 is the classic: the text stays fluent, and "
        "drifts."
    ),
    signature="def lost_token(query: np.ndarray, keys: np.ndarray, values: np.ndarray, output: np.ndarray) -> int | None",
    worked=_missing_case(0, 3, 0, "the worked case: token 0 is missing"),
    grid=_missing_grid,
    random=lambda rng: _missing_case(
        int(rng.integers(1 << 30)),
        n := int(rng.integers(2, 9)),
        None if rng.random() < 0.2 else int(rng.integers(n)),
        "",
    ),
    oracle=_missing_oracle,
    hints=(
        "What would the output be if token j were missing? Try each j.",
        "Check the full cache first: then nothing is lost.",
        "np.delete(keys, j, axis=0) removes a row; compare with np.allclose.",
    ),
)

EXERCISES = [STEP, MISSING]
