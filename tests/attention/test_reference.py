"""The oracle itself, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from cases import make_case, random_mask

from minikv.attention import reference_attention
from minikv.errors import ArgumentError


def _counting_pool(n: int, d: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys 0 (so that all weights are equal) and values i."""
    return torch.zeros(n, 1, d), torch.arange(float(n)).view(n, 1, 1)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _unified(prefix: int, new: int, **options: object) -> tuple[list[float], list[float]]:
    keys, values = _counting_pool(prefix + new)
    out, lse = reference_attention(
        torch.zeros(new, 1, 16),
        keys,
        values,
        _ints(0, prefix + new),
        torch.arange(prefix + new),
        qo_indptr=_ints(0, new),
        prefix_lens=_ints(prefix),
        **options,
    )
    return out.flatten().tolist(), lse.flatten().tolist()


def _two_keys(scores: tuple[float, float], **options: object) -> float:
    """Weight of the first of two keys whose scaled scores are given, as the output over values 1
    and 0."""
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1
    keys = torch.zeros(2, 1, 16)
    keys[:, 0, 0] = torch.tensor(scores)
    values = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    out, _ = reference_attention(q, keys, values, _ints(0, 2), _ints(0, 1), sm_scale=1.0, **options)
    return out.item()


def test_b53_few_queries_see_the_whole_prefix() -> None:
    out, lse = _unified(3, 2)
    assert out == pytest.approx([1.5, 2.0])
    assert lse == pytest.approx([math.log(4), math.log(5)])


def test_b56_a_window_of_four_sees_four_keys() -> None:
    assert _unified(8, 3, sliding_window=3)[0][-1] == pytest.approx(8.5)
    assert _unified(8, 3, sliding_window=0)[0] == pytest.approx([8.0, 9.0, 10.0])
    assert _unified(8, 3, sliding_window=11) == _unified(8, 3)


def test_window_is_one_sided_without_causality() -> None:
    assert _unified(1, 3, sliding_window=1, causal=False)[0] == pytest.approx([1.5, 2.0, 2.5])


def test_b58_a_row_without_keys_is_zero() -> None:
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    out, lse = _unified(0, 3, custom_mask=mask.flatten(), mask_indptr=_ints(0, 9))
    assert out == pytest.approx([0.0, 0.0, 1.0])
    assert lse == pytest.approx([0.0, -math.inf, math.log(3)])


def test_b59_the_cap_acts_on_the_natural_logit() -> None:
    assert _two_keys((10, 0), logit_cap=5.0) == pytest.approx(0.99200, abs=1e-5)
    assert _two_keys((10, 0)) == pytest.approx(0.99995, abs=1e-5)


def test_b61_a_cap_survives_large_logits() -> None:
    assert _two_keys((200, 0), logit_cap=1.0) == pytest.approx(0.73106, abs=1e-5)
    assert _two_keys((-200, 0), logit_cap=1.0) == pytest.approx(1 - 0.73106, abs=1e-5)


def test_b69_logits_beyond_half_precision() -> None:
    q, keys = (
        torch.full((1, 1, 16), 70.0, dtype=torch.float16),
        torch.full((2, 1, 16), 70.0, dtype=torch.float16),
    )
    values = torch.tensor([1.0, 3.0], dtype=torch.float16).view(2, 1, 1)
    out, lse = reference_attention(q, keys, values, _ints(0, 2), _ints(0, 1), sm_scale=1.0)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(78400 + math.log(2))


def test_a_sink_joins_the_denominator_once_and_not_the_lse() -> None:
    keys, values = _counting_pool(3)
    out, lse = reference_attention(
        torch.zeros(1, 1, 16),
        keys,
        values,
        _ints(0, 3),
        _ints(0, 1, 2),
        sinks=torch.tensor([math.log(3.0)]),
    )
    assert out.item() == pytest.approx((0 + 1 + 2) / 6)
    assert lse.item() == pytest.approx(math.log(3))


def test_temperatures() -> None:
    # Two keys, scores s and 0, the query at position 7 + 1 = 8 (window_start 7).
    def weight(s: float, **options: object) -> float:
        return _two_keys((s, 0.0), window_start=_ints(7), **options)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert weight(0.5, xai_temperature_len=4) == pytest.approx(sigmoid(0.5 * 3 / 2))
    assert weight(0.5, xai_temperature_len=8) == pytest.approx(sigmoid(0.5))  # log: only beyond 8
    assert weight(0.5, xai_temperature_len=8, xai_temperature_rule="inverse") == pytest.approx(
        sigmoid(0.5 * 8 / 9)
    )
    assert weight(0.5, xai_temperature_len=9, xai_temperature_rule="inverse") == pytest.approx(
        sigmoid(0.5)
    )
    # The cap comes first: temperature multiplies what it leaves.
    assert weight(10, logit_cap=1.0, xai_temperature_len=4) == pytest.approx(
        sigmoid(math.tanh(10) * 1.5)
    )


def test_scales_apply_to_the_pool_only() -> None:
    keys, values = torch.zeros(1, 1, 16), torch.ones(1, 1, 1)
    out, _ = reference_attention(
        torch.zeros(1, 1, 16),
        keys,
        values,
        _ints(0, 1),
        _ints(0),
        k=keys,
        v=values,
        qo_indptr=_ints(0, 1),
        k_scale=2.0,
        v_scale=3.0,
    )
    assert out.item() == pytest.approx((3 + 1) / 2)


def test_skip_prefix_mask_shows_the_prefix_and_keeps_the_width() -> None:
    mask = torch.tensor([[0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    options = {"custom_mask": mask.flatten(), "mask_indptr": _ints(0, 8)}
    assert _unified(2, 2, **options)[0] == pytest.approx([2.0, 2.5])
    assert _unified(2, 2, skip_prefix_mask=True, **options)[0] == pytest.approx([1.0, 1.5])
    # A window still applies beside the mask.
    assert _unified(2, 2, skip_prefix_mask=True, sliding_window=1, **options)[0] == pytest.approx(
        [1.5, 2.5]
    )


def test_grouped_heads_share_their_kv_head() -> None:
    values = torch.tensor([[[1.0], [2.0]]])  # one slot, KV heads 0 and 1
    out, _ = reference_attention(
        torch.zeros(1, 6, 16), torch.zeros(1, 2, 16), values, _ints(0, 1), _ints(0)
    )
    assert out.flatten().tolist() == [1, 1, 1, 2, 2, 2]


def test_the_three_forms_agree() -> None:
    case = make_case(
        [5, 0, 3], [1, 1, 1], sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]), sliding_window=3
    )
    for got in (case.want_unified(), case.want_decode()):
        for a, b in zip(case.want_extend(), got, strict=True):
            torch.testing.assert_close(a, b)


def test_unlisted_slots_and_empty_requests() -> None:
    case = make_case(
        [4, 0, 0, 2], [2, 0, 3, 0], page_size=4, **random_mask([4, 0, 0, 2], [2, 0, 3, 0])
    )
    out, _ = case.want_extend()
    assert out.isfinite().all()
    assert case.k_cache.isnan().any()


def test_what_no_query_sees_may_be_nan() -> None:
    case = make_case([6], [2], sliding_window=2)
    want, _ = case.want_extend()
    hidden = case.prefix_indices[:4].long()  # queries at 6 and 7 see from 4 on
    case.k_cache[hidden], case.v_cache[hidden] = torch.nan, torch.nan
    torch.testing.assert_close(case.want_extend()[0], want)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"logit_cap": -1.0}, "logit_cap"),
        ({"sliding_window": -2}, "sliding_window"),
        ({"xai_temperature_len": 1}, "xai_temperature_len"),
        ({"xai_temperature_rule": "linear"}, "xai_temperature_rule"),
        ({"k_scale": torch.tensor(2.0)}, "k_scale"),
        ({"page_size": 0}, "page_size"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"window_start": torch.zeros(5, dtype=torch.int32)}, "window_start"),
        ({"custom_mask": torch.zeros(1, dtype=torch.bool)}, "mask_indptr"),
        ({"mask_indptr": _ints(0, 1, 2)}, "custom_mask"),
        (
            {"custom_mask": torch.zeros(9, dtype=torch.uint8), "mask_indptr": _ints(0, 1, 2)},
            "custom_mask",
        ),
        ({"k_cache": torch.zeros(9, 3, 16), "v_cache": torch.zeros(9, 3, 16)}, "q"),
        ({"k_cache": torch.zeros(9, 2, 8)}, "k_cache"),
        ({"k_cache": torch.zeros(9, 2, 16, dtype=torch.float64)}, "k_cache"),
        ({"v_cache": torch.zeros(8, 2, 16)}, "v_cache"),
        ({"kv_indptr": torch.zeros(3)}, "kv_indptr"),
        ({"kv_indptr": _ints(0, 1)}, "kv_indptr"),
        ({"kv_indices": torch.zeros(2, 2, dtype=torch.int32)}, "kv_indices"),
        ({"q": torch.zeros(2, 16, 4).transpose(1, 2)}, "q"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float64)}, "q"),
    ],
)
def test_a_wrong_argument_is_named(change: dict, argument: str) -> None:
    good = {
        "q": torch.zeros(2, 4, 16),
        "k_cache": torch.zeros(9, 2, 16),
        "v_cache": torch.zeros(9, 2, 16),
        "kv_indptr": _ints(0, 1, 2),
        "kv_indices": _ints(1, 2),
    }
    reference_attention(**good)
    with pytest.raises(ArgumentError) as caught:
        reference_attention(**{**good, **change})
    assert caught.value.argument == argument
