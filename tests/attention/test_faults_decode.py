"""Faults that decode attention has had elsewhere, by id, on every way of running it."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, attend, check, make_case

from minikv.errors import ArgumentError


def test_b66_short_requests_and_many_splits(way):
    case = make_case([0, 1, 2, 8], [1] * 4, device=way.device)
    want, want_lse = case.want_decode()
    out, lse = attend("decode", case, way.backend, return_lse=True, num_kv_splits=8)
    assert_close(out, want)
    assert_close(lse, want_lse)
    first = case.v_cache[case.kv_indices[0].long()].repeat_interleave(2, 0)
    torch.testing.assert_close(out[0], first)


def test_empty_requests_are_zero(way):
    case = make_case([3, 0, 1], [1, 0, 1], device=way.device)
    case.q = torch.cat((case.q[:1], case.q[:1], case.q[1:]))  # a query for the empty request too
    out, lse = attend("decode", case, way.backend, return_lse=True)
    assert_close(out, case.want_decode()[0])
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()


def test_b69_logits_beyond_half_precision(way):
    case = make_case(
        [1], [1], q_heads=1, kv_heads=1, dtype=torch.float16, device=way.device, sm_scale=1.0
    )
    slots = case.kv_indices.long()
    case.q[:], case.k_cache[slots] = 70, 70
    case.v_cache[slots] = torch.tensor([1.0, 3.0]).to(case.v_cache)[:, None, None].expand(2, 1, 16)
    assert attend("decode", case, way.backend)[0, 0, 0].item() == pytest.approx(2.0)


def test_b72_any_ratio_of_heads(way):
    for q_heads, kv_heads in ((3, 1), (5, 1), (12, 2), (14, 2), (7, 7)):
        check(
            make_case([3], [1], q_heads=q_heads, kv_heads=kv_heads, device=way.device),
            way.backend,
            "decode",
        )
    with pytest.raises(ArgumentError, match="5 query heads cannot share 2 KV heads"):
        attend("decode", make_case([3], [1], q_heads=5, kv_heads=2, device=way.device), way.backend)


def test_b62_b74_only_visible_slots_matter(way):
    for window in (-1, 3):
        case = make_case([8, 2], [1, 1], page_size=4, device=way.device, sliding_window=window)
        if window >= 0:
            unseen = case.kv_indices[: 8 - window].long()
            case.k_cache[unseen], case.v_cache[unseen] = torch.nan, torch.nan
        before = attend("decode", case, way.backend)
        assert_close(before, case.want_decode()[0])
        for pool in (case.k_cache, case.v_cache):
            pool.masked_fill_(pool.isnan(), 1e4)
        assert torch.equal(attend("decode", case, way.backend), before)


@pytest.mark.parametrize("latent", [(576, 512), (288, 256), (192, 128)])
def test_latent_rows_whose_values_are_their_first_columns(way, latent):
    d, d_v = latent
    check(
        make_case(
            [6, 1], [1, 1], q_heads=4, kv_heads=1, d=d, d_v=d_v, shared_kv=True, device=way.device
        ),
        way.backend,
        "decode",
    )


def test_scales_of_the_pool(way):
    check(
        make_case([6, 1], [1, 1], k_scale=0.5, v_scale=4.0, device=way.device),
        way.backend,
        "extend unified decode",
    )
