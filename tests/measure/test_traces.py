"""Workloads are as documented, and the optimum is what a tree finds, or what trying everything
finds."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from minikv import LLM, SamplingParams
from minikv.errors import ArgumentError
from minikv.measure import traces
from minikv.measure.traces import WORDS, WORKLOADS, optimal_hits
from minikv.memory import PagedAllocator
from minikv.prefix import RadixCache

SMALL = {
    "few-shot": {
        "tasks": 2,
        "shots": 2,
        "questions": 6,
        "task_words": 9,
        "shot_words": 11,
        "question_words": 5,
    },
    "chat": {
        "chats": 5,
        "turns": 4,
        "system_words": 21,
        "user_words": (1, 9),
        "reply_words": (2, 12),
    },
    "tree-of-thought": {"problems": 2, "branching": 2, "problem_words": 13, "thought_words": 7},
    "rag": {
        "documents": 5,
        "questions": 20,
        "document_words": 19,
        "task_words": 4,
        "question_words": 3,
    },
}
PAGES = (1, 4, 16)


def small(name: str, seed: int = 0) -> list[traces.TraceRequest]:
    return WORKLOADS[name](seed, **SMALL[name])


def prompts(name: str, seed: int = 0) -> list[np.ndarray]:
    return [request.token_ids for request in small(name, seed)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_trace(name):
    first, again, other = small(name), small(name), small(name, seed=1)
    as_lists = lambda trace: [(r.token_ids.tolist(), r.max_tokens, r.group) for r in trace]  # noqa: E731
    assert as_lists(first) == as_lists(again)
    assert as_lists(first) != as_lists(other)
    for request in first:
        assert request.token_ids.dtype == np.int64
        assert request.token_ids.ndim == 1
        assert 0 <= request.token_ids.min() <= request.token_ids.max() < len(WORDS) <= 256
        assert request.max_tokens > 0


def test_shapes_are_as_documented():
    trace = small("few-shot")
    assert len(trace) == 2 * 6
    assert {r.token_ids.size for r in trace} == {1 + 9 + 2 * (2 + 11) + 2 + 5}
    head = 1 + 9 + 2 * (2 + 11)
    for group in (0, 1):
        mine = [r.token_ids for r in trace if r.group == group]
        assert len(mine) == 6
        assert all(np.array_equal(tokens[:head], mine[0][:head]) for tokens in mine)

    trace = small("chat")
    assert len(trace) == 5 * 4
    for chat in range(5):
        turns = [r for r in trace if r.group == chat]
        assert len(turns) == 4
        for before, after in pairwise(turns):
            assert np.array_equal(after.token_ids[: before.token_ids.size], before.token_ids)
            asked = after.token_ids.size - before.token_ids.size - before.max_tokens - 2
            assert 1 <= asked <= 9
            assert 2 <= before.max_tokens <= 12

    trace = small("tree-of-thought")
    assert [(r.group, r.token_ids.size) for r in trace] == [
        (problem, 1 + 13 + d * (1 + 7) + 1)
        for d in range(3)
        for problem in range(2)
        for _ in range(2 ** (d + 1))
    ]
    assert len({r.token_ids.tobytes() for r in trace}) == 2 * (1 + 2 + 4)

    trace = small("rag")
    assert len(trace) == 20
    assert {r.token_ids.size for r in trace} == {1 + 4 + 2 * (1 + 19) + 2 + 3}
    by_group = {r.group: r.token_ids[: 5 + 20].tobytes() for r in trace}
    assert all(r.token_ids[: 5 + 20].tobytes() == by_group[r.group] for r in trace)
    with pytest.raises(ArgumentError, match="per_question=6"):
        traces.rag(documents=5, per_question=6)


@pytest.mark.parametrize("name", WORKLOADS)
def test_text_of_a_shared_beginning_is_shared(name):
    for request in small(name)[:6]:
        for cut in (1, 5, request.token_ids.size - 1):
            assert request.text.startswith(traces.spell(request.token_ids[:cut]))
        words = request.text.replace(".", " .").split()
        assert words == [WORDS[i] for i in request.token_ids]


HAND = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [7], [1, 2, 3, 4, 5, 6]]


def test_hits_of_a_trace_by_hand():
    assert optimal_hits([], 4) == []
    assert optimal_hits(HAND, 1) == [0, 3, 5, 4, 0, 6]
    assert optimal_hits(HAND, 2) == [0, 2, 4, 4, 0, 6]
    assert optimal_hits(HAND, 4) == [0, 0, 4, 4, 0, 4]
    # the last token is always computed: of [1, 2, 3, 4] only 3 are looked up
    assert optimal_hits(HAND, 1, spare_last=True) == [0, 3, 5, 3, 0, 5]
    assert optimal_hits(HAND, 2, spare_last=True) == [0, 2, 4, 2, 0, 4]
    # Three pages of two: [9]'s page goes for [5, 6], which the last prompt wants again.
    assert optimal_hits(HAND, 2, 3) == [0, 2, 4, 4, 0, 6]
    # A and B by turns, and room for one: nothing helps; room for one and a half: the half that is
    # kept.
    turns = [[1, 1], [2, 2], [1, 1], [2, 2]]
    assert optimal_hits(turns, 1, 2) == [0, 0, 0, 0]
    assert optimal_hits(turns, 1, 3) == [0, 0, 1, 1]
    assert optimal_hits(turns, 1, 4) == [0, 0, 2, 2]
    with pytest.raises(ArgumentError, match="num_pages=2"):
        optimal_hits(HAND, 2, 2)


def longest_earlier_prefix(trace: list[np.ndarray], page: int) -> list[int]:
    """The definition, prompt against prompt and token by token."""
    found = []
    for i, tokens in enumerate(trace):
        best = 0
        for earlier in trace[:i]:
            n = 0
            while n < min(len(tokens), len(earlier)) and tokens[n] == earlier[n]:
                n += 1
            best = max(best, n // page * page)
        found.append(best)
    return found


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_cache_without_limit_finds_the_optimum(name, page):
    trace, tree = prompts(name), RadixCache(page)
    found = []
    for tokens in trace:
        found.append(tree.match_prefix(tokens).length)
        tree.insert(tokens)
    assert found == longest_earlier_prefix(trace, page) == optimal_hits(trace, page)
    assert tree.stats.hit_rate == sum(optimal_hits(trace, page)) / sum(map(len, trace))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_engine_finds_the_optimum_one_by_one(name):
    llm = LLM(
        "tiny",
        device="cpu",
        page_size=4,
        kv_tokens=8192,
        max_requests=1,
        policy="fcfs",
        graphs=False,
    )
    trace = prompts(name)
    outs = llm.generate(
        [tokens.tolist() for tokens in trace], SamplingParams(max_tokens=1, temperature=0)
    )
    assert [out.cached_tokens for out in outs] == optimal_hits(trace, 4, spare_last=True)


def best_of_all(trace: list[tuple[int, ...]], num_pages: int, spare_last: bool) -> int:
    """The most hit pages of any choice whatsoever (pages of one token): after each prompt keep any
    set that fits."""

    @cache
    def best(time: int, held: frozenset) -> int:
        if time == len(trace):
            return 0
        chain = [trace[time][: i + 1] for i in range(len(trace[time]))]
        looked = chain[: len(chain) - spare_last]
        hit = next((i for i, page in enumerate(looked) if page not in held), len(looked))
        others, room = sorted(held - set(chain)), num_pages - len(chain)
        kept = combinations(others, min(room, len(others)))
        return hit + max(best(time + 1, frozenset((*chain, *keep))) for keep in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("spare_last", [False, True])
def test_with_a_limit_nothing_finds_more(spare_last):
    rng = np.random.default_rng(1)
    paths = [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 4), (5,), (5, 6), (5, 6, 7)]
    for _ in range(60):
        trace = [paths[i] for i in rng.integers(0, len(paths), 9)]
        assert sum(optimal_hits(trace, 1, 4, spare_last=spare_last)) == best_of_all(
            trace, 4, spare_last
        )


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_policy_beats_the_limit(name, eviction):
    trace, page, pages = prompts(name), 4, 30
    pool = PagedAllocator(pages * page, page)
    tree = RadixCache(page, pool, eviction=eviction)
    for tokens in trace:
        tokens = tokens[: tokens.size // page * page]
        match = tree.match_prefix(tokens)
        tree.lock(match.node)
        tree.evict(max(0, tokens.size - match.length - pool.available_size()))
        tree.insert(tokens, torch.cat([match.slots, pool.alloc(tokens.size - match.length)]))
        tree.unlock(match.node)
    limit, endless = sum(optimal_hits(trace, page, pages)), sum(optimal_hits(trace, page))
    assert 0 < tree.stats.hit_tokens <= limit <= endless
