"""The PyTorch path: each option alone, every ratio of heads, long and ragged batches, and how
batches are padded."""

from __future__ import annotations

import pytest
import torch
from cases import OPTION_SETS, attend, check, make_case

from minikv.attention import cpu, decode_attention
from minikv.attention.options import Options
from minikv.errors import ArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RAGGED = ([5, 0, 3, 40, 0, 9], [3, 2, 0, 1, 0, 30])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_each_option_alone(name: str, dtype: torch.dtype) -> None:
    check(make_case(*RAGGED, dtype=dtype, **OPTION_SETS[name]), "torch")


@pytest.mark.parametrize("ratio", [*range(1, 17), 24, 48])
def test_any_ratio_of_heads(ratio: int) -> None:
    check(
        make_case([5, 9], [1, 1], q_heads=2 * ratio, kv_heads=2), "torch", "extend unified decode"
    )


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 100}, {"sliding_window": 300, "logit_cap": 3.0}]
)
def test_long_prompts_are_cut_into_blocks_of_queries(options: dict) -> None:
    check(make_case([3, 350], [600, 300], q_heads=2, kv_heads=1, **options), "torch")


def test_sliced_heads_and_wide_rows() -> None:
    case = make_case([4, 2], [3, 5])
    fused = torch.cat((case.q, case.k, case.v), 1)  # as a model's one projection gives them
    case.q, case.k, case.v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    check(case, "torch")


def test_new_values_need_not_be_columns_of_new_keys() -> None:
    case = make_case([4, 2], [3, 5], d=24, shared_kv=True, d_v=16, kv_heads=1)
    case.v = torch.randn_like(case.v)
    check(case, "torch", "extend")


def test_rows_of_q_beyond_the_batch_are_zero() -> None:
    case = make_case([4, 2], [3, 2])
    padded = torch.full((7, 4, 16), torch.nan)
    padded[:5] = case.q
    case.q, case.k, case.v = (
        padded,
        torch.nn.functional.pad(case.k, (0, 0, 0, 0, 0, 2)),
        torch.nn.functional.pad(case.v, (0, 0, 0, 0, 0, 2)),
    )
    check(case, "torch")
    assert attend("extend", case, "torch")[5:].eq(0).all()


@pytest.mark.parametrize("form", ["extend", "unified", "decode"])
def test_nothing_to_do(form: str) -> None:
    assert attend(form, make_case([], []), "torch").shape == (0, 4, 16)
    if form != "decode":
        assert attend(form, make_case([3, 0], [0, 0]), "torch").shape == (0, 4, 16)


def test_b79_a_padded_row_spoils_no_other() -> None:
    case = make_case([3, 5, 2], [1, 1, 1], page_size=4)
    want, _ = case.want_decode()
    q, k_cache, v_cache, indptr, indices = case.decode_args()  # slot 0 holds NaN
    indices = torch.cat((indices, torch.zeros(1, dtype=indices.dtype)))
    indptr = torch.cat((indptr, indptr[-1:] + 1))
    q = torch.cat((q, torch.full((1, 4, 16), torch.nan)))
    parts = cpu.plan(q, k_cache, v_cache, indptr, indices, Options(0.25))
    got = cpu.run(parts, q, k_cache, v_cache, Options(0.25))
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got[:3].double(), want, atol=2e-5, rtol=0)


# ---- how batches are padded


def _rectangles(lengths: list[int]) -> list[cpu.Rectangle]:
    """Rectangles of SmolLM2's heads (1,536 bytes per token)."""
    case = make_case([n - 1 for n in lengths], [1] * len(lengths), q_heads=9, kv_heads=3, d=64)
    return cpu.plan(*case.decode_args(), Options(1.0))


def test_equal_requests_are_one_rectangle_without_a_mask() -> None:
    (part,) = _rectangles([12, 12, 12])
    assert part.shape == (3, 1)
    assert part.rows == slice(0, 3)
    assert part.mask is None


def test_a_very_ragged_batch_is_not_padded_to_its_longest() -> None:
    lengths = [9000, *[40] * 30]
    parts = _rectangles(lengths)
    cells = sum(
        part.slots.numel() if isinstance(part.slots, torch.Tensor) else 9000 for part in parts
    )
    assert cells <= 2 * sum(lengths)
    assert len(parts) == 2


def test_keys_gathered_at_once_stay_within_a_budget() -> None:
    parts = _rectangles([2048] * 8)
    assert [part.shape[0] for part in parts] == [2, 2, 2, 2]


def test_a_run_of_slots_is_read_in_place() -> None:
    indptr, indices = torch.tensor([0, 5]), torch.arange(7, 12)
    q, pool = torch.zeros(1, 1, 16), torch.zeros(12, 1, 16)
    (part,) = cpu.plan(q, pool, pool, indptr, indices, Options(1.0))
    assert part.slots == slice(7, 12)


@pytest.mark.parametrize(
    ("indptr", "indices", "names"),
    [
        ([0, 4], [62, 63, 64, 65], "kv_indices"),
        ([0, 2], [-2, -1], "kv_indices"),
        ([0, 9], [1, 2, 3], "kv_indptr"),
    ],
)
def test_lists_that_leave_the_pool_are_refused(indptr, indices, names) -> None:
    pool = torch.randn(64, 1, 16)
    with pytest.raises(ArgumentError, match=names):
        decode_attention(
            torch.randn(1, 2, 16), pool, pool, torch.tensor(indptr), torch.tensor(indices)
        )
