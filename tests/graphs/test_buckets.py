"""Which sizes are captured, and which size a batch runs in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worlds import double, runner_of

from minikv.errors import ArgumentError
from minikv.graphs import CompiledRunner, CudaGraphRunner, capture_batch_sizes


def test_usual_sizes() -> None:
    steps = list(range(8, 161, 8))
    assert capture_batch_sizes(160) == capture_batch_sizes(500) == [1, 2, 4, *steps]
    assert capture_batch_sizes(64) == [1, 2, 4, *range(8, 57, 8), 63, 64]
    assert capture_batch_sizes(50)[-3:] == [48, 49, 50]
    assert capture_batch_sizes(200, padding=False) == [*range(1, 33), 64, 96, 128, 160]
    assert capture_batch_sizes(40, padding=False) == [*range(1, 33), 39, 40]
    assert capture_batch_sizes(160, cap=10) == [1, 2, 4, 8]
    assert capture_batch_sizes(9, cap=100, sizes=[3, 30]) == [3, 8, 9]


def test_b85_nothing_below_one_is_captured() -> None:
    assert capture_batch_sizes(1) == [1]
    assert capture_batch_sizes(1, padding=False) == [1]
    assert capture_batch_sizes(8, sizes=[0, 1, 1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="sizes"):
        capture_batch_sizes(8, sizes=[])
    with pytest.raises(ValueError, match="max_requests"):
        capture_batch_sizes(0)
    with pytest.raises(ValueError, match="batch_sizes"):
        runner_of(double, 4, [0, 1])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sizes": [0]}, "sizes"),
        ({"sizes": [1.5]}, "sizes=1.5"),
        ({"cap": 0}, "cap=0"),
        ({"max_requests": 7.5}, "max_requests=7.5"),
    ],
)
def test_p19_sizes_of_which_none_is_left_are_refused(change, name) -> None:
    with pytest.raises(ArgumentError, match=name):
        capture_batch_sizes(**{"max_requests": 4, **change})


def test_b83_sizes_that_were_never_captured_run_eagerly() -> None:
    r = runner_of(double, 16, [1, 2, 4, 8])
    assert (r.bucket(9), r.bucket(12), r.bucket(3 * 4)) == (None, None, None)
    assert not r.can_run(9)
    for n in (9, 12, 16, 40):  # beyond the buffers, too
        x = torch.randn(n, 3)
        assert torch.equal(r({"x": x}), x * 2)
    assert (r.stats.eager, r.stats.replays) == (4, 0)


@pytest.mark.parametrize("number", [int, np.int64, torch.tensor])
def test_b86_without_padding_exact_sizes_are_replayed(number) -> None:
    r = runner_of(double, 4, [number(1), number(2), number(4)], padding=False)
    for n in (2, 3, 4):
        x = torch.randn(n, 3)
        assert torch.equal(r({"x": x}), x * 2)
        assert r.can_run(number(n)) is (n != 3)
    assert dict(r.stats) == {
        "replays": 2,
        "eager": 1,
        "captures": 3,
        "padded_rows": 0,
        "graph_bytes": 0,
    }


def test_ranks_agree_on_the_largest_batchs_size() -> None:
    r = runner_of(double, 8, [2, 4, 8])
    assert [r.agree(sizes) for sizes in ([1, 3, 2], [0, 0], [4], [9, 1], [8, 8])] == [
        4,
        2,
        4,
        None,
        8,
    ]
    x = torch.ones(1, 3)
    assert torch.equal(r({"x": x}, size=r.agree([1, 3])), x * 2)
    assert r(None, size=4).shape == (0, 3), "an idle rank takes part"
    assert r.stats.padded_rows == 3 + 4
    exact = runner_of(double, 8, [2, 4], padding=False)
    assert [exact.agree(sizes) for sizes in ([2, 2, 0], [1, 2], [4, 4], [3])] == [2, None, 4, None]
    for size in (3, 16, 1):
        with pytest.raises(ArgumentError, match="size"):
            r({"x": torch.ones(2, 3)}, size=size)


def test_both_runners_look_alike() -> None:
    for kind in (CudaGraphRunner, CompiledRunner):
        r = runner_of(double, 4, [1, 2, 4], kind)
        assert (r.bucket(3), r.bucket(5), r.can_run(4), r.can_run(5)) == (4, None, True, False)
        assert set(r.stats) == {"replays", "eager", "captures", "padded_rows", "graph_bytes"}
