"""The page allocator computes what plain lists compute, in every implementation."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from allocator_oracle import PlainAllocator, Requests
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.errors import ArgumentError, StateError
from minikv.memory import PagedAllocator
from minikv.memory import slots as kernels


def ints(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def listed(slots: torch.Tensor | None) -> list[int] | None:
    if slots is not None:
        assert slots.dtype == torch.int64
        assert slots.ndim == 1
    return None if slots is None else slots.tolist()


def extend(a: PagedAllocator, prefix, seq, last, dtype=torch.int64) -> list[int] | None:
    total = sum(seq) - sum(prefix)
    return listed(
        a.alloc_extend(
            ints(prefix), ints(seq), torch.tensor(last, dtype=dtype, device=a.device), total
        )
    )


def decode(a: PagedAllocator, seq, last) -> list[int] | None:
    return listed(a.alloc_decode(ints(seq), torch.tensor(last, dtype=torch.int64, device=a.device)))


def shuffled(a: PagedAllocator, plain: PlainAllocator) -> None:
    """Take everything and give it back in three portions, so that the free list is not
    ascending."""
    slots = a.alloc(a.size).tolist()
    plain.free_pages = []
    pages = list(range(1, a.num_pages + 1))
    random.Random(5).shuffle(pages)
    for part in range(3):
        give = [
            slots[(p - 1) * a.page_size + o]
            for p in sorted(pages[part::3])
            for o in range(a.page_size)
        ]
        a.free(torch.tensor(give, device=a.device))
        plain.free(give)
    same(a, plain)


def same(a: PagedAllocator, plain: PlainAllocator) -> None:
    assert a.free_pages.tolist() == plain.free_pages
    assert a.available_size() == len(plain.free_pages) * a.page_size
    held = a.page_is_held
    assert held[0]
    assert (~held).nonzero().flatten().tolist() == sorted(plain.free_pages)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_every_pair_of_prefix_and_extend(make, page_size: int) -> None:
    pairs = list(itertools.product(range(2 * page_size + 2), repeat=2))
    check_pairs(make, page_size, pairs)


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_random_pairs(make, page_size: int) -> None:
    draw = random.Random(page_size)
    sizes = [0, 1, page_size - 1, page_size, page_size + 1]
    pairs = [
        (
            draw.choice([*sizes, draw.randrange(2 * page_size + 1)]),
            draw.choice([*sizes, draw.randrange(2 * page_size + 1)]),
        )
        for _ in range(500)
    ]
    check_pairs(make, page_size, pairs)


def check_pairs(make, page_size: int, pairs: list[tuple[int, int]]) -> None:
    """All pairs in one batch: pages are there for the prefixes, then all are extended, then each
    decodes once."""
    need = sum(-(-(p + e) // page_size) + 1 for p, e in pairs)
    a, plain = make(need * page_size, page_size), PlainAllocator(need, page_size)
    shuffled(a, plain)
    requests = Requests(page_size, 0)
    pages = iter(
        a.alloc(sum(-(-p // page_size) for p, _ in pairs) * page_size).tolist()[::page_size]
    )
    for prefix, _ in pairs:
        mine = [next(pages) for _ in range(-(-prefix // page_size))]
        requests.slots.append([start + o for start in mine for o in range(page_size)][:prefix])
    plain.free_pages = a.free_pages.tolist()
    prefix = [p for p, _ in pairs]
    seq = [p + e for p, e in pairs]
    want = plain.alloc_extend(prefix, seq, requests.last())
    assert extend(a, prefix, seq, requests.last()) == want
    requests.grow([e for _, e in pairs], want)
    same(a, plain)
    seq = [n + 1 for n in seq]
    want = plain.alloc_decode(seq, requests.last())
    assert decode(a, seq, requests.last()) == want
    same(a, plain)


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 17, 300])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_batches(make, batch: int, page_size: int) -> None:
    draw = random.Random(batch)
    new = [draw.choice([0, 1, page_size, draw.randrange(2 * page_size + 1)]) for _ in range(batch)]
    need = sum(-(-n // page_size) + 1 for n in new) + 1
    a, plain = make(need * page_size, page_size), PlainAllocator(need, page_size)
    want = plain.alloc_extend([0] * batch, new, [-1] * batch)
    assert extend(a, [0] * batch, new, [-1] * batch, dtype=torch.int32) == want
    requests = Requests(page_size, 0)
    requests.slots = [[] for _ in new]
    requests.grow(new, want)
    for _ in range(2):
        seq, last = [n + 1 for n in requests.lengths()], requests.last()
        want = plain.alloc_decode(seq, last)
        assert decode(a, seq, last) == want
        if want is None:
            break
        requests.grow([1] * batch, want)
        same(a, plain)


def test_long_extend_spans_blocks_of_the_kernel(make) -> None:
    block = kernels.EXTEND_BLOCK
    a, plain = make(8 * block * 4, 4), PlainAllocator(8 * block, 4)
    shuffled(a, plain)
    seq = [block * 3 + 1, 2, block - 3, 0, 2 * block]
    want = plain.alloc_extend([0] * 5, seq, [-1] * 5)
    assert extend(a, [0] * 5, seq, [-1] * 5) == want


def test_programs_that_walk_several_blocks(make, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 2)
    test_long_extend_spans_blocks_of_the_kernel(make)


def test_strided_and_small_last_loc(make) -> None:
    a = make(64, 4)
    first = extend(a, [0, 0], [6, 5], [-1, -1])
    last = [first[5], first[10]]
    for dtype in (torch.int32, torch.int64):
        spread = torch.full((5,), 77, dtype=dtype, device=a.device)
        spread[1::2] = torch.tensor(last, dtype=dtype, device=a.device)
        state = a.backup()
        got = a.alloc_extend(ints([6, 5]), ints([9, 9]), spread[1::2], 7)
        assert listed(got) == [10, 11, 20, 17, 18, 19, 24]
        a.restore(state)
        got = a.alloc_extend(ints([6]), ints([9]), spread[1::4][:1], 3)
        assert listed(got) == [10, 11, 20], "one entry, whose stride is not 1"
        a.restore(state)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), page_size=st.sampled_from([1, 2, 3, 16]))
def test_random_walk_of_requests(seed: int, page_size: int) -> None:
    """Requests come, extend, decode and go until the pool is full and again, with undo and groups
    in between."""
    draw = random.Random(seed)
    a, plain = (
        PagedAllocator(12 * page_size, page_size, kernels="torch"),
        PlainAllocator(12, page_size),
    )
    requests = Requests(page_size, seed)
    for _ in range(30):
        what = draw.randrange(5)
        if what == 0:
            requests.slots.append([])
        elif what == 1:
            new = [draw.randrange(page_size * 2 + 1) for _ in requests.slots]
            prefix, last = requests.lengths(), requests.last()
            seq = [p + n for p, n in zip(prefix, new, strict=True)]
            state, before = a.backup(), list(plain.free_pages)
            want = plain.alloc_extend(prefix, seq, last)
            assert extend(a, prefix, seq, last) == want
            if want is not None and draw.random() < 0.3:
                a.restore(state)
                plain.free_pages = before
            elif want is not None:
                requests.grow(new, want)
        elif what == 2:
            seq, last = [n + 1 for n in requests.lengths()], requests.last()
            want = plain.alloc_decode(seq, last)
            assert decode(a, seq, last) == want
            if want is not None:
                requests.grow([1] * len(seq), want)
        elif what == 3 and requests.slots:
            gone = requests.slots.pop(draw.randrange(len(requests.slots)))
            a.free(ints(gone))
            plain.free(gone)
        elif requests.slots:
            with a.free_group():
                gone = requests.slots[:2]
                requests.slots = requests.slots[2:]
                for slots in gone:
                    a.free(ints(slots))
                assert a.available_size() == len(plain.free_pages) * page_size
            plain.free([s for slots in gone for s in slots])
        same(a, plain)
        live = [s for slots in requests.slots for s in slots]
        assert len(live) == len(set(live))


def test_fresh_allocator_hands_out_ascending_pages_and_never_page_0(make) -> None:
    a = make(12, 4)
    assert (a.num_pages, a.page_size, a.size, a.available_size()) == (3, 4, 12, 12)
    assert listed(a.alloc(8)) == [*range(4, 12)]
    assert listed(a.alloc(4)) == [*range(12, 16)]
    assert a.alloc(4) is None
    assert listed(a.alloc(0)) == []


def test_size_is_rounded_down_once() -> None:
    with pytest.warns(UserWarning, match="rounded down") as told:
        a = PagedAllocator(14, 4)
    assert len(told) == 1
    assert a.size == 12


def test_freed_pages_come_back_first_and_ascending(make) -> None:
    a = make(24, 4)
    slots = a.alloc(20)
    a.free(slots[12:16])
    a.free(slots[4:8])
    assert a.free_pages.tolist() == [2, 4, 6]
    with a.free_group():
        a.free(slots[16:20])
        with a.free_group():
            a.free(slots[8:12])
        assert a.available_size() == 12, "the outermost group is still open"
        assert not a.is_free([3, 5]).any()
    assert a.free_pages.tolist() == [3, 5, 2, 4, 6]
    assert a.is_free([0, 1, 3, 5]).tolist() == [False, False, True, True]


def test_group_copies_what_it_collects_and_applies_it_when_the_body_raises(make) -> None:
    a = make(16, 4)
    slots = a.alloc(12)
    view = slots[4:8]

    def body() -> None:
        with a.free_group():
            a.free(view)
            view.fill_(4)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert a.free_pages.tolist() == [2, 4]


def test_pages_are_counted_once_for_any_slots() -> None:
    a = PagedAllocator(16, 4)
    a.alloc(12)
    a.free(ints([13, 5, 15, 12]))
    assert a.free_pages.tolist() == [1, 3, 4]
    a.free([8])
    assert a.free_pages.tolist() == [2, 1, 3, 4]
    a.free(ints([]))
    a.free([])
    assert a.available_size() == 16


def test_tails_of_one_request_in_order_need_no_read_back(make) -> None:
    a = make(32, 4)
    slots = extend(a, [0], [10], [-1])
    a.free(
        torch.tensor(slots[4:], device=a.device, dtype=torch.int32)
    )  # two pages, the second partly used
    assert a.free_pages.tolist() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("slots", [[4], [0], [3], [16], [400], [-1], [8, 4]])
def test_wrong_frees_name_the_page_and_change_nothing(slots: list[int]) -> None:
    a = PagedAllocator(12, 4)
    held = a.alloc(12)
    a.free(held[:4])
    before = (a.free_pages.tolist(), a.page_is_held.tolist())
    wrong = next(s // 4 for s in slots if s // 4 != 2)
    with pytest.raises(ValueError, match=rf"page {wrong} "):
        a.free(slots)
    assert (a.free_pages.tolist(), a.page_is_held.tolist()) == before


def test_double_free_inside_a_group_is_told_at_once() -> None:
    a = PagedAllocator(12, 4)
    slots = a.alloc(8)
    with a.free_group():
        a.free(slots[:4])
        with pytest.raises(ValueError, match="page 1 is already free"):
            a.free(slots[:8])
    assert a.free_pages.tolist() == [1, 3]
    a.free(slots[4:])
    assert a.free_pages.tolist() == [2, 1, 3]


def test_restore_undoes_allocations(make) -> None:
    a = make(24, 4)
    a.free(a.alloc(12)[4:8])
    fresh = a.free_pages.tolist()
    state = a.backup()
    for _ in range(2):  # a state may be restored again
        first = extend(a, [0, 0], [5, 3], [-1, -1])
        a.restore(state)
        assert a.free_pages.tolist() == fresh
        assert a.is_free(fresh).all()
        assert extend(a, [0, 0], [5, 3], [-1, -1]) == first
        later = a.backup()
        a.restore(state)
    with pytest.raises(StateError, match="no longer reachable"):
        a.restore(later)


def test_states_nest(make) -> None:
    a = make(64, 4)
    outer = a.backup()
    first = listed(a.alloc(4))
    inner = a.backup()
    a.alloc(4)
    a.restore(inner)
    assert a.available_size() == 60
    again = listed(a.alloc(8))
    a.restore(inner)
    assert listed(a.alloc(8)) == again
    a.restore(outer)
    assert a.available_size() == 64
    with pytest.raises(StateError, match="no longer reachable"):
        a.restore(inner)
    newer = a.backup()
    assert listed(a.alloc(4)) == first
    a.restore(newer)
    a.restore(outer)
    assert a.available_size() == 64


def test_states_belong_to_their_allocator() -> None:
    a, b = PagedAllocator(16, 4), PagedAllocator(16, 4)
    for state in (b.backup(), None, 3):
        with pytest.raises(StateError, match="not a state of this allocator"):
            a.restore(state)


def test_an_allocation_that_fails_on_its_way_takes_no_page(make, monkeypatch) -> None:
    a = make(32, 4)
    before = a.free_pages.tolist()

    def fail(*_: object) -> None:
        raise MemoryError

    for name in ("extend_torch", "extend_triton", "decode_torch", "decode_triton"):
        monkeypatch.setattr(kernels, name, fail)
    for call in (lambda: a.alloc(8), lambda: decode(a, [1, 1], [-1, -1])):
        with pytest.raises(MemoryError):
            call()
        assert a.free_pages.tolist() == before
        assert a.is_free(before).all()


def test_restore_refuses_after_a_free(make) -> None:
    a = make(24, 4)
    slots = a.alloc(8)
    for free in (lambda: a.free(slots[:4]), a.clear):
        state = a.backup()
        free()
        with pytest.raises(StateError, match="freed since"):
            a.restore(state)
    state = a.backup()
    slots = a.alloc(4)
    with a.free_group():
        a.free(slots)
        with pytest.raises(StateError, match="freed since"):
            a.restore(state)


def test_clear_is_fresh(make) -> None:
    a = make(16, 4)
    slots = a.alloc(16)
    a.free(slots[8:12])
    with a.free_group():
        a.free(slots[:4])
        a.clear()
    assert a.free_pages.tolist() == [1, 2, 3, 4]
    assert not a.page_is_held[1:].any()
    assert listed(a.alloc(16)) == [*range(4, 20)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: extend(a, [5], [3], [-1]), "prefix_lens=5"),
        (lambda a: extend(a, [-4], [3], [-1]), "prefix_lens=-4"),
        (
            lambda a: a.alloc_extend(ints([0]), ints([3]), ints([-1]).to(a.device), 4),
            "extend_num_tokens=4.* 3",
        ),
        (
            lambda a: a.alloc_extend(ints([0, 0]), ints([3]), ints([-1]).to(a.device), 3),
            "prefix_lens",
        ),
        (lambda a: a.alloc_extend(ints([0]), ints([3]), ints([-1, 2]).to(a.device), 3), "last_loc"),
        (
            lambda a: a.alloc_extend(ints([0]).float(), ints([3]), ints([-1]).to(a.device), 3),
            "prefix_lens",
        ),
        (lambda a: decode(a, [0], [-1]), "seq_lens=0"),
        (lambda a: a.alloc(3), "num_tokens=3.*multiple of 4"),
        (lambda a: a.alloc(-4), "num_tokens=-4"),
        (lambda a: a.free(torch.zeros(2, device=a.device)), "slots"),
    ],
)
def test_wrong_calls_raise_before_anything_happens(make, monkeypatch, call, message) -> None:
    a = make(32, 4)
    a.alloc(4)
    count_launches(monkeypatch, forbid=True)
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        call(a)
    monkeypatch.undo()
    assert a.free_pages.tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_debug_names_a_last_loc_in_a_page_that_nobody_holds() -> None:
    a = PagedAllocator(16, 4, debug=True)
    held = a.alloc(8)
    gone = a.alloc(4)
    a.free(gone)
    for bad in (13, 17, 1, 401):  # freed, never handed out, padding's page, outside the pool
        for call in (
            lambda at: a.alloc_extend(ints([2]), ints([5]), ints([at]), 3),
            lambda at: a.alloc_decode(ints([3]), ints([at])),
        ):
            with pytest.raises(
                ArgumentError,
                match=rf"last_loc={bad}: of request 0 is in page {bad // 4}, which nobody",
            ):
                call(bad)
    assert a.available_size() == 8
    assert a.alloc_decode(ints([3]), held[1:2]).tolist() == [6]
    assert a.alloc_decode(ints([5]), ints([15])).tolist() == [12], (
        "a new page does not depend on the old one"
    )


def test_last_loc_that_does_not_fit_the_prefix_is_named() -> None:
    a = PagedAllocator(32, 4)
    with pytest.raises(ArgumentError, match="request 1 "):
        extend(a, [0, 3], [2, 5], [-1, 9])
    with pytest.raises(ArgumentError, match="request 0 "):
        decode(a, [3], [4])


def test_last_loc_outside_the_pool_is_named() -> None:
    a = PagedAllocator(64, 4)
    a.alloc(8)
    for bad, prefix in ((-2, 3), (-5, 4), (10**6 + 3, 4), (10**6, 1), (68, 5)):
        with pytest.raises(
            ArgumentError, match=f"last_loc={bad}: of request 0 is in page .* nobody holds"
        ):
            extend(a, [prefix], [prefix + 2], [bad])
        with pytest.raises(
            ArgumentError, match=f"last_loc={bad}: of request 0 is in page .* nobody holds"
        ):
            decode(a, [prefix + 1], [bad])
    assert a.available_size() == 56
    assert decode(a, [4], [66]) == [67], "the last page's last slot"


def test_pages_that_do_not_exist_are_named(make) -> None:
    a = make(16, 4)
    for bad in (-1, 5, 99):
        with pytest.raises(ArgumentError, match=f"pages={bad}"):
            a.is_free(bad)
        with pytest.raises(ArgumentError, match=f"pages={bad}"):
            a.is_free([1, bad])
    assert a.is_free(torch.tensor([[0, 1], [2, 4]], device=a.device)).tolist() == [
        [False, True],
        [True, True],
    ]
    assert a.is_free([]).tolist() == []


def test_lengths_may_be_lists_and_numbers_of_numpy(make) -> None:
    a = make(np.int64(64), np.int32(4))
    none = torch.tensor([-1, -1], device=a.device)
    assert listed(a.alloc_extend([0, 0], np.array([3, 2], np.int32), none, np.int64(5))) == [
        4,
        5,
        6,
        8,
        9,
    ]
    assert listed(a.alloc_decode([1, 1], none)) == [12, 16]
    assert listed(a.alloc(np.int64(4))) == [20, 21, 22, 23]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a, none: PagedAllocator(12.0, 4), "size=12.0"),
        (lambda a, none: PagedAllocator("12", 4), "size='12'"),
        (lambda a, none: PagedAllocator(None, 4), "size=None"),
        (lambda a, none: PagedAllocator(12, 4.0), "page_size=4.0"),
        (lambda a, none: a.alloc("12"), "num_tokens='12'"),
        (lambda a, none: a.alloc(4.0), "num_tokens=4.0"),
        (lambda a, none: a.alloc_decode([1], [-1]), "last_loc"),
        (lambda a, none: a.alloc_decode([1], np.array([-1])), "last_loc"),
        (lambda a, none: a.alloc_decode([[1], [1, 2]], none), "seq_lens"),
        (lambda a, none: a.alloc_decode([1.0], none), "seq_lens"),
        (lambda a, none: a.alloc_decode(1, none), "seq_lens=1"),
        (lambda a, none: a.alloc_decode(torch.ones(1, dtype=torch.bfloat16), none), "seq_lens"),
        (lambda a, none: a.alloc_decode(None, none), "seq_lens=None"),
        (lambda a, none: a.alloc_decode([-(2**63)], none), f"seq_lens={-(2**63)}"),
        (lambda a, none: a.alloc_decode(np.array([2**63], np.uint64), none), "seq_lens="),
        (lambda a, none: a.alloc_extend([-(2**63)], [5], none, 5), f"prefix_lens={-(2**63)}"),
        (lambda a, none: a.alloc_extend([0], [5], none, "5"), "extend_num_tokens='5'"),
        (lambda a, none: a.free(None), "slots=None"),
        (lambda a, none: a.free([[4], [5, 6]]), "slots"),
        (lambda a, none: a.free([2**70]), "slots"),
        (lambda a, none: a.is_free(1.5), "pages=1.5"),
    ],
)
def test_plain_mistakes_are_named(make, call, name) -> None:
    a = make(64, 4)
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)}"):
        call(a, torch.tensor([-1], device=a.device))
    assert a.available_size() == 64


@pytest.mark.parametrize(
    ("size", "page_size"), [(0, 4), (3, 4), (16, 0), (16, 257), (-1, 1), (2**31, 16)]
)
def test_sizes_that_cannot_be(size: int, page_size: int) -> None:
    with pytest.raises(ArgumentError):
        PagedAllocator(size, page_size)


def test_repr_and_notebook_picture() -> None:
    a = PagedAllocator(40, 4)
    a.alloc(4)
    assert repr(a) == "PagedAllocator(10 pages of 4 on cpu: 9 free, front first 2 3 4 5 6 7 8 9 …)"
    a.alloc(36)
    assert repr(a) == "PagedAllocator(10 pages of 4 on cpu: 0 free)"
    bundle = a._repr_mimebundle_()
    assert {"image/svg+xml", "text/plain"} == set(bundle)


def count_launches(monkeypatch, forbid: bool = False) -> list[str]:
    """Names of the implementations that were launched from now on."""
    launched: list[str] = []
    for name in ("extend_triton", "extend_torch", "decode_triton", "decode_torch"):
        real = getattr(kernels, name)

        def launch(*args, _name=name, _real=real, **options):
            assert not forbid, f"{_name} was launched"
            launched.append(_name)
            return _real(*args, **options)

        monkeypatch.setattr(kernels, name, launch)
    return launched


# ---- faults of other systems ---------------------------------------------------------------------


def test_b01_out_of_pages_launches_nothing(make, monkeypatch) -> None:
    a = make(24, 4)
    slots = a.alloc(16)  # pages 1..4 held, free list [5, 6]
    assert len(slots) == 16
    a._free.stack[a.num_pages :] = 777  # what lies behind the list in memory
    launched = count_launches(monkeypatch)
    assert extend(a, [0], [9], [-1]) is None
    assert decode(a, [5, 9, 13], [7, 11, 15]) is None
    assert a.alloc(12) is None
    assert launched == []
    assert a.free_pages.tolist() == [5, 6]
    taken = extend(a, [0, 0], [1, 4], [-1, -1])
    assert taken == [20, 24, 25, 26, 27]
    assert launched


def test_b01_an_extend_that_exactly_fits_is_served(make) -> None:
    a = make(24, 4)
    a.alloc(16)
    assert extend(a, [0], [8], [-1]) == [20, 21, 22, 23, 24, 25, 26, 27]
    assert a.available_size() == 0
    assert extend(a, [5], [8], [4]) == [5, 6, 7], "a page that has room needs no free page"
    assert extend(a, [], [], []) == []


def test_b03_freeing_a_slot_of_a_freed_page(make) -> None:
    a = make(16, 4)
    slots = a.alloc_extend(ints([0]), ints([6]), ints([-1]).to(a.device), 6)
    a.free(slots)
    if a.device.type == "cpu":
        with pytest.raises(ValueError, match="page 2 is already free"):
            a.free(ints([10]))
    else:
        a.free(torch.tensor([8], device=a.device))  # a run begins at a page start
        torch.cuda.synchronize()
        with pytest.warns(RuntimeWarning, match="debug=True"):
            assert a.available_size() == 16
    assert a.free_pages.tolist().count(2) == 1
    assert a.available_size() <= a.size
    one, two = a.alloc(4), a.alloc(4)
    assert not set(one.tolist()) & set(two.tolist())


def test_b04_double_free_at_page_size_1(make) -> None:
    a = make(4, 1)
    assert a.alloc(2).tolist() == [1, 2]
    a.free(torch.tensor([2], device=a.device))
    if a.device.type == "cpu":
        with pytest.raises(ValueError, match="page 2 is already free"):
            a.free(ints([2]))
    else:
        a.free(torch.tensor([2], device=a.device))
        torch.cuda.synchronize()
        with pytest.warns(RuntimeWarning):
            a.available_size()
    assert a.available_size() == 3
    assert a.alloc(4) is None
    assert a.alloc(3).tolist() == [2, 3, 4]


@pytest.mark.parametrize("page_size", [1, 4])
def test_b80_page_0_is_never_handed_out(make, page_size: int) -> None:
    a = make(16 * page_size, page_size)
    seen: list[int] = []
    for round_ in range(3):
        lasts: list[int] = []
        while (slots := extend(a, [0], [page_size], [-1])) is not None:
            seen += slots
            lasts.append(slots[-1])
        assert len(lasts) == 16, round_
        for last in lasts:
            start = last - page_size + 1
            a.free(torch.arange(start, last + 1, device=a.device))
    assert min(seen) >= page_size
    assert max(seen) < 17 * page_size


def test_a_state_taken_inside_a_free_group_cannot_be_restored_after_it() -> None:
    allocator = PagedAllocator(32, 4)
    held = allocator.alloc(16)
    with allocator.free_group():
        allocator.free(held[:4])
        state = allocator.backup()
        allocator.alloc(8)
    with pytest.raises(StateError, match="freed since"):
        allocator.restore(state)
    assert allocator.available_size() == 32 - 16 - 8 + 4


def test_a_length_near_the_end_of_64_bits_changes_nothing() -> None:
    allocator = PagedAllocator(64, 4)
    with pytest.raises(ArgumentError, match="too long"):
        allocator.alloc_extend(
            torch.tensor([0]), torch.tensor([2**63 - 1]), torch.tensor([-1]), 2**63 - 1
        )
    assert allocator.alloc(4).tolist() == [4, 5, 6, 7]
