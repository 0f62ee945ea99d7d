"""The memory of graphs: one pool for all, and outputs that share the largest graph's."""

from __future__ import annotations

import gc

import pytest
import torch
from worlds import double, runner_of

from minikv.graphs import CudaGraphRunner, cuda

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_devices
def test_large_outputs_share_the_largest_graphs_memory(device, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "SHARED_BYTES", 1)

    def step(inputs, variant):
        x = inputs["x"]
        return 7, x * 2, x.sum(1), x, torch.ones(5, device=x.device)

    r = runner_of(step, 4, [1, 2, 4], device=device)
    places = {tuple(t.data_ptr() for t in out[1:]) for _, out in r.graphs.values()}
    assert len(places) == 1
    for n in (4, 1, 3, 2):
        x = torch.randn(n, 3)
        number, *got = r({"x": x})
        assert number == 7
        for t, want in zip(got, (x * 2, x.sum(1), x, torch.ones(5)), strict=True):
            torch.testing.assert_close(t.cpu(), want)


@pytest.mark.gpu
def test_b88_graph_memory_is_little_more_than_the_largest_needs() -> None:
    def step(inputs, variant):
        x = inputs["x"].repeat(1, 1 << 18)  # 3 MiB of temporaries a row
        return (x.cos() + x.sin()).sum(1)

    def held(sizes: list[int]) -> int:
        r = runner_of(step, 64, sizes, device="cuda")
        assert r.stats.captures == len(sizes)
        return r.stats.graph_bytes

    sizes = list(range(1, 65))
    alone, descending = held([64]), held(sizes)

    class Ascending(list):
        def __getitem__(self, at):
            return list(self) if at == slice(None, None, -1) else super().__getitem__(at)

    class Backwards(CudaGraphRunner):
        def _capture(self, hidden):
            self.sizes = Ascending(self.sizes)
            super()._capture(hidden)

    ascending = runner_of(step, 64, sizes, Backwards, device="cuda").stats.graph_bytes
    print(f"largest alone {alone >> 20} MiB, {descending >> 20} descending, {ascending >> 20} not")
    assert alone <= descending <= 1.2 * alone + (32 << 20)
    assert ascending > 2 * descending


@pytest.mark.gpu
def test_runners_of_a_device_share_one_pool() -> None:
    a, b = (runner_of(double, 4, [1, 4], device="cuda") for _ in range(2))
    pool, living = cuda._pools[torch.cuda.current_device()]
    assert len(living) == 4
    assert {g.pool() for r in (a, b) for g, _ in r.graphs.values()} == {pool}
    x, y = torch.randn(3, 3), torch.randn(2, 3)
    first, second = a({"x": x}), b({"x": y})
    assert torch.equal(first.cpu(), x * 2)
    assert torch.equal(second.cpu(), y * 2)
    del a, b
    gc.collect()
    again = runner_of(double, 4, [4], device="cuda")
    assert torch.equal(again({"x": x}).cpu(), x * 2)
