"""The Triton decode kernels against the oracle: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import OPTION_SETS, Case, assert_close, make_case
from torch import Tensor

from minikv.attention import AttentionPlan, decode_attention
from minikv.errors import ArgumentError

LENGTHS = [150, 0, 1, 64, 65]


def case_of(lengths: list[int], **options: Any) -> Case:
    """One query per request, for empty requests too."""
    made = make_case([max(n - 1, 0) for n in lengths], [min(n, 1) for n in lengths], **options)
    q = torch.randn(len(lengths), *made.q.shape[1:], generator=torch.Generator().manual_seed(7))
    made.q = q.to(made.q)
    return made


def poisoned_plan(case: Case, processors: int | None = 4, **options: Any) -> AttentionPlan:
    plan = AttentionPlan(
        case.q.shape[0],
        case.q.shape[1],
        case.k_cache,
        case.v_cache,
        processors=processors,
        **options,
    )
    plan.partial.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    return plan.update(case.kv_indptr.diff().cpu())


def run(case: Case, **arguments: Any) -> tuple[Tensor, Tensor]:
    return decode_attention(
        *case.decode_args(),
        **case.options,
        return_lse=True,
        out=case.poisoned_out(),
        backend="triton",
        **arguments,
    )


def check(case: Case, **arguments: Any) -> None:
    (out, lse), (want, want_lse) = run(case, **arguments), case.want_decode()
    assert_close(out, want)
    assert_close(lse, want_lse, case.q.dtype)


SETS = {
    name: {k: v for k, v in o.items() if k != "causal"}
    for name, o in OPTION_SETS.items()
    if "causal" not in o
}
SETS["window_start"] = {"window_start": torch.tensor([7, 3, 2, 0, 1]), "xai_temperature_len": 4}
SETS["sinks"] = {"sinks": torch.tensor([0.5, -1.0, 3.0, -torch.inf])}
SETS["negative_scale"] = {"sm_scale": -0.5}
SETS["all"] = {
    **SETS["sinks"],
    **SETS["window_start"],
    "logit_cap": 1.5,
    "sliding_window": 70,
    "sm_scale": 0.4,
}


@pytest.mark.parametrize("how", ["whole", "fixed", "planned"])
@pytest.mark.parametrize("name", SETS)
def test_options_equal_the_oracle(name, how, device):
    case = case_of(LENGTHS, page_size=4, device=device, **SETS[name])
    if how == "planned":
        check(case, plan=poisoned_plan(case, sliding_window=SETS[name].get("sliding_window", -1)))
    else:
        check(case, num_kv_splits=1 if how == "whole" else 3)


@pytest.mark.parametrize(
    "shape",
    [
        {"d": 16},
        {"d": 80},
        {"d": 96, "d_v": 64},
        {"d": 112},
        {"d": 256, "q_heads": 2, "kv_heads": 1},
        {"d": 192, "d_v": 128, "q_heads": 2, "kv_heads": 1},
        {"d": 288, "d_v": 256, "q_heads": 20, "kv_heads": 1, "shared_kv": True},
        {"d": 576, "d_v": 512, "q_heads": 3, "kv_heads": 1, "shared_kv": True},
        {"d": 64, "d_v": 32, "shared_kv": True},
        {"d": 16, "q_heads": 48, "kv_heads": 1},
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
def test_head_shapes_equal_the_oracle(shape, device):
    for how in ({"num_kv_splits": 1}, {"num_kv_splits": 2}):
        check(case_of([70, 0, 33], device=device, **shape), **how)


def test_b65_more_than_sixteen_query_heads_share_a_kv_head(device):
    for q_heads in (17, 24, 70):
        check(case_of([5, 40], q_heads=q_heads, kv_heads=1, device=device), num_kv_splits=2)


def test_b72_any_ratio_of_query_to_kv_heads(device):
    for q_heads, kv_heads in ((3, 1), (5, 1), (12, 2), (14, 2), (7, 7)):
        check(case_of([9, 20], q_heads=q_heads, kv_heads=kv_heads, device=device))
    with pytest.raises(ArgumentError, match="heads"):
        run(case_of([9], q_heads=5, kv_heads=2, device=device))


def test_b66_splits_without_keys_count_for_nothing(device, monkeypatch):
    case, empty = case_of([1, 2, 3, 9], device=device), torch.empty
    want = case.want_decode()
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan)
    )  # poisoned scratch
    out, lse = run(case, num_kv_splits=8)
    monkeypatch.undo()
    assert_close(out, want[0])
    assert_close(lse, want[1])
    assert_close(out[0], case.v_cache[case.kv_indices[0].long()].repeat_interleave(2, 0).double())


def test_b62_unseen_slots_may_hold_nan(device):
    for lengths in ([3, 9], [200, 70]):
        for window in (-1, 4, 66):
            case = case_of(lengths, page_size=4, sliding_window=window, device=device)
            if window >= 0:
                for r, end in enumerate(case.kv_indptr[1:].tolist()):
                    hidden = case.kv_indices[
                        int(case.kv_indptr[r]) : max(end - 1 - window, 0)
                    ].long()
                    case.k_cache[hidden], case.v_cache[hidden] = torch.nan, torch.nan
            for splits in (1, 3):
                check(case, num_kv_splits=splits)


def test_b74_tail_of_the_last_page_is_never_visible(device):
    case = case_of([6], page_size=4, device=device)
    first, _ = run(case)
    listed = torch.zeros(case.k_cache.shape[0], dtype=torch.bool, device=device)
    listed[case.kv_indices.long()] = True
    case.k_cache[~listed], case.v_cache[~listed] = 1e4, 1e4
    assert torch.equal(first, run(case)[0])


def test_b56_a_window_of_w_sees_w_plus_one_keys(device):
    case = case_of([11], q_heads=1, kv_heads=1, device=device)
    case.k_cache[:] = 0
    case.v_cache[case.kv_indices.long()] = torch.arange(11.0, device=device)[:, None, None].expand(
        11, 1, 16
    )
    for window, want in ((3, 8.5), (0, 10.0), (10, 5.0), (99, 5.0)):
        assert run(case.with_options(sliding_window=window))[0].flatten()[
            0
        ].item() == pytest.approx(want)


def test_b59_b61_cap_acts_on_the_natural_logit_and_never_overflows(device):
    case = case_of([2], q_heads=1, kv_heads=1, device=device, sm_scale=1.0)
    case.q[:] = 0
    case.q[..., 0] = 1
    case.k_cache[case.kv_indices.long()] = 0
    case.v_cache[case.kv_indices.long()] = torch.tensor([1.0, 0.0], device=device)[
        :, None, None
    ].expand(2, 1, 16)
    for logit, cap, want in ((10, 5, 0.99200), (200, 1, 0.73106), (-200, 1, 0.26894)):
        case.k_cache[case.kv_indices[0].long(), 0, 0] = logit
        assert run(case.with_options(logit_cap=float(cap)))[0][0, 0, 0].item() == pytest.approx(
            want, abs=2e-5
        )


def test_b69_logits_beyond_half_precision(device):
    case = case_of([2], q_heads=1, kv_heads=1, dtype=torch.float16, device=device, sm_scale=1.0)
    slots = case.kv_indices.long()
    case.q[:], case.k_cache[slots] = 70, 70
    case.v_cache[slots] = torch.tensor([1.0, 3.0]).to(case.v_cache)[:, None, None].expand(2, 1, 16)
    for splits in (1, 2):
        assert_close(run(case, num_kv_splits=splits)[0], torch.full((1, 1, 16), 2.0))


def alone(case: Case, r: int) -> Case:
    """Request r of a batch as a batch of its own, over the same pool."""
    low, high = case.kv_indptr[r : r + 2].tolist()
    return replace(
        case,
        q=case.q[r : r + 1].contiguous(),
        kv_indices=case.kv_indices[low:high].contiguous(),
        kv_indptr=torch.tensor([0, high - low]).to(case.kv_indptr),
    )


@pytest.mark.parametrize("splits", [1, 4])
def test_b75_fixed_splits_are_bitwise_equal_in_any_batch(splits, device):
    case = case_of([300, 5, 64, 1], device=device)
    out, lse = run(case, num_kv_splits=splits)
    planned = run(case, plan=poisoned_plan(case, num_kv_splits=splits))
    assert torch.equal(out, planned[0])
    assert torch.equal(lse, planned[1])
    for r in (0, 2):
        own = run(alone(case, r), num_kv_splits=splits)
        assert torch.equal(out[r], own[0][0])
        assert torch.equal(lse[r], own[1][0])


def test_an_outdated_plan_is_still_right(device):
    case = case_of([300, 5, 130], device=device)
    plan = poisoned_plan(case)
    for lengths in ([900, 100, 1], [10, 700, 0], [0, 0, 2000]):
        check(case, plan=plan.update(torch.tensor(lengths)))


def test_index_dtypes_strides_and_empty_batches(device):
    case = case_of([70, 3], index_dtype=torch.int64, device=device)
    wide = torch.empty(2, 4, 48, device=device)
    wide[..., 16:32] = case.q
    case.q = wide[..., 16:32]
    check(case)
    none = decode_attention(
        case.q[:0],
        case.k_cache,
        case.v_cache,
        case.kv_indptr[:1],
        case.kv_indices[:0],
        backend="triton",
    )
    assert none.shape == (0, 4, 16)


def test_a_crowded_chip_takes_smaller_programs(device):
    case = case_of([70, 5, 33, 0, 1, 2, 64, 100], dtype=torch.float16, d=128, device=device)
    plan = poisoned_plan(case)
    assert plan.tiles_for(8) is plan.tiles.crowded
    assert plan.tiles_for(2) is plan.tiles
    check(case, plan=plan)


def test_kernels_compile_for_gpus_without_spills():
    pytest.importorskip("triton")
    from compile_check import compile_cases

    reports = compile_cases("attention_decode")
    assert {r["arch"] for r in reports} == {75, 80, 86, 89, 90}
    assert all(r["spill_bytes"] == 0 or "MLA" in r["name"] for r in reports)


def test_half_precision(device):
    check(case_of([130, 17], dtype=torch.float16, d=32, device=device), num_kv_splits=2)


# --- compiled only ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"q_heads": 32, "kv_heads": 8, "d": 128},
        {"q_heads": 9, "kv_heads": 3, "d": 64},
        {"q_heads": 8, "kv_heads": 8, "d": 80},
        {"q_heads": 24, "kv_heads": 1, "d": 256},
        {"q_heads": 16, "kv_heads": 2, "d": 192, "d_v": 128},
        {"q_heads": 128, "kv_heads": 1, "d": 576, "d_v": 512, "shared_kv": True},
        {"q_heads": 20, "kv_heads": 1, "d": 288, "d_v": 256, "shared_kv": True},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_full_size(shape, dtype):
    lengths = [4096, 1, 0, 1000, 63, 64, 65, 2047]
    sinks = torch.linspace(-1, 3, shape["q_heads"])
    for options in (
        {},
        {"sinks": sinks, "logit_cap": 20.0, "sliding_window": 700, "xai_temperature_len": 512},
    ):
        case = case_of(lengths, page_size=16, dtype=dtype, device="cuda", **shape, **options)
        check(case)
        check(case, num_kv_splits=5)
        check(
            case, plan=poisoned_plan(case, None, sliding_window=options.get("sliding_window", -1))
        )


@pytest.mark.gpu
def test_many_short_uneven_requests():
    lengths = [int(64 * 32 ** (i / 63)) for i in range(64)]
    case = case_of(
        lengths, q_heads=32, kv_heads=8, d=128, dtype=torch.bfloat16, device="cuda", page_size=16
    )
    check(case, plan=poisoned_plan(case, None))
    check(case)


@pytest.mark.gpu
def test_fp8_pool():
    case = case_of(
        [700, 33],
        d=128,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        k_scale=0.5,
        v_scale=2.0,
        device="cuda",
    )
    check(case, num_kv_splits=3)


@pytest.mark.gpu
def test_one_plan_serves_a_captured_graph_as_lengths_change():
    case = case_of(
        [3000, 3000, 3000, 3000], q_heads=32, kv_heads=8, d=128, dtype=torch.bfloat16, device="cuda"
    )
    starts = case.kv_indptr.clone()
    plan = AttentionPlan(4, 32, case.k_cache, case.v_cache).update(torch.tensor([1, 1, 1, 1]))
    out = case.poisoned_out()

    def step():
        decode_attention(*case.decode_args(), plan=plan, out=out)

    whole = [case.kv_indices[starts[r] : starts[r + 1]].clone() for r in range(4)]
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([3000, 1, 64, 700], [1, 1, 1, 1], [2999, 3000, 2500, 65], [0, 5, 0, 3000]):
        lists = torch.cat([whole[r][:n] for r, n in enumerate(lengths)])
        case.kv_indices[: len(lists)] = lists
        case.kv_indptr.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        plan.update(torch.tensor(lengths))
        plan.partial.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, case.want_decode()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b75_bitwise_equal_at_full_size(dtype):
    shape = {"q_heads": 32, "kv_heads": 8, "d": 128, "dtype": dtype, "device": "cuda"}
    case = case_of([4096, 17, 1, 300, 2048, 4095, 64, 5000], **shape)
    out, lse = run(case, num_kv_splits=8)
    for _ in range(3):
        again = run(case, num_kv_splits=8)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
    for r in range(8):
        own = run(alone(case, r), num_kv_splits=8)
        assert torch.equal(out[r], own[0][0])
        assert torch.equal(lse[r], own[1][0])
