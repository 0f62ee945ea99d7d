"""Padded replays over a paged pool: who is written, who is read, and what the others see."""

from __future__ import annotations

import pytest
import torch
from worlds import HEADS, D, PagedLayer

from minikv.errors import ArgumentError
from minikv.kernels.triton import HAVE_TRITON

CUDA = torch.cuda.is_available()
WAYS = [
    ("torch", "cpu"),
    ("triton", "cpu"),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == ("triton", "cpu") and (CUDA or not HAVE_TRITON):
        pytest.skip(
            "kernels are compiled for CUDA in this process" if CUDA else "Triton is not installed"
        )
    return dict(zip(("backend", "device"), request.param, strict=True))


def pools(world: PagedLayer) -> torch.Tensor:
    return torch.stack((world.pool.k(0), world.pool.v(0))).cpu()


def test_b77_a_shrinking_batch_leaves_nothing_behind(way) -> None:
    w = PagedLayer([1, 2, 4], page_size=1, **way)
    rows = torch.tensor(w.table.alloc(4))
    lens = torch.zeros(4, dtype=torch.int64)

    def batch(n: int, slots: list[int]) -> dict[str, torch.Tensor]:
        at = torch.tensor(slots, device=w.device)
        w.table.write(rows[:n], lens[:n], lens[:n] + 1, at)
        q, k, v = torch.randn(3, n, HEADS, D, device=w.device)
        tokens = torch.randint(1, 9, (n,))
        made = {
            "token_ids": tokens,
            "positions": lens[:n].clone(),
            "rows": rows[:n],
            "out_slots": at,
        }
        lens[:n] += 1
        return {**made, "seq_lens": lens[:n].clone(), "q": q, "k": k, "v": v}

    four = batch(4, [21, 22, 23, 24])
    torch.testing.assert_close(w.runner(four), w.want(four))
    before = pools(w)
    three = batch(3, [31, 32, 33])
    got = w.runner(three)
    torch.testing.assert_close(got, w.want(three))
    after = pools(w)
    assert torch.equal(after[:, 24], before[:, 24])
    for name, value in {
        "rows": 0,
        "out_slots": 0,
        "positions": 0,
        "token_ids": 0,
        "seq_lens": 1,
    }.items():
        assert set(w.runner.buffers[name].tensor[3:].tolist()) == {value}, name
    same = w.runner.run_step(w.runner.views(4), "greedy")[:3]
    assert torch.equal(got, same), "replay equals eager on the same static buffers"


def test_every_size_shrinking_and_growing_leaves_other_slots_alone(way) -> None:
    w = PagedLayer([1, 2, 4], max_requests=5, size=128, **way)
    rows = w.fill([9, 3, 4, 1, 7])
    lens = torch.tensor([9, 3, 4, 1, 7])
    for n in (5, 4, 3, 2, 1, 2, 3, 4, 5):
        batch = w.batch(rows[:n], lens[:n].clone())
        before, untouched = pools(w), {k: v.clone() for k, v in batch.items()}
        w.totals.clear()
        got = w.runner(batch)
        torch.testing.assert_close(got, w.want(batch))
        assert all(torch.equal(batch[k], v) for k, v in untouched.items())
        size = w.runner.bucket(n) or n
        assert w.totals == [int(batch["seq_lens"].sum()) + size - n], (
            "sums count padding, and the batch's do not"
        )
        same = w.runner.run_step(w.runner.views(size), "greedy")[:n]
        assert torch.equal(got, same)
        mine = torch.zeros(before.shape[1], dtype=torch.bool)
        mine[batch["out_slots"].cpu()] = True
        mine[0] = True  # padding's
        assert torch.equal(pools(w)[:, ~mine], before[:, ~mine])
        lens[:n] += 1
    assert (w.runner.stats.eager, w.runner.stats.replays, w.runner.stats.padded_rows) == (2, 7, 2)


def test_b79_padding_may_write_nan(way) -> None:
    w = PagedLayer([4], window=2, padding_kv=torch.nan, **way)
    rows, lens = w.fill([6, 2, 4]), torch.tensor([6, 2, 4])
    for _ in range(2):
        batch = w.batch(rows, lens)
        got = w.runner(batch)
        assert got.isfinite().all()
        torch.testing.assert_close(got, w.want(batch, window=2))
        lens = lens + 1
    assert pools(w)[:, 0].isnan().all(), "the padded row was written, to slot 0"
    assert pools(w)[:, 1:].isfinite().all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_b80_padding_writes_to_a_page_that_nobody_gets(way, page_size) -> None:
    w = PagedLayer([4], page_size=page_size, size=32, padding_kv=7.0, **way)
    slots = []
    while (got := w.allocator.alloc(page_size)) is not None:
        slots += got.tolist()
    assert sorted(slots) == list(range(page_size, 32 + page_size))
    w.allocator.clear()
    rows, lens = (
        w.fill([8, 7, 3]),
        torch.tensor([7, 6, 2]),
    )  # the last token of each is about to be written again
    live = torch.cat([w.table.table[r, :n] for r, n in zip(rows, (8, 7, 3), strict=True)]).long()
    q, k, v = torch.randn(3, 3, HEADS, D, device=w.device)
    last = w.table.table[rows.to(w.device), lens.to(w.device)].long()
    batch = {
        "token_ids": rows,
        "positions": lens,
        "rows": rows,
        "seq_lens": lens + 1,
        "out_slots": last,
    }
    want = pools(w)
    want[:, last.cpu()] = torch.stack((k, v)).cpu()
    for n in (3, 2, 1):
        w.runner({**{name: t[:n] for name, t in batch.items()}, "q": q[:n], "k": k[:n], "v": v[:n]})
    assert torch.equal(pools(w)[:, live.cpu()], want[:, live.cpu()])


def test_b82_rows_and_slots_are_padded_alike(way) -> None:
    w = PagedLayer([4], **way)
    k = torch.randn(4, HEADS, D, device=w.device)
    before = pools(w)
    with pytest.raises(ArgumentError, match="one row per slot"):
        w.pool.set_kv(0, torch.tensor([5, 6, 7], device=w.device), k, k)
    assert torch.equal(pools(w), before)
    stored = []
    set_kv = w.pool.set_kv
    w.pool.set_kv = lambda layer, slots, k, v: (
        stored.append((len(slots), len(k))),
        set_kv(layer, slots, k, v),
    )[1]
    rows = w.fill([1, 2, 3])
    w.runner(w.batch(rows, torch.tensor([1, 2, 3])))
    if w.device == "cpu":  # on CUDA no Python runs in a replay
        assert stored[-1] == (4, 4)
    assert w.runner.buffers["out_slots"].view(4)[3] == 0
