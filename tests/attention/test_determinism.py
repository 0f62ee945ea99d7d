"""The same bits for a request whatever surrounds it: the unified kernel and fixed-split decode."""

from __future__ import annotations

import pytest
import torch
from cases import Case, make_case

from minikv.attention import decode_attention, extend_attention_unified


def unified(case: Case, requests: list[int], prefix: list[int]) -> list[torch.Tensor]:
    """Run the unified kernel on some of the batch's requests, in this order, each cut at another
    prefix length."""
    starts, rows = case.kv_indptr.tolist(), case.qo_indptr.tolist()
    lists = [case.kv_indices[starts[r] : starts[r + 1]] for r in requests]
    old = case.prefix_lens.tolist()
    queries = [
        case.q[rows[r] + p - old[r] : rows[r + 1]] for r, p in zip(requests, prefix, strict=True)
    ]

    def indptr(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor(
            [0, *torch.tensor([len(x) for x in parts]).cumsum(0).tolist()], device=case.q.device
        )

    got = extend_attention_unified(
        torch.cat(queries),
        case.k_cache,
        case.v_cache,
        indptr(queries),
        indptr(lists),
        torch.cat(lists),
        torch.tensor(prefix, device=case.q.device),
        **case.options,
        backend="triton",
    )
    assert isinstance(got, torch.Tensor)
    return list(got.split([len(x) for x in queries]))


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9, "logit_cap": 2.0}], ids=["plain", "window_and_cap"]
)
def test_unified_bits_do_not_depend_on_batch_order_or_boundary(device, options):
    case = make_case(
        [0, 0, 0], [50, 21, 3], q_heads=1, kv_heads=1, page_size=4, device=device, **options
    )
    together = unified(case, [0, 1, 2], [0, 0, 0])
    assert torch.equal(unified(case, [0], [0])[0], together[0])  # alone
    assert torch.equal(unified(case, [2, 0], [0, 0])[1], together[0])  # another order and company
    for boundary in (1, 32, 49):  # warm, and chunked at any place
        assert torch.equal(unified(case, [0], [boundary])[0], together[0][boundary:])


def test_b75_decode_bits_do_not_depend_on_the_batch(device):
    lengths = [300, 5, 64, 1, 130, 2, 7, 33]
    case = make_case(
        [n - 1 for n in lengths], [1] * 8, q_heads=2, kv_heads=1, page_size=4, device=device
    )
    starts = case.kv_indptr.tolist()

    def decode(requests: list[int]) -> torch.Tensor:
        lists = [case.kv_indices[starts[r] : starts[r + 1]] for r in requests]
        indptr = torch.tensor(
            [0, *torch.tensor([len(x) for x in lists]).cumsum(0).tolist()], device=device
        )
        got = decode_attention(
            case.q[requests],
            case.k_cache,
            case.v_cache,
            indptr,
            torch.cat(lists),
            num_kv_splits=4,
            backend="triton",
        )
        assert isinstance(got, torch.Tensor)
        return got

    alone = decode([0])[0]
    assert torch.equal(decode([1, 0])[1], alone)
    assert torch.equal(decode([3, 2, 1, 4, 0, 5, 6, 7])[4], alone)
