"""Notebook 05: solutions and known wrong answers."""

from __future__ import annotations

import numpy as np

from minikv.lessons.engine import Mistake


def _online(tiles, d, rescale=True, guard=True, shift=True, zero=True):
    m, total, acc = -np.inf, 0.0, np.zeros(d)
    with np.errstate(all="ignore"):
        for scores, values in tiles:
            new = max(m, scores.max()) if shift else 0.0
            if guard and new == -np.inf:
                continue
            scale = np.exp(m - new) if rescale and shift else 1.0
            p = np.exp(scores - new)
            total, acc, m = total * scale + p.sum(), acc * scale + p @ values, new
        return acc / total if total or not zero else np.zeros(d)


def two_tiles(scores1, values1, scores2, values2):
    return _online([(scores1, values1), (scores2, values2)], values1.shape[1])


def _tiles_no_rescale(scores1, values1, scores2, values2):
    return _online([(scores1, values1), (scores2, values2)], values1.shape[1], rescale=False)


def _tiles_no_shift(scores1, values1, scores2, values2):
    return _online([(scores1, values1), (scores2, values2)], values1.shape[1], shift=False)


def _tiles_no_guard(scores1, values1, scores2, values2):
    return _online([(scores1, values1), (scores2, values2)], values1.shape[1], guard=False)


def _tiles_average(scores1, values1, scores2, values2):
    parts = [_online([tile], values1.shape[1]) for tile in ((scores1, values1), (scores2, values2))]
    return (parts[0] * len(scores1) + parts[1] * len(scores2)) / (len(scores1) + len(scores2))


def _decode(q, k_pool, v_pool, slots, group, scale=True):
    out = np.zeros(q.shape)
    if len(slots):
        for h in range(len(q)):
            g = group(h)
            scores = k_pool[slots, g] @ q[h] / (np.sqrt(q.shape[1]) if scale else 1.0)
            out[h] = _online([(scores, v_pool[slots, g])], q.shape[1])
    return out


def _slots(pages, length, page_size):
    return [pages[t // page_size] * page_size + t % page_size for t in range(length)]


def paged_decode(q, k_pool, v_pool, pages, length, page_size):
    slots = _slots(pages, length, page_size)
    return _decode(q, k_pool, v_pool, slots, lambda h: h * k_pool.shape[1] // len(q))


def _decode_whole_pages(q, k_pool, v_pool, pages, length, page_size):
    slots = _slots(pages, len(pages) * page_size, page_size)
    return _decode(q, k_pool, v_pool, slots, lambda h: h * k_pool.shape[1] // len(q))


def _decode_round_robin(q, k_pool, v_pool, pages, length, page_size):
    return _decode(
        q, k_pool, v_pool, _slots(pages, length, page_size), lambda h: h % k_pool.shape[1]
    )


def _decode_drops_last(q, k_pool, v_pool, pages, length, page_size):
    slots = _slots(pages, max(length - 1, 0), page_size)
    return _decode(q, k_pool, v_pool, slots, lambda h: h * k_pool.shape[1] // len(q))


def _decode_no_scale(q, k_pool, v_pool, pages, length, page_size):
    slots = _slots(pages, length, page_size)
    return _decode(q, k_pool, v_pool, slots, lambda h: h * k_pool.shape[1] // len(q), scale=False)


SOLUTIONS = {"05-online-softmax": two_tiles, "05-paged-decode": paged_decode}
MISTAKES = {
    "05-online-softmax": [
        Mistake(
            "the sum and the accumulator are not rescaled when the maximum grows", _tiles_no_rescale
        ),
        Mistake("without subtracting the maximum, exp overflows or vanishes", _tiles_no_shift),
        Mistake(
            "a tile that is masked altogether makes -inf minus -inf, which is NaN", _tiles_no_guard
        ),
        Mistake(
            "the two tiles' results are averaged by their sizes, not by their sums of exponentials",
            _tiles_average,
        ),
    ],
    "05-paged-decode": [
        Mistake(
            "the last page is read to its end; slots past the length hold anything",
            _decode_whole_pages,
        ),
        Mistake(
            "query heads of a group are neighbours: head h reads KV head h * kv_heads // heads",
            _decode_round_robin,
        ),
        Mistake("the newest token is not attended to", _decode_drops_last),
        Mistake("the scores are not divided by sqrt(d)", _decode_no_scale),
    ],
}
