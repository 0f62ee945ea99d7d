"""The unified kernel: exact for every list it may get, and the same bits at full size on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import OPTION_SETS, Case, assert_close, make_case, random_mask
from test_determinism import unified

from minikv.attention import extend_attention_unified
from minikv.attention.tiles import grid_places, unified_tiles

PREFIX, NEW = [40, 0, 5], [35, 7, 0]


def check(case: Case, longest: int | None = None) -> None:
    settings = {**case.options, "max_extend_len": longest, "return_lse": True, "backend": "triton"}
    got, lse = extend_attention_unified(*case.unified_args(), **settings, out=case.poisoned_out())
    want, want_lse = case.want_unified()
    assert_close(got, want)
    assert_close(lse, want_lse, case.q.dtype)


@pytest.mark.parametrize("longest", [None, 35])
@pytest.mark.parametrize("name", ["plain", "window", "not_causal", "log_temperature"])
def test_equals_the_oracle_in_both_grids(device, name, longest):
    check(
        make_case(PREFIX, NEW, q_heads=1, kv_heads=1, device=device, **OPTION_SETS[name]), longest
    )


@pytest.mark.parametrize("skip", [False, True])
def test_custom_masks(device, skip):
    masks = random_mask(PREFIX, NEW)
    check(
        make_case(PREFIX, NEW, q_heads=1, kv_heads=1, device=device, skip_prefix_mask=skip, **masks)
    )


def test_lists_that_hold_only_the_window(device):
    """Dropping the entries that no query sees, and saying so with window_start, leaves the bits
    alone."""
    case = make_case(
        [90], [20], q_heads=1, kv_heads=1, page_size=1, device=device, sliding_window=15
    )
    whole = extend_attention_unified(*case.unified_args(), **case.options, backend="triton")
    for dropped in (1, 75):
        trimmed = extend_attention_unified(
            case.q, case.k_cache, case.v_cache, case.qo_indptr,
            case.kv_indptr - torch.tensor([0, dropped]).to(device),
            case.kv_indices[dropped:], case.prefix_lens - dropped, **case.options,
            window_start=torch.tensor([dropped], device=device), backend="triton",
        )  # fmt: skip
        assert torch.equal(trimmed, whole)


def test_the_grid_has_room_for_tiles_anchored_at_position_0():
    for prefix, lengths in (([63], [2]), ([1, 62], [64, 66]), ([0, 5, 63], [0, 200, 1])):
        needed = [
            -(-(p + n) // 64) - p // 64 if n else 0 for p, n in zip(prefix, lengths, strict=True)
        ]
        for longest in (None, max(lengths)):
            compact, places = grid_places(sum(lengths), len(lengths), 64, 2, longest)
            assert places >= (sum(needed) if compact else max(needed))


def test_tile_sizes_depend_on_head_dims_and_dtype_only():
    for d, d_v in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)):
        for dtype in (torch.bfloat16, torch.float32):
            chosen = [
                unified_tiles(c, d, d_v, dtype)
                for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
            ]
            assert len({(t.block_m, t.block_n, t.num_warps) for t in chosen}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 300, "logit_cap": 20.0}], ids=["plain", "window_and_cap"]
)
@pytest.mark.parametrize(
    ("heads", "d"), [((8, 2), (128, 128)), ((3, 1), (64, 64)), ((4, 4), (192, 128))]
)
def test_full_size_bits(options, heads, d):
    sizes = {
        "q_heads": heads[0],
        "kv_heads": heads[1],
        "d": d[0],
        "d_v": d[1],
        "dtype": torch.bfloat16,
    }
    lengths = [1500, 64, 1, 700, 333]
    case = make_case([0] * 5, lengths, page_size=16, device="cuda", **sizes, **options)
    cold = unified(case, [0, 1, 2, 3, 4], [0] * 5)
    assert torch.equal(unified(case, [0], [0])[0], cold[0])  # alone
    for order in ([4, 3, 2, 1, 0], [3, 0]):
        for r, got in zip(order, unified(case, order, [0] * len(order)), strict=True):
            assert torch.equal(got, cold[r])
    for boundary in (
        1,
        63,
        64,
        65,
        512,
        1000,
        1499,
    ):  # warm; and chunks, each of which sees only its own keys
        assert torch.equal(unified(case, [0, 4], [boundary, 0])[0], cold[0][boundary:])
    check(case)
