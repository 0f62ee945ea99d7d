"""Steps that continue the one before: inputs moved on by a kernel, slots noted by the step."""

from __future__ import annotations

import random

import pytest
import torch

from minikv import LLM, SamplingParams
from minikv.engine import tokens
from minikv.engine.tokens import NAMES, move_on

POISON, CONTEXT = -77, 40


@pytest.fixture(params=["torch", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request, monkeypatch) -> str:
    """PyTorch, the interpreted kernel, and the compiled one."""
    if request.param != "cuda":
        monkeypatch.setattr(tokens, "use_triton", lambda choice, device: request.param == "triton")
    return "cuda" if request.param == "cuda" else "cpu"


def inputs_of(rows: list[int], lens: list[int], size: int, most: int, device: str):
    """Buffers of `most` rows for these requests padded to `size`, all else poisoned: views, whole
    buffers, table."""
    padded = [*lens, *[1] * (size - len(rows))]
    zeros = [0] * (size - len(rows))
    slots = [100 * row + n for row, n in zip(rows, lens, strict=True)]
    values = {
        "token_ids": [7 + i for i in range(len(rows))] + zeros,
        "positions": [n - 1 for n in lens] + zeros,
        "rows": rows + zeros,
        "seq_lens": padded,
        "kv_indptr": [sum(padded[:j]) for j in range(size + 1)],
        "out_slots": slots + zeros,
    }
    made = {
        name: torch.tensor([*values[name], *[POISON] * (most - size)], device=device)
        for name in NAMES
    }
    table = torch.full((max(rows) + 1, CONTEXT), POISON, dtype=torch.int32, device=device)
    return {name: t[: size + (name == "kv_indptr")] for name, t in made.items()}, made, table


@pytest.mark.parametrize(
    ("n", "size", "most"),
    [(1, 1, 1), (1, 1, 9), (3, 4, 9), (4, 4, 4), (255, 256, 300), (300, 300, 301)],
)
def test_everything_moves_by_one_and_nothing_else_does(n, size, most, where) -> None:
    draw = random.Random(n)
    rows = draw.sample(range(1, 400), n)
    lens = [draw.randrange(1, CONTEXT - 3) for _ in rows]
    views, whole, table = inputs_of(rows, lens, size, most, where)
    for _ in range(3):
        want, cells = {name: t.tolist() for name, t in whole.items()}, table.tolist()
        for i in range(n):
            length = want["seq_lens"][i]
            want["token_ids"][i] = -1
            want["positions"][i], want["seq_lens"][i] = length, length + 1
            want["out_slots"][i] += 1
            cells[want["rows"][i]][length] = want["out_slots"][i]
        want["kv_indptr"][: size + 1] = [sum(want["seq_lens"][:j]) for j in range(size + 1)]
        move_on(views, n, table)
        assert {name: t.tolist() for name, t in whole.items()} == want
        assert table.tolist() == cells


PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=40, temperature=1.2, seed=3, ignore_eos=True),
    "stops": SamplingParams(max_tokens=40, temperature=1.5, seed=4, stop=["a", "e"]),
}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", PARAMS)
def test_a_runner_that_cannot_move_on_gets_the_batch_whole(kind, page_size, overlaps) -> None:
    """Rows that come, end and are aborted at other times; every slot is where it would be."""

    def run(moves_on: bool) -> list[list[int]]:
        llm = LLM("tiny", device="cpu", kv_tokens=600, page_size=page_size, max_requests=4)
        llm.scheduler.moves_on, llm.loop.overlaps = moves_on, overlaps
        outs = llm.generate([[i] * (3 + 2 * i) for i in range(1, 8)], PARAMS[kind])
        ids = [llm.add([9, 9, i], PARAMS[kind]) for i in range(3)]
        for _ in range(9):
            llm.step()
        llm.abort(ids[1])
        found: dict[int, list[int]] = {}
        while llm.has_work:
            for delta in llm.step():
                found.setdefault(delta.id, []).extend(delta.token_ids)
        llm.cache.check(owned=())
        assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
        return [o.token_ids for o in outs] + list(found.values())

    assert run(True) == run(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PARAMS)
def test_graphs_move_on_between_pages(kind) -> None:
    """Most steps of a page of 16 are moved on; tokens are those of steps that are loaded."""
    prompts = [list(range(1, 5 + i)) for i in range(5)]
    found = []
    for moves_on in (False, True):
        llm = LLM(
            "tiny", device="cuda", dtype="float32", kv_tokens=2048, graphs=True, progress=False
        )
        llm.scheduler.moves_on = moves_on
        calls, again = [], llm.runner.again
        llm.runner.again = lambda *a, again=again, calls=calls: calls.append(a) or again(*a)
        found.append([o.token_ids for o in llm.generate(prompts, PARAMS[kind])])
        assert len(calls) >= 10 if moves_on else not calls
        assert llm.runner.stats.eager == 0
        llm.cache.check(owned=())
    assert found[0] == found[1]
