"""Slot lists and merging."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from cases import assert_close, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.attention import (
    build_kv_indices,
    build_unified_kv_indices,
    merge_states,
    reference_attention,
)
from minikv.errors import ArgumentError

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def _table(rows: int = 9, columns: int = 16) -> torch.Tensor:
    return torch.randperm(1000, dtype=torch.int32)[: rows * columns].view(rows, columns)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_p16_rows_beyond_the_table_are_refused(backend: str) -> None:
    """-1 would read the last row, or the memory before the table."""
    table, buffers = _table(), (torch.full((3,), -1), torch.full((9,), -1))
    for bad in (-1, table.shape[0]):
        rows, lens = torch.tensor([1, bad]), torch.tensor([2, 2])
        with pytest.raises(ArgumentError, match=rf"rows=.*{bad}.*rows of the table, 0\.\."):
            build_kv_indices(table, rows, lens, out=buffers, backend=backend)
        assert buffers[1].eq(-1).all()


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.randoms(use_true_random=False))
def test_lists_are_the_table_rows_end_to_end(lens: list[int], rnd) -> None:
    table, rows = _table(), rnd.sample(range(9), len(lens))
    want = [slot for row, n in zip(rows, lens, strict=True) for slot in table[row, :n].tolist()]
    indptr, indices = build_kv_indices(table, torch.tensor(rows), torch.tensor(lens))
    assert indices.tolist() == want
    assert indptr.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]


@pytest.mark.parametrize("lens", [[5, 0, 16], [0, 0], [3]])
def test_triton_lists_equal_torch(device: str, lens: list[int]) -> None:
    table, rows = _table().to(device), torch.tensor([4, 2, 8][: len(lens)])
    want = build_kv_indices(table, rows, torch.tensor(lens), backend="torch")
    got = build_kv_indices(table, rows, torch.tensor(lens), backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_lists_in_fixed_buffers(device: str, backend: str) -> None:
    table = _table().to(device)
    buffers = tuple(torch.full((n,), -1, dtype=torch.int64, device=device) for n in (5, 20))
    indptr, indices = build_kv_indices(
        table, torch.tensor([1, 3]), torch.tensor([2, 3]), out=buffers, backend=backend
    )
    assert (indptr.data_ptr(), indices.data_ptr()) == (buffers[0].data_ptr(), buffers[1].data_ptr())
    assert indices.tolist() == table[1, :2].tolist() + table[3, :3].tolist()
    assert buffers[1][5:].tolist() == [-1] * 15  # nothing written past the end


def test_b71_the_list_is_sized_by_the_lengths_that_fill_it() -> None:
    table, rows, lens = _table(), torch.tensor([1, 2]), torch.tensor([3, 2])
    assert build_kv_indices(table, rows, lens)[1].shape == (5,)
    lens += 4  # a verify step raises the lengths in place
    indptr, indices = build_kv_indices(table, rows, lens)
    assert indices.tolist() == table[1, :7].tolist() + table[2, :6].tolist()
    assert indptr.tolist() == [0, 7, 13]
    small = (torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="13"):
        build_kv_indices(table, rows, lens, out=small)
    assert small[1].tolist() == [0] * 5


def test_lengths_beyond_the_table_are_refused() -> None:
    for bad in (17, -1):
        with pytest.raises(ArgumentError, match="16 columns"):
            build_kv_indices(_table(), torch.tensor([1]), torch.tensor([bad]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_unified_lists(lengths: list[tuple[int, int]]) -> None:
    prefix, new = [p for p, _ in lengths], [n for _, n in lengths]
    case = make_case(prefix, new, index_dtype=torch.int64)
    bounds = pairwise(case.kv_indptr.tolist())
    extend = [
        case.kv_indices[start + p : stop] for (start, stop), p in zip(bounds, prefix, strict=True)
    ]
    got = build_unified_kv_indices(
        case.prefix_indptr, case.prefix_indices, case.qo_indptr, torch.cat(extend)
    )
    assert torch.equal(got[0], case.kv_indptr)
    assert torch.equal(got[1], case.kv_indices)
    assert torch.equal(got[2], case.prefix_lens)


def test_b68_merging_empty_results() -> None:
    zero, v, garbage = torch.zeros(1, 4), torch.arange(4.0)[None], torch.full((1, 4), torch.nan)
    none, one = torch.tensor([-math.inf]), torch.tensor([1.0])
    for a, b in ((zero, zero), (garbage, garbage)):
        o, lse = merge_states(a, none, b, none)
        assert torch.equal(o, zero)
        assert lse.item() == -math.inf
    for args in ((zero, none, v, one), (v, one, garbage, none)):
        o, lse = merge_states(*args)
        assert torch.equal(o, v)
        assert lse.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merging_two_halves_gives_the_whole(dtype: torch.dtype) -> None:
    case = make_case([7, 4, 0], [1, 1, 1], dtype=dtype)
    q, k_cache, v_cache, indptr, indices = case.decode_args()
    starts, halves = indptr.tolist(), []
    for side in (0, 1):  # even and odd entries of each list
        parts = [indices[a:b][side::2] for a, b in pairwise(starts)]
        bounds = torch.tensor([0, *torch.tensor([len(p) for p in parts]).cumsum(0).tolist()])
        o, lse = reference_attention(q, k_cache, v_cache, bounds, torch.cat(parts))
        halves += [o.to(dtype), lse.float()]
    o, lse = merge_states(*halves)
    want, want_lse = case.want_decode()
    assert o.dtype == dtype
    assert_close(o, want)
    assert_close(lse, want_lse)
