"""Notebook 01: solutions and known wrong answers."""

from __future__ import annotations

import numpy as np

from minikv.lessons.engine import Mistake


def _attend(q, keys, values, scale=True, stable=True):
    keys, values = np.asarray(keys), np.asarray(values)
    scores = keys @ q / (np.sqrt(len(q)) if scale else 1.0)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def step(x, cache, wq, wk, wv):
    cache["k"].append(x @ wk)
    cache["v"].append(x @ wv)
    return _attend(x @ wq, cache["k"], cache["v"])


def _step_attends_before_storing(x, cache, wq, wk, wv):
    keys, values = list(cache["k"]), list(cache["v"])
    cache["k"].append(x @ wk)
    cache["v"].append(x @ wv)
    return _attend(x @ wq, keys, values) if keys else x @ wv


def _step_drops_token_0(x, cache, wq, wk, wv):
    cache["k"].append(x @ wk)
    cache["v"].append(x @ wv)
    keys, values = cache["k"], cache["v"]
    return _attend(x @ wq, keys[1:], values[1:]) if len(keys) > 1 else x @ wv


# One store per weight matrix: shared by all requests of a case, as a global cache is shared by all
# requests of a model.
_SHARED: list[tuple] = []


def _step_shares_its_cache(x, cache, wq, wk, wv):
    store = next((kept for weights, kept in _SHARED if weights is wq), None)
    if store is None:
        store = {"k": [], "v": []}
        _SHARED[:] = [*_SHARED[-3:], (wq, store)]
    store["k"].append(x @ wk)
    store["v"].append(x @ wv)
    return _attend(x @ wq, store["k"], store["v"])


def _step_without_scale(x, cache, wq, wk, wv):
    cache["k"].append(x @ wk)
    cache["v"].append(x @ wv)
    return _attend(x @ wq, cache["k"], cache["v"], scale=False)


def lost_token(query, keys, values, output):
    if np.allclose(_attend(query, keys, values), output, atol=1e-6):
        return None
    for j in range(len(keys)):
        if np.allclose(
            _attend(query, np.delete(keys, j, 0), np.delete(values, j, 0)), output, atol=1e-6
        ):
            return j
    return None


def _lost_always_0(query, keys, values, output):
    return None if np.allclose(_attend(query, keys, values), output, atol=1e-6) else 0


def _lost_zeroes_the_row(query, keys, values, output):
    if np.allclose(_attend(query, keys, values), output, atol=1e-6):
        return None
    for j in range(len(keys)):
        v = values.copy()
        v[j] = 0
        if np.allclose(_attend(query, keys, v), output, atol=1e-6):
            return j
    return None


def _lost_never_none(query, keys, values, output):
    gaps = [
        np.abs(_attend(query, np.delete(keys, j, 0), np.delete(values, j, 0)) - output).max()
        if len(keys) > 1
        else 0.0
        for j in range(len(keys))
    ]
    return int(np.argmin(gaps))


SOLUTIONS = {"01-step": step, "01-missing-token": lost_token}
MISTAKES = {
    "01-step": [
        Mistake(
            "the new token must be in the cache before it attends: it sees itself",
            _step_attends_before_storing,
        ),
        Mistake("token 0 is never attended to", _step_drops_token_0),
        Mistake(
            "one cache is shared by all requests; use the cache that is passed",
            _step_shares_its_cache,
        ),
        Mistake("the scores are not divided by sqrt(d)", _step_without_scale),
    ],
    "01-missing-token": [
        Mistake("it is not always token 0", _lost_always_0),
        Mistake(
            "a missing token is absent from the softmax's sum too; zeroing its value leaves its weight",
            _lost_zeroes_the_row,
        ),
        Mistake("a healthy cache has lost nothing: return None", _lost_never_none),
    ],
}
