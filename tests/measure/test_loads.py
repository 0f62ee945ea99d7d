"""The recorder's counts, against kernels small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import make_case

from minikv.attention import decode_attention, extend_attention
from minikv.errors import StateError
from minikv.kernels.triton import INTERPRETED, tl, triton
from minikv.measure.loads import record

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are not interpreted in this process"
)


@triton.jit
def _copy_rows(source, target, index, n, stride, WIDTH: tl.constexpr):
    """Program r copies row index[r] of source to row r of target, and its first `n` columns
    only."""
    r = tl.program_id(0)
    row = tl.load(index + r)
    column = tl.arange(0, WIDTH)
    values = tl.load(source + row * stride + column, mask=column < n, other=0)
    tl.store(target + r * stride + column, values, mask=column < n)


@interpreted
def test_a_kernel_counted_by_hand() -> None:
    source, target = torch.arange(24.0).view(4, 6), torch.zeros(2, 6)
    index = torch.tensor([3, 1])
    with record() as recording:
        _copy_rows[(2,)](source, target, index, 5, 6, WIDTH=8)
    assert torch.equal(target[:, :5], source[[3, 1], :5])
    assert [p.index for p in recording.programs] == [(0, 0, 0), (1, 0, 0)]
    first = recording.programs[0]
    assert first.kernel == "_copy_rows"
    assert [(a.kind, a.tensor, a.rows.tolist(), a.elements, a.bytes) for a in first.accesses] == [
        ("load", "index", [0], 1, 8),
        ("load", "source", [3], 5, 20),
        ("store", "target", [0], 5, 20),
    ]
    assert recording.bytes_loaded == 2 * 28
    assert recording.bytes_stored == 2 * 20
    assert recording.bytes_by_tensor() == {"index": 16, "source": 40}
    assert recording.bytes_by_tensor("store") == {"target": 40}
    assert recording.counts("source", 4).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


@interpreted
def test_interleaved_views_are_told_apart() -> None:
    both = torch.arange(24.0).view(4, 6)
    source, target = both[:, :3], both[:, 3:]  # rows of one projection
    with record() as recording:
        _copy_rows[(1,)](source, target, torch.tensor([2]), 3, 6, WIDTH=4)
    assert [(a.tensor, a.rows.tolist()) for a in recording.programs[0].accesses[1:]] == [
        ("source", [2]),
        ("target", [0]),
    ]


@interpreted
def test_decode_reads_the_listed_slots_and_no_other() -> None:
    case = make_case([6, 2], [1, 1], page_size=4, q_heads=2, kv_heads=1)
    with record() as recording:
        got = decode_attention(*case.decode_args(), num_kv_splits=1, backend="triton")
    torch.testing.assert_close(got.double(), case.want_decode()[0], atol=2e-5, rtol=0)
    for name in ("k_cache", "v_cache"):
        read = {row for p in recording.programs for row in p.rows(name)}
        assert read == set(case.kv_indices.tolist())
        counts = recording.counts(name, case.k_cache.shape[0], kernel="decode_kernel")
        assert counts.max() == 1  # one KV head, one split: no program meets a slot in two loads
        assert (counts > 0).sum() == case.kv_indices.numel()
    assert recording.bytes_by_tensor()["q"] == case.q.numel() * 4
    assert recording.bytes_by_tensor("store")["out"] == case.q.numel() * 4


@interpreted
def test_extend_reads_the_prefix_through_the_list() -> None:
    case = make_case([5], [3], q_heads=1, kv_heads=1)
    with record() as recording:
        extend_attention(*case.extend_args(), backend="triton")
    assert {row for p in recording.programs for row in p.rows("k_cache")} == set(
        case.prefix_indices.tolist()
    )
    assert {row for p in recording.programs for row in p.rows("k")} == {0, 1, 2}


@interpreted
def test_nothing_is_left_behind() -> None:
    from triton.runtime import interpreter

    before = interpreter.GridExecutor.__call__
    with pytest.raises(KeyError), record():
        raise KeyError
    assert interpreter.GridExecutor.__call__ is before
    assert not {"create_masked_load", "set_grid_idx"} & set(vars(interpreter.interpreter_builder))
    target = torch.zeros(1, 6)
    with record() as recording:
        pass
    _copy_rows[(1,)](torch.ones(1, 6), target, torch.tensor([0]), 6, 6, WIDTH=8)
    assert recording.programs == []
    assert isinstance(recording.counts("k", 4), np.ndarray)


def test_a_compiled_kernel_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minikv.measure.loads.INTERPRETED", False)
    with pytest.raises(StateError, match="TRITON_INTERPRET=1"), record():
        pass
