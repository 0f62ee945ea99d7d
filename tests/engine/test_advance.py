"""The inputs of a step turned into those of the next: kernel, twin, and a plain model of both; then
a normal load."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import CUDA

from minikv.engine.advance import NAMES, advance, advance_torch, advance_triton
from minikv.engine.step import decode_buffers
from minikv.graphs import CudaGraphRunner
from minikv.kernels.triton import HAVE_TRITON
from minikv.memory import PagedAllocator, RequestTable

POISON, CONTEXT = -77, 40


def inputs_of(
    rows: list[int], lens: list[int], size: int, most: int, device: str
) -> tuple[dict, dict, torch.Tensor]:
    """Buffers of `most` rows for these requests padded to `size`, all else poisoned: views, whole
    buffers, table."""
    padded = [*lens, *[1] * (size - len(rows))]
    indptr = [sum(padded[:j]) for j in range(size + 1)]
    zeros = [0] * (size - len(rows))
    slots = [100 * row + n for row, n in zip(rows, lens, strict=True)]
    values = (
        [7 + i for i in range(len(rows))] + zeros,
        [n - 1 for n in lens] + zeros,
        rows + zeros,
        padded,
        indptr,
    )
    made = {
        name: torch.tensor([*value, *[POISON] * (most - size)], device=device)
        for name, value in zip(NAMES, (*values, slots + zeros), strict=True)
    }
    table = torch.full((max(rows) + 1, CONTEXT), POISON, dtype=torch.int32, device=device)
    return {name: t[: size + (name == "kv_indptr")] for name, t in made.items()}, made, table


def modelled(
    whole: dict, table: torch.Tensor, tokens: list[int], n: int, size: int, slots: list[int] | None
):
    """What must be there afterwards, in plain Python."""
    want, cells = {name: t.tolist() for name, t in whole.items()}, table.tolist()
    for i in range(n):
        length = want["seq_lens"][i]
        want["token_ids"][i] = max(tokens[i], 0)
        want["positions"][i], want["seq_lens"][i] = length, length + 1
        want["out_slots"][i] = want["out_slots"][i] + 1 if slots is None else slots[i]
        cells[want["rows"][i]][length] = want["out_slots"][i]
    want["kv_indptr"][: size + 1] = [sum(want["seq_lens"][:j]) for j in range(size + 1)]
    return want, cells


@pytest.mark.parametrize(
    ("n", "size", "most"),
    [(1, 1, 1), (1, 1, 9), (3, 4, 9), (4, 4, 4), (255, 256, 300), (300, 300, 301)],
)
@pytest.mark.parametrize("way", [advance_triton, advance_torch], ids=["triton", "torch"])
def test_everything_moves_by_one_and_nothing_else_does(way, n, size, most, device) -> None:
    draw = random.Random(n)
    rows = draw.sample(range(1, 400), n)
    views, whole, table = inputs_of(
        rows, [draw.randrange(1, CONTEXT - 3) for _ in rows], size, most, device
    )
    for step in range(3):
        tokens = [draw.choice([-1, 0, 5, 300]) for _ in range(size)]
        slots = [draw.randrange(16, 2**31) for _ in rows] if step == 1 else None
        want, cells = modelled(whole, table, tokens, n, size, slots)
        given = None if slots is None else torch.tensor(slots, device=device)
        way(views, torch.tensor(tokens, device=device), table, n, given)
        assert {name: t.tolist() for name, t in whole.items()} == want
        assert table.tolist() == cells


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_slots_over_many_pages_are_those_of_the_allocator(page_size, device) -> None:
    """Steps that begin no page call no allocator; its next answer fits what they wrote."""
    allocators = [PagedAllocator(120, page_size, device) for _ in range(2)]
    prefix, lens = torch.tensor([0, 0, 0]), torch.tensor([1, 4, 6])
    nothing, ends = torch.full((3,), -1, device=device), (lens.cumsum(0) - 1).to(device)
    last, plain = (a.alloc_extend(prefix, lens, nothing, 11)[ends] for a in allocators)  # type: ignore[index]
    views, _, table = inputs_of([2, 5, 3], lens.tolist(), 4, 6, device)
    views["out_slots"][:3] = last
    tokens, way = (
        torch.zeros(4, dtype=torch.int64, device=device),
        advance if device == "cuda" else advance_triton,
    )
    for _ in range(9):
        lens, opens = lens + 1, bool((lens % page_size == 0).any())
        slots = allocators[0].alloc_decode(lens, views["out_slots"][:3]) if opens else None
        way(views, tokens, table, 3, slots)
        plain = allocators[1].alloc_decode(lens, plain)
        assert plain is not None
        assert views["out_slots"].tolist() == [*plain.tolist(), 0]
        assert [
            table[r, n].item() for r, n in zip((2, 5, 3), (lens - 1).tolist(), strict=True)
        ] == plain.tolist()
        assert allocators[0].available_size() == allocators[1].available_size()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_b77_a_load_after_steps_that_followed_leaves_nothing_of_them(where) -> None:
    table = RequestTable(9, CONTEXT, where)

    def load(runner: CudaGraphRunner, lens: list[int]) -> None:
        n = len(lens)
        seq_lens, rows = torch.tensor(lens), torch.arange(1, n + 1)
        batch = {
            "token_ids": rows + 50,
            "positions": seq_lens - 1,
            "rows": rows,
            "seq_lens": seq_lens,
        }
        runner(batch | {"out_slots": (rows + 20).to(where)})

    def prepare(host: dict, size: int) -> None:
        torch.cumsum(host["seq_lens"], 0, out=host["kv_indptr"][1:])

    runners = [
        CudaGraphRunner(
            lambda inputs, variant: inputs["token_ids"] + inputs["seq_lens"],
            decode_buffers(9, torch.device(where)), [1, 2, 4, 9], prepare=prepare, debug=True, progress=False,
        )
        for _ in range(2)
    ]  # fmt: skip
    for lens in ([5, 3, 8], [2], [9, 9], [4, 4, 4, 4, 4, 4, 4], [6, 1, 2, 3]):
        for runner in runners:
            load(runner, lens)
        size = runners[0].bucket(len(lens)) or 0
        views = [runner.views(size, "greedy") for runner in runners]
        for name in views[0]:
            assert torch.equal(views[0][name], views[1][name]), name
        tokens = torch.arange(3, 3 + size, device=where)
        for step in range(1, 4):
            advance(views[0], tokens, table.table, len(lens), None)
            out = runners[0].again("greedy", len(lens), views[0], size)
            got = [int(n) + step + int(t) for n, t in zip(lens, tokens, strict=False)]
            assert out.tolist() == [*got, *[1] * (size - len(lens))], (
                "padding is token 0 of a request of 1"
            )
    assert runners[0].stats.replays == 4 * runners[1].stats.replays == 20


@pytest.mark.skipif(
    CUDA or not HAVE_TRITON, reason="compiled here by every other test, or Triton is not installed"
)
def test_the_kernel_compiles() -> None:
    from compile_check import compile_cases

    assert all(report["spill_bytes"] == 0 for report in compile_cases("graphs", match="advance"))
