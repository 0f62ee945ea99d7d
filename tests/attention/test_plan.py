"""Plans: every key in exactly one item, longest first, within the promised grid."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.attention import AttentionPlan
from minikv.attention.tiles import decode_tiles, head_blocks
from minikv.errors import ArgumentError, StateError

POOL = torch.zeros(64, 2, 64)
HALF = torch.zeros(64, 2, 128, dtype=torch.float16)  # its tiles for a crowded chip are others


def items_of(plan: AttentionPlan, lengths: list[int]) -> list[tuple[int, int, int, int]]:
    """(request, first key, end, row) of each used item, its end cut to the request's."""
    return [(r, lo, min(hi, lengths[r]), row) for r, lo, hi, row in plan.items.tolist() if r >= 0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([-1, 0, 63, 64, 200]),
    st.sampled_from([POOL, HALF]),
)
def test_every_visible_key_is_in_exactly_one_item(lengths, processors, window, pool):
    plan = AttentionPlan(12, 4, pool, pool, sliding_window=window, processors=processors)
    plan.items.fill_(99)
    plan.update(torch.tensor(lengths))
    items = items_of(plan, lengths)
    assert len(items) <= plan.capacity(len(lengths))
    block = plan.tiles_for(len(lengths)).block_n
    rows = []
    for r, length in enumerate(lengths):
        mine = sorted(item[1:] for item in items if item[0] == r)
        assert [lo for lo, _, _ in mine[1:]] == [
            hi for _, hi, _ in mine[:-1]
        ]  # one follows the other
        assert all(lo % block == 0 for lo, _, _ in mine)
        first, last = mine[0][0], mine[-1][1]
        visible_from = 0 if window < 0 else max(0, length - 1 - window)
        assert first <= visible_from < first + block or (window < 0 and first == 0)
        assert last == length
        assert len(mine) == 1 or all(hi > lo for lo, hi, _ in mine)  # no empty part beside others
        merge = [m for m in plan.merges.tolist() if m[2] > 0 and m[0] == r]
        if len(mine) == 1:
            assert (mine[0][2], merge) == (-1, [])
        else:
            assert merge[0][1:3] == [mine[0][2], len(mine)]
            assert [row for _, _, row in mine] == list(range(mine[0][2], mine[0][2] + len(mine)))
            rows += [row for _, _, row in mine]
    assert len(set(rows)) == len(rows)
    assert max(rows, default=-1) < plan.partial.shape[0]
    assert sum(m[2] > 0 for m in plan.merges.tolist()) <= plan.entries(len(lengths))
    sizes = [hi - lo for _, lo, hi, _ in items]
    assert all(a >= b - block for a, b in pairwise(sizes))  # longest first, up to a tile


def test_a_small_batch_is_cut_into_one_wave_and_a_full_one_only_at_its_end():
    plan = AttentionPlan(256, 16, POOL, POOL, processors=132)
    assert (
        0.8 * plan.chip(1)[0]
        <= len(items_of(plan.update(torch.tensor([32768])), [32768]))
        <= plan.chip(1)[0]
    )
    at_once = int(plan.chip(1)[1])
    assert len(items_of(plan.update(torch.full((at_once,), 4096)), [4096] * at_once)) == at_once
    full = items_of(plan.update(torch.full((256,), 4096)), [4096] * 256)
    whole = sum(hi - lo == 4096 for _, lo, hi, _ in full)
    assert 256 - 1.5 * plan.chip(256)[1] < whole < 256
    assert full[0][2] - full[0][1] == 4096 > full[-1][2] - full[-1][1]
    uneven = [100] * 255 + [500_000]
    longest = max(hi - lo for _, lo, hi, _ in items_of(plan.update(torch.tensor(uneven)), uneven))
    assert longest <= 1.1 * sum(uneven) / plan.chip(256)[1] + 64


def test_a_plan_is_made_again_only_when_a_request_grew_by_a_tile():
    plan = AttentionPlan(4, 4, POOL, POOL, processors=4).update(torch.tensor([700, 65]))
    plan.items.fill_(99)
    assert (plan.update(torch.tensor([701, 128])).items == 99).all()  # not written again
    assert not (plan.update(torch.tensor([701, 129])).items[:, 0] == 99).any()
    plan.items.fill_(99)
    assert not (plan.update(torch.tensor([701, 129, 1])).items[:, 0] == 99).any()


def test_an_interrupted_update_is_made_again(monkeypatch):
    """Lengths of as many tiles as before would else be taken for planned, and read by the items of
    an older batch."""
    pool = torch.zeros(4096, 2, 64)
    plan = AttentionPlan(4, 4, pool, pool, processors=4).update(torch.tensor([900, 3, 1]))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plan, "_fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan.update(torch.tensor([3, 900, 1]))
    fresh = AttentionPlan(4, 4, pool, pool, processors=4).update(torch.tensor([4, 901, 2]))
    assert torch.equal(plan.update(torch.tensor([4, 901, 2])).items, fresh.items)


def test_update_says_what_it_cannot_plan():
    plan = AttentionPlan(2, 4, POOL, POOL)
    for bad in (
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0]),
        torch.tensor([-1]),
        torch.tensor([2**31]),  # p20: int32 would wrap
        torch.tensor([[1]]),
        torch.tensor([]),
    ):
        with pytest.raises(ArgumentError, match="lengths"):
            plan.update(bad)
    for wrong in ({"max_requests": 0}, {"num_kv_splits": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            AttentionPlan(
                **{"max_requests": 2, "q_heads": 4, "k_cache": POOL, "v_cache": POOL, **wrong}
            )


def test_check_names_what_the_plan_was_made_for():
    plan = AttentionPlan(2, 4, POOL, POOL, sliding_window=5).update(torch.tensor([3]))
    q = torch.zeros(1, 4, 64)
    plan.check(q, POOL, None, 5)
    with pytest.raises(ArgumentError, match="sliding_window"):
        plan.check(q, POOL, None, -1)
    with pytest.raises(ArgumentError, match="num_kv_splits"):
        plan.check(q, POOL, 3, 5)
    with pytest.raises(ArgumentError, match="heads"):
        plan.check(torch.zeros(1, 8, 64), POOL, None, 5)
    with pytest.raises(StateError, match=r"plan\.update"):
        plan.check(torch.zeros(2, 4, 64), POOL, None, 5)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)])
def test_b64_tiles_are_never_smaller_than_the_tensor_cores_take(capability):
    for d in (8, 16, 64, 80, 96, 112, 128, 192, 256, 288, 576):
        for group in (1, 3, 16, 17, 24, 48, 128):
            for item_bytes in (1, 2, 4):
                tiles = decode_tiles(capability, d, min(d, 512), group, item_bytes, d > 256)
                assert min(tiles.block_h, tiles.block_n, head_blocks(d)[0]) >= 16
                assert tiles.programs(group, 1) * tiles.block_h >= group
