"""The request table hands out rows once, keeps row 0 zero and refuses to write outside."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minikv.errors import ArgumentError, StateError
from minikv.memory import PagedAllocator, RequestTable
from minikv.prefix import RadixCache


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request) -> str:
    return request.param


def test_rows_are_handed_out_and_come_back(where) -> None:
    t = RequestTable(3, 8, device=where)
    assert t.table.shape == (4, 8)
    assert t.table.dtype == torch.int32
    assert t.alloc(0) == []
    assert t.alloc(2) == [1, 2]
    assert t.alloc(2) is None
    assert t.available_size() == 1, "nothing is taken when there are too few"
    assert t.alloc(1) == [3]
    t.free([3, 1])
    assert t.alloc(2) == [1, 3]
    t.free(2)
    assert t.available_size() == 1


@pytest.mark.parametrize("rows", [[0], [4], [-1], [2], [1, 1], [1, 2]])
def test_freeing_a_row_that_is_not_in_use_raises_and_frees_nothing(rows) -> None:
    t = RequestTable(3, 8)
    t.alloc(2)
    t.free([2])
    with pytest.raises(ArgumentError, match="not in use"):
        t.free(rows)
    assert t.available_size() == 2


def test_writes_land_where_the_lengths_say(where) -> None:
    draw = random.Random(3)
    t = RequestTable(5, 20, device=where)
    want = [[0] * 20 for _ in range(6)]
    rows = t.alloc(5)
    for _ in range(10):
        draw.shuffle(rows)
        chosen = rows[: draw.randrange(1, 6)]
        start = [draw.randrange(21) for _ in chosen]
        stop = [draw.randrange(s, 21) for s in start]
        slots = [draw.randrange(1, 1000) for _ in range(sum(stop) - sum(start))]
        given = iter(slots)
        for row, a, b in zip(chosen, start, stop, strict=True):
            want[row][a:b] = [next(given) for _ in range(b - a)]
        t.write(
            chosen, torch.tensor(start), stop, torch.tensor(slots, dtype=torch.int64, device=where)
        )
        assert t.table.tolist() == want
    assert not t.table[0].any()


@pytest.mark.parametrize(
    ("rows", "start", "stop", "count", "message"),
    [
        ([1], [6], [9], 3, "seq_lens=9.*columns 0 to 8"),
        ([1], [-1], [1], 2, "row 1"),
        ([1], [3], [2], 0, "row 1"),
        ([0], [0], [1], 1, "rows=0.*not in use"),
        ([2], [0], [1], 1, "rows=2.*not in use"),
        ([1], [0], [2], 3, "slots"),
        ([1, 1], [0], [2], 2, "rows"),
    ],
)
def test_wrong_writes_raise_and_write_nothing(rows, start, stop, count, message) -> None:
    t = RequestTable(2, 8)
    t.alloc(1)
    with pytest.raises(ArgumentError, match=message):
        t.write(rows, start, stop, torch.ones(count, dtype=torch.int64))
    assert not t.table.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [1.5]}, "rows=.*1.5.*integers"),
        ({"seq_lens": [2.0]}, "seq_lens"),
        ({"prefix_lens": [[0], [0, 1]]}, "prefix_lens"),
        ({"rows": None}, "rows=None"),
        ({"slots": torch.tensor([4.0, 5.0])}, "slots"),
        ({"slots": [4, 5]}, r"slots=\[4, 5\]"),
        ({"slots": torch.tensor([4, 2**40 + 1])}, f"slots={2**40 + 1}"),
        ({"slots": torch.tensor([4, -(2**40)])}, f"slots={-(2**40)}"),
    ],
)
def test_plain_mistakes_are_named_and_write_nothing(change, message) -> None:
    t = RequestTable(2, 8)
    t.alloc(1)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        t.write(
            **{
                "rows": [1],
                "prefix_lens": [0],
                "seq_lens": [2],
                "slots": torch.tensor([4, 5]),
                **change,
            }
        )
    assert not t.table.any()


def test_rows_are_whole_numbers_of_any_kind() -> None:
    t = RequestTable(np.int64(5), 8)
    rows = t.alloc(np.int64(5))
    t.free(np.int64(1))
    t.free(np.array([2]))
    t.free(torch.tensor([3]))
    t.free(rows[3:])
    assert t.available_size() == 5
    t.free([])
    t.alloc(1)
    for bad in (1.0, [1.0], "1", None):
        with pytest.raises(ArgumentError, match="rows"):
            t.free(bad)
    for bad in (1.0, "1", None):
        with pytest.raises(ArgumentError, match="n="):
            t.alloc(bad)
        with pytest.raises(ArgumentError, match="max_context"):
            RequestTable(2, bad)


@pytest.mark.parametrize(
    ("rows", "lens", "message"),
    [
        ([1], [9], "lens=9: must be 0 to 8"),
        ([1], [-1], "lens=-1"),
        ([-1], [1], "rows=-1: must be 0 to 2"),
        ([1, 9], [1, 1], "rows=9"),
        ([1, 2], [1], "lens=1: lengths for 2 rows"),
        ([1.5], [1], "rows"),
        ([1], None, "lens=None"),
    ],
)
def test_last_slots_outside_the_table_are_refused(where, rows, lens, message) -> None:
    t = RequestTable(2, 8, device=where)
    t.write(t.alloc(2), [0, 0], [8, 8], torch.arange(1, 17, device=t.device))
    with pytest.raises(ArgumentError, match=f"^{message}"):
        t.last_slots(rows, lens)
    assert t.last_slots([1, 2, 0], [8, 1, 0]).tolist() == [8, 9, -1]


def test_debug_looks_at_values() -> None:
    t = RequestTable(2, 8, debug=True)
    t.alloc(1)
    with pytest.raises(ArgumentError, match="slots=0"):
        t.write([1], [0], [2], torch.tensor([5, 0]))
    t.table[0, 3] = 9
    with pytest.raises(StateError, match="row 0"):
        t.alloc(1)


def test_wrong_numbers() -> None:
    with pytest.raises(ArgumentError, match="max_requests"):
        RequestTable(0, 8)
    with pytest.raises(ArgumentError, match="max_context"):
        RequestTable(2, 0)
    with pytest.raises(ArgumentError, match="n=-1"):
        RequestTable(2, 8).alloc(-1)


def test_repr_and_notebook_picture() -> None:
    t = RequestTable(20, 8)
    assert repr(t) == "RequestTable(20 rows of 8 on cpu: 20 free)"
    t.alloc(10)
    assert repr(t) == "RequestTable(20 rows of 8 on cpu: 10 free, in use 1 2 3 4 5 6 7 8 …)"
    assert {"image/svg+xml", "text/plain"} == set(t._repr_mimebundle_())
    t.clear()
    assert t.available_size() == 20


def test_b06_rows_of_one_token_requests_come_back() -> None:
    """More short requests than rows, one after another and two at a time: no row is missing at the
    end."""
    t, a = RequestTable(2, 8), PagedAllocator(16, 4)
    for together in (1, 2):
        for _ in range(3):
            rows = t.alloc(together)
            assert rows is not None
            lens = torch.tensor([3] * together)
            slots = a.alloc_extend(lens * 0, lens, torch.full((together,), -1), 3 * together)
            t.write(rows, lens * 0, lens, slots)
            a.free(slots)
            t.free(rows)
    assert t.available_size() == 2
    assert a.available_size() == 16


def test_b10_a_window_reads_oldest_to_newest() -> None:
    """Window of 4 keys, so 3 past tokens: the list is a slice of the row and cannot be rotated or
    unwritten."""
    t, a = RequestTable(1, 16), PagedAllocator(16, 4)
    pool = torch.full((a.size + 4,), -1)
    (row,) = t.alloc(1)
    slots = a.alloc_extend(torch.tensor([0]), torch.tensor([2]), torch.tensor([-1]), 2)
    t.write([row], [0], [2], slots)
    pool[slots] = torch.arange(2)
    for n in range(2, 8):
        kept = pool[t.table[row, max(0, n - 3) : n].long()]
        assert kept.tolist() == [*range(max(0, n - 3), n)]
        slot = a.alloc_decode(torch.tensor([n + 1]), t.table[row, n - 1 : n].long())
        t.write([row], [n], [n + 1], slot)
        pool[slot] = n


def test_last_slots_are_where_the_lengths_end(where) -> None:
    t = RequestTable(3, 4, device=where)
    rows = t.alloc(3)
    t.write(rows, [0, 0, 0], [4, 1, 0], torch.tensor([5, 6, 7, 8, 9], device=where))
    assert t.last_slots(rows, torch.tensor([4, 1, 0])).tolist() == [8, 9, -1]
    assert t.last_slots(torch.tensor(rows[:2]), [2, 1]).tolist() == [6, 9]
    assert t.last_slots([], []).tolist() == []


def test_the_end_of_a_row_is_known_however_it_was_filled() -> None:
    t = RequestTable(2, 8)
    a, b = t.alloc(2)
    assert (t.end(a), t.end(a, 3)) == (0, 3)
    t.write([a], [0], [5], torch.arange(4, 9))
    t.table[b, :3] = torch.tensor([12, 13, 14])
    assert (t.end(a), t.end(a, 2), t.end(a, 5), t.end(b)) == (5, 5, 5, 3)
    t.free([a])
    assert t.alloc(1) == [a]
    assert t.end(a) == 0


@pytest.mark.gpu
def test_the_end_of_a_written_row_is_known_without_waiting() -> None:
    t = RequestTable(2, 8, device="cuda")
    a, b = t.alloc(2)
    t.write([a, b], [0, 0], [5, 2], torch.arange(4, 11, device="cuda"))
    t.write([a], [5], [6], torch.arange(11, 12, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert (t.end(a), t.end(a, 3), t.end(b, 2)) == (6, 6, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    t.free([b])
    assert t.alloc(1) == [b]
    t.table[b, :3] = 7
    assert t.end(b) == 3


def test_p03_rejected_drafts_leave_a_row_and_their_pages_come_back_once() -> None:
    allocator, table = PagedAllocator(64, 4), RequestTable(2, 32)
    cache = RadixCache(4, allocator, table)
    (row,) = table.alloc(1)
    request = SimpleNamespace(
        token_ids=np.arange(7), computed=6, row=row, node=None, protected_len=0, namespace=None
    )
    node = cache.match_prefix([]).node
    cache.lock(node)
    request.node = node
    slots = allocator.alloc_extend(*map(torch.tensor, ([0], [6], [-1])), 6)
    table.write([row], [0], [6], slots)
    last = table.last_slots([row], [6])
    more = allocator.alloc_extend(torch.tensor([6]), torch.tensor([11]), last, 5)
    table.write([row], [6], [11], more)
    tail = table.truncate(row, 6)
    assert tail.tolist() == more.tolist()
    allocator.free(tail[-6 % 4 :])
    cache.cache_finished(request)
    assert allocator.available_size() + cache.evictable_size == 64
    cache.check(owned=())


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_shortened_row_goes_on_where_it_ends(page_size, where) -> None:
    allocator, table = PagedAllocator(64, page_size, where), RequestTable(2, 64, where)
    rows = table.alloc(2)
    for row, length in zip(rows, (20, 9), strict=True):
        none = torch.tensor([-1], device=where)
        slots = allocator.alloc_extend(torch.tensor([0]), torch.tensor([length]), none, length)
        table.write([row], [0], [length], slots)
    before = table.table.clone()
    assert table.truncate(rows[0], 20).numel() == 0
    left = table.truncate(rows[0], 5)
    assert torch.equal(left, before[rows[0], 5:20])
    assert torch.equal(table.table[rows[0], :5], before[rows[0], :5])
    assert not table.table[rows[0], 5:].any()
    assert torch.equal(table.table[rows[1]], before[rows[1]])
    assert (table.end(rows[0]), table.end(rows[1])) == (5, 9)
    table.write([rows[0]], [5], [7], left[:2])
    assert table.end(rows[0]) == 7


def test_only_rows_in_use_are_shortened_and_never_grow() -> None:
    table = RequestTable(2, 8)
    (row,) = table.alloc(1)
    table.write([row], [0], [3], torch.tensor([4, 5, 6]))
    for bad in (0, 2, 3, -1, "1"):
        with pytest.raises(ArgumentError, match="row"):
            table.truncate(bad, 1)
    for bad in (4, -1, 1.5):
        with pytest.raises(ArgumentError, match="length"):
            table.truncate(row, bad)
    assert table.table[row, :3].tolist() == [4, 5, 6]


def test_the_end_of_a_row_is_not_lowered_by_a_later_lower_write() -> None:
    table = RequestTable(2, 16)
    row, other = table.alloc(2)
    table.write([row], [0], [9], torch.arange(4, 13))
    table.write([other, row], [0, 2], [3, 4], torch.arange(20, 25))
    assert table.end(row) == 9
    table.device = torch.device("cuda")  # there the host's own count answers, as nothing is read
    assert (table.end(row), table.end(other), table.end(row, 12)) == (9, 3, 12)


@pytest.mark.parametrize("row", [9, -1, "1", 1.5])
def test_p08_rows_that_the_table_does_not_have_are_named(row) -> None:
    table = RequestTable(2, 8)
    with pytest.raises(ArgumentError, match=r"row=.*must be 0 to 2"):
        table.end(row)


def test_p20_negative_slots_are_refused_on_the_cpu_without_debug() -> None:
    table = RequestTable(2, 8)
    table.alloc(1)
    with pytest.raises(ArgumentError, match="slots=-1"):
        table.write([1], [0], [2], torch.tensor([5, -1]))
    assert not table.table.any()
