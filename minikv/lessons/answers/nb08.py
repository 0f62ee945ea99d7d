"""Notebook 08: solutions and known wrong answers."""

from __future__ import annotations

from itertools import accumulate

from minikv.lessons.engine import Mistake


def _slots(request, count, page_size):
    return [request["pages"][t // page_size] * page_size + t % page_size for t in range(count)]


def batch_arrays(requests, page_size):
    return {
        "qo_indptr": [0, *accumulate(r["new"] for r in requests)],
        "kv_indptr": [0, *accumulate(r["prefix"] for r in requests)],
        "kv_indices": [slot for r in requests for slot in _slots(r, r["prefix"], page_size)],
        "positions": [r["prefix"] + i for r in requests for i in range(r["new"])],
    }


def _without_zero(requests, page_size):
    arrays = batch_arrays(requests, page_size)
    return {**arrays, "qo_indptr": arrays["qo_indptr"][1:], "kv_indptr": arrays["kv_indptr"][1:]}


def _positions_from_zero(requests, page_size):
    return {
        **batch_arrays(requests, page_size),
        "positions": [i for r in requests for i in range(r["new"])],
    }


def _pages_not_slots(requests, page_size):
    pages = [r["pages"][t // page_size] for r in requests for t in range(r["prefix"])]
    return {**batch_arrays(requests, page_size), "kv_indices": pages}


def _new_tokens_too(requests, page_size):
    return {
        **batch_arrays(requests, page_size),
        "kv_indptr": [0, *accumulate(r["prefix"] + r["new"] for r in requests)],
        "kv_indices": [
            slot for r in requests for slot in _slots(r, r["prefix"] + r["new"], page_size)
        ],
    }


def best_order(prompts):
    return sorted(range(len(prompts)), key=prompts.__getitem__)


def _as_they_came(prompts):
    return list(range(len(prompts)))


def _longest_first(prompts):
    return sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))


def _by_first_token(prompts):
    return sorted(range(len(prompts)), key=lambda i: prompts[i][0])


SOLUTIONS = {"08-batch-arrays": batch_arrays, "08-best-order": best_order}
MISTAKES = {
    "08-batch-arrays": [
        Mistake("an indptr begins with 0 and has one entry more than requests", _without_zero),
        Mistake(
            "positions go on after the prefix; they do not start again at 0", _positions_from_zero
        ),
        Mistake("kv_indices holds slots, not page numbers", _pages_not_slots),
        Mistake(
            "kv_indices lists the prefix only; new tokens are passed beside it", _new_tokens_too
        ),
    ],
    "08-best-order": [
        Mistake("first come, first served lets families interrupt each other", _as_they_came),
        Mistake("the longest prompt first is not the longest shared prefix first", _longest_first),
        Mistake(
            "the first token alone does not keep families inside families together", _by_first_token
        ),
    ],
}
