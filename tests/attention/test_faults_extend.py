"""Faults that extend attention has had elsewhere, by id, on every way of running it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import assert_close, attend, check, make_case, random_mask

from minikv.attention import decode_attention, extend_attention, extend_attention_unified
from minikv.attention.tiles import extend_tiles, unified_tiles
from minikv.device import capability_of
from minikv.errors import ArgumentError
from minikv.kernels.triton import INTERPRETED, tl, triton

BOTH = ["extend", "unified"]


def counting(prefix: int, new: int, way: Any, **options: Any) -> Any:
    """One head whose keys are 0 (all weights equal) and whose value at position i is i."""
    case = make_case([prefix], [new], q_heads=1, kv_heads=1, device=way.device, **options)
    values = torch.arange(float(prefix + new), device=way.device)[:, None, None].expand(-1, 1, 16)
    case.k[:], case.k_cache[case.kv_indices.long()] = 0, 0
    case.v[:], case.v_cache[case.kv_indices.long()] = values[prefix:], values
    return case


def two_scores(first: float, way: Any, **options: Any) -> Any:
    """One query over two keys with scaled scores `first` and 0, and values 1 and 0."""
    case = make_case([1], [1], q_heads=1, kv_heads=1, device=way.device, sm_scale=1.0, **options)
    old, new = case.kv_indices.tolist()
    case.q[:], case.k[:], case.k_cache[[old, new]] = 0, 0, 0
    case.q[..., 0], case.k_cache[old, 0, 0] = 1, first
    case.v[:], case.v_cache[new], case.v_cache[old] = 0, 0, 1
    return case


def column(result: torch.Tensor) -> list[float]:
    return result[:, 0, 0].tolist()


@pytest.mark.parametrize("form", BOTH)
def test_b53_queries_are_the_last_positions_not_the_first(way, form):
    assert column(attend(form, counting(3, 2, way), way.backend)) == pytest.approx([1.5, 2.0])


def test_b55_window_and_sinks_agree_in_both_kernels(way):
    sinks = torch.tensor([0.5, -1.0])
    for options in (
        {},
        {"sinks": sinks},
        {"sliding_window": 3},
        {"sliding_window": 3, "sinks": sinks},
    ):
        check(make_case([5], [3], q_heads=2, kv_heads=2, device=way.device, **options), way.backend)


@pytest.mark.parametrize("form", BOTH)
def test_b56_a_window_of_four_keys(way, form):
    assert column(attend(form, counting(8, 3, way, sliding_window=3), way.backend))[
        2
    ] == pytest.approx(8.5)
    assert column(
        attend(form, counting(8, 3, way, sliding_window=0), way.backend)
    ) == pytest.approx([8, 9, 10])
    wide, none = (
        attend(form, counting(8, 3, way, **o), way.backend) for o in ({"sliding_window": 11}, {})
    )
    assert_close(wide, none)


def test_b56_extend_and_decode_see_the_same_window(way):
    case = counting(10, 1, way, sliding_window=3)
    assert column(attend("decode", case, way.backend)) == pytest.approx([8.5])
    assert column(attend("extend", case, way.backend)) == pytest.approx([8.5])


def test_b58_rows_without_a_visible_key(way):
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    options = {"custom_mask": mask.flatten(), "mask_indptr": torch.tensor([0, 9, 9])}
    case = make_case([0, 0], [3, 0], device=way.device, **options)
    check(case, way.backend)
    for form in BOTH:
        out, lse = attend(form, case, way.backend, return_lse=True)
        assert out[1].eq(0).all()
        assert lse[1].eq(-math.inf).all()


@pytest.mark.parametrize("form", BOTH)
def test_b59_the_cap_acts_on_the_natural_logit(way, form):
    got = attend(form, two_scores(10.0, way, logit_cap=5.0), way.backend)
    assert column(got) == pytest.approx([0.99200], abs=1e-5)


@pytest.mark.parametrize("form", BOTH)
def test_b61_a_cap_survives_large_logits(way, form):
    for score, want in ((200.0, 0.73106), (-200.0, 0.26894)):
        got = attend(form, two_scores(score, way, logit_cap=1.0), way.backend)
        assert column(got) == pytest.approx([want], abs=1e-5)


@pytest.mark.parametrize("lengths", [(1, 2), (6, 3)])
def test_b62_unused_and_out_of_window_slots_may_hold_nan(way, lengths):
    for window in (-1, 3):
        case = make_case(
            [lengths[0]], [lengths[1]], page_size=4, device=way.device, sliding_window=window
        )
        unseen = case.kv_indices[: max(lengths[0] - window, 0) if window >= 0 else 0].long()
        case.k_cache[unseen], case.v_cache[unseen] = torch.nan, torch.nan
        assert case.k_cache[0].isnan().all()
        check(case, way.backend)


def test_b62_keys_that_a_mask_hides_from_all_may_hold_nan(way):
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, [1, 4]] = False  # one of the prefix, one of the new
    case = make_case(
        [3],
        [2],
        device=way.device,
        custom_mask=mask.flatten(),
        mask_indptr=torch.tensor([0, 10]),
        page_size=4,
    )
    hidden = case.kv_indices[[1, 4]].long()
    case.k[1], case.v[1], case.k_cache[hidden], case.v_cache[hidden] = (torch.nan,) * 4
    check(case, way.backend)


def test_b64_tiles_fit_the_tensor_cores(way):
    if way.backend == "triton":
        for tiles in (extend_tiles, unified_tiles):
            chosen = tiles(capability_of(torch.device(way.device)), 8, 8, torch.float32)
            assert min(chosen.block_m, chosen.block_n) >= 16
    check(make_case([4], [1], d=8, device=way.device), way.backend, "extend unified decode")


def test_b65_more_than_sixteen_query_heads_per_kv_head(way):
    slow = way == ("triton", "cpu")  # interpreted: one ratio, one form
    for q_heads in (17,) if slow else (17, 24):
        case = make_case([2], [5], q_heads=q_heads, kv_heads=1, device=way.device)
        check(case, way.backend, "extend" if slow else "extend unified")


@pytest.mark.parametrize("form", BOTH)
def test_b69_logits_beyond_half_precision(way, form):
    case = make_case(
        [1], [1], q_heads=1, kv_heads=1, dtype=torch.float16, device=way.device, sm_scale=1.0
    )
    old, new = case.kv_indices.tolist()
    case.q[:], case.k[:], case.k_cache[[old, new]] = 70, 70, 70
    case.v[:], case.v_cache[new], case.v_cache[old] = 3, 3, 1
    assert column(attend(form, case, way.backend)) == pytest.approx([2.0])


def test_b72_any_ratio_of_heads(way):
    slow = way == ("triton", "cpu")  # interpreted: a program per head, so the pairs with few heads
    for q_heads, kv_heads in (
        ((3, 1), (5, 1), (2, 2)) if slow else ((3, 1), (5, 1), (12, 2), (14, 2), (7, 7))
    ):
        check(
            make_case([3], [2], q_heads=q_heads, kv_heads=kv_heads, device=way.device), way.backend
        )
    with pytest.raises(ArgumentError, match="5 query heads cannot share 2 KV heads"):
        attend("extend", make_case([3], [2], q_heads=5, kv_heads=2, device=way.device), way.backend)


def test_b74_tail_of_the_last_page_is_never_visible(way):
    case = make_case([4], [2], page_size=4, device=way.device)
    before = [attend(form, case, way.backend) for form in BOTH]
    unused = torch.ones(case.k_cache.shape[0], dtype=torch.bool, device=way.device)
    unused[case.kv_indices.long()] = False
    case.k_cache[unused], case.v_cache[unused] = 1e4, -1e4
    for form, old in zip(BOTH, before, strict=True):
        assert torch.equal(attend(form, case, way.backend), old)


# ---- Triton: language and interpreter


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted in this process")
def test_b121_interpreted_bf16_is_refused():
    case = make_case([2], [1], dtype=torch.bfloat16)
    for form in (*BOTH, "decode"):
        with pytest.raises(ArgumentError, match="bfloat16"):
            attend(form, case, "triton")


@triton.jit
def _masked_scalar_store(target):
    tl.store(target, 1, mask=False)


@triton.jit
def _masked_sum(source, target):
    at = tl.arange(0, 16)
    tl.store(target, tl.sum(tl.load(source + at, mask=at < 4, other=0), 0))


def test_b123_a_masked_scalar_store_writes_nothing(device):
    target = torch.tensor([-1], device=device)
    _masked_scalar_store[(1,)](target)
    assert target.tolist() == [-1]


def test_b124_a_masked_load_gives_its_other(device):
    target = torch.zeros(1, device=device)
    _masked_sum[(1,)](torch.ones(4, device=device), target)
    assert target.tolist() == [4.0]


def test_the_public_functions_return_what_they_promise(way):
    case = make_case([3], [1], dtype=torch.float16, device=way.device)
    out = extend_attention(*case.extend_args(), backend=way.backend)
    assert (out.shape, out.dtype) == ((1, 4, 16), torch.float16)
    buffer = torch.empty_like(out)
    result = decode_attention(*case.decode_args(), backend=way.backend, out=buffer, return_lse=True)
    assert result[0] is buffer
    assert (result[1].shape, result[1].dtype) == ((1, 4), torch.float32)


def test_an_output_in_the_memory_of_an_input_is_refused(way):
    case = make_case([3], [2], dtype=torch.float16, device=way.device)
    q, k, v, *lists = case.extend_args()
    whole = torch.zeros(2 * q.numel(), dtype=q.dtype, device=way.device)
    q, beside = whole[: q.numel()].view(q.shape), whole[q.numel() :].view(q.shape)
    half_over = whole[q.numel() // 2 : -(q.numel() // 2)].view(q.shape)
    for out in (q, half_over):
        with pytest.raises(ArgumentError, match="lies in the memory of q"):
            extend_attention(q, k, v, *lists, backend=way.backend, out=out)
    q_decode, *rest = case.decode_args()
    with pytest.raises(ArgumentError, match="lies in the memory of q"):
        decode_attention(q_decode, *rest, backend=way.backend, out=q_decode)
    extend_attention(q, k, v, *lists, backend=way.backend, out=beside)


@pytest.mark.parametrize("form", ["extend", "unified"])
def test_a_mask_that_is_too_short_is_refused(form):
    """Request 1 needs 2 × 5 entries from 6 on; one is missing."""
    case = make_case([1, 3], [2, 2], **random_mask([1, 3], [2, 2]))
    attend(form, case, "torch")
    case.options["custom_mask"] = case.options["custom_mask"][:-1]
    with pytest.raises(
        ArgumentError, match=r"custom_mask.*too short: request 1 needs 2 × 5 entries from 6 on"
    ):
        attend(form, case, "torch")


@pytest.mark.parametrize("cap", [1e4, 1e7, 1e8, 1e15, 1e30])
def test_p12_a_large_cap_changes_nothing(cap, way):
    """Scores of up to about 30: a cap of 10,000 moves them by 1e-4 at most."""
    for form, new in (("extend", 3), ("unified", 3), ("decode", 1)):
        case = make_case([20], [new], q_heads=1, kv_heads=1, device=way.device, sm_scale=2.0)
        capped = case.with_options(logit_cap=cap)
        check(capped, way.backend, form)
        assert_close(attend(form, capped, way.backend), attend(form, case, way.backend).double())


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_p11_a_mask_that_is_too_wide_is_refused(form, backend):
    """Rows of 24 entries where 20 new tokens see 23 keys: all rows but the first are sheared."""
    mask = torch.ones(20, 24, dtype=torch.bool)
    case = make_case([3], [20], custom_mask=mask.flatten(), mask_indptr=torch.tensor([0, 480]))
    with pytest.raises(ArgumentError, match=r"mask_indptr.*request 0.*20 new tokens × 23 keys"):
        attend(form, case, backend)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("bounds", [[0, 29, 44], [1, 29, 44], [0, 27, 42], [-28, 0, 15]])
def test_p11_every_part_of_a_mask_has_its_own_size(form, bounds):
    case = make_case([3, 2], [4, 3], **random_mask([3, 2], [4, 3]))
    assert case.options["mask_indptr"].tolist() == [0, 28, 43]
    attend(form, case, "torch")
    case.options["mask_indptr"] = torch.tensor(bounds)
    case.options["custom_mask"] = torch.ones(50, dtype=torch.bool)
    if bounds == [1, 29, 44]:  # the parts may begin anywhere
        attend(form, case, "torch")
        return
    with pytest.raises(ArgumentError, match="mask_indptr"):
        attend(form, case, "torch")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_b62_blocks_of_unlike_size_hide_masked_keys(poison, way):
    """Padding of the shorter request repeats its last query, and no other row of the mask."""
    q = torch.ones(3, 1, 16, device=way.device)
    pool = torch.ones(4, 1, 16, device=way.device)
    values = pool.clone()
    values[2] = poison
    on = {"device": way.device}
    lists = (
        torch.tensor([0, 1, 3], **on),
        torch.tensor([0, 2, 3], **on),
        torch.tensor([1, 2, 3], **on),
    )
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool, **on)
    masked = {"custom_mask": mask, "mask_indptr": torch.tensor([0, 3, 9], **on)}
    out = extend_attention(q, q, q, pool, values, *lists, backend=way.backend, **masked)
    assert out[:, 0, 0].tolist() == [1, 1, 1]


def test_b62_a_key_masked_for_all_of_a_long_request(way):
    """More queries than one block: the last block is shorter."""
    n = 300
    case = make_case([5], [n], q_heads=1, kv_heads=1, device=way.device)
    mask = torch.ones(n, n + 5, dtype=torch.bool, device=way.device)
    mask[:, 3] = False
    case.v_cache[case.prefix_indices[3].item()] = torch.nan
    bounds = torch.tensor([0, mask.numel()], device=way.device)
    case.options |= {"custom_mask": mask.flatten(), "mask_indptr": bounds}
    assert attend("extend", case, way.backend).isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("name", "bounds"),
    [("qo_indptr", [-1, 2, 4]), ("qo_indptr", [0, 2, 6]), ("qo_indptr", [1, 2, 4]),
     ("qo_indptr", [0, 5, 4]), ("kv_indptr", [0, 9, 1]), ("kv_indptr", [-1, 0, 1])],
)  # fmt: skip
def test_bounds_that_leave_the_batch_are_refused(name, bounds, backend):
    x, pool = torch.ones(4, 1, 16), torch.ones(8, 1, 16)
    lists = {"qo_indptr": [0, 2, 4], "kv_indptr": [0, 1, 1], "kv_indices": [3]} | {name: bounds}
    tensors = {key: torch.tensor(value) for key, value in lists.items()}
    with pytest.raises(ArgumentError, match=name):
        extend_attention(x, x, x, pool, pool, **tensors, backend=backend)


@pytest.mark.parametrize("prefix", [3, 0, -1])
def test_prefix_lens_that_do_not_fit_the_list_are_refused(prefix):
    x, pool = torch.ones(2, 1, 16), torch.ones(8, 1, 16)
    lists = (
        torch.tensor([0, 2]),
        torch.tensor([0, 3]),
        torch.tensor([1, 2, 3]),
        torch.tensor([prefix]),
    )
    with pytest.raises(
        ArgumentError, match=r"prefix_lens.*request 0 must be 3 listed slots less 2 new tokens"
    ):
        extend_attention_unified(x, pool, pool, *lists)
