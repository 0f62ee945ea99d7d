"""The two-stage kernel: what its launcher chooses (splits, grid, tiles) never changes what it
computes."""

from __future__ import annotations

import pytest
import torch
from cases import OPTION_SETS, Case, assert_close, attend, make_case, random_mask
from cases import check as check_case

from minikv.attention import extend_attention, options, tiles
from minikv.attention.extend import launch_extend
from minikv.attention.tiles import (
    Tiles,
    extend_tiles,
    grid_places,
    prefix_splits,
    shared_bytes,
    unified_tiles,
)

PREFIX, NEW = [40, 0, 5], [35, 7, 0]
SMALL = Tiles(32, 32, 4, 1)
BIG = pytest.param("cuda", marks=pytest.mark.gpu)


def check(
    case: Case, blocks: Tiles | None = None, splits: int | None = None, longest: int | None = None
) -> None:
    names = "q", "k", "v", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices"
    opts = options.check({**dict(zip(names, case.extend_args(), strict=True)), **case.options})
    out, lse = case.poisoned_out(), torch.empty(case.q.shape[:2], device=case.q.device)
    launch_extend(*case.extend_args(), out, lse, opts, longest, num_splits=splits, tiles=blocks)
    want, want_lse = case.want_extend()
    assert_close(out, want)
    assert_close(lse, want_lse, case.q.dtype)


@pytest.mark.parametrize("name", ["plain", "window", "cap_and_temperature", "scale0"])
def test_splits_of_the_prefix_change_nothing(device, name):
    check(
        make_case(PREFIX, NEW, q_heads=1, kv_heads=1, device=device, **OPTION_SETS[name]), SMALL, 2
    )


def test_equal_parts_end_inside_the_new_keys(device):
    check(make_case([33], [60], q_heads=1, kv_heads=1, device=device), SMALL, 3)


def test_split_prefix_counts_the_sink_once(device):
    check(
        make_case([70], [5], q_heads=2, kv_heads=1, device=device, sinks=torch.tensor([0.5, 3.0])),
        SMALL,
        3,
    )


def test_more_splits_than_keys(device):
    check(make_case([1, 0], [2, 3], q_heads=1, kv_heads=1, device=device), SMALL, 5)


@pytest.mark.parametrize("longest", [None, 35, 1000])
def test_both_grids_reach_every_row(device, longest):
    check(make_case(PREFIX, NEW, q_heads=1, kv_heads=1, device=device), SMALL, 1, longest)


def test_a_compact_grid_serves_many_empty_requests(device):
    check(
        make_case(
            [0] * 9 + [3], [0] * 4 + [33] + [0] * 4 + [2], q_heads=1, kv_heads=1, device=device
        ),
        SMALL,
    )


@pytest.mark.parametrize("skip", [False, True])
def test_custom_masks_in_splits(device, skip):
    masks = random_mask(PREFIX, NEW)
    case = make_case(
        PREFIX, NEW, q_heads=1, kv_heads=1, device=device, skip_prefix_mask=skip, **masks
    )
    check(case, SMALL, 2)


@pytest.mark.parametrize("scales", [{"sm_scale": -0.5}, {"k_scale": -1.5, "v_scale": 0.5}])
def test_negative_scales_take_the_masked_loop(device, scales):
    check(make_case([40], [5], q_heads=1, kv_heads=1, device=device, **scales), SMALL)


@pytest.mark.parametrize(
    "d", [(48, 48), (80, 80), (96, 64), (112, 112), (192, 128), (288, 256), (576, 512)]
)
def test_head_sizes(device, d):
    check(make_case([20], [3], q_heads=1, kv_heads=1, d=d[0], d_v=d[1], device=device))


def test_strided_inputs(device):
    case = make_case([5], [4], q_heads=2, kv_heads=2, device=device)
    qkv = torch.cat([case.q, case.k, case.v], 1)  # one projection's output: rows are not adjacent
    case.q, case.k, case.v = qkv.split(2, 1)
    check(case)


def test_int64_offsets_reach_beyond_two_gibibytes(device):
    case = make_case([3], [2], q_heads=1, kv_heads=1, device=device)
    # A view that strides far: slot s lies s * stride elements on, without so much memory being
    # touched.
    far = 1 << 20
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        storage = torch.empty(cache.shape[0] * far, dtype=cache.dtype, device=device)
        view = storage.as_strided(cache.shape, (far, cache.shape[2], 1))
        view.copy_(cache)
        setattr(case, name, view)
    check(case)


def test_fp16_in_both_modes(device):
    check(make_case([33], [20], q_heads=4, kv_heads=1, d=32, dtype=torch.float16, device=device))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_b64_tiles_are_large_enough_for_a_dot_and_fit_the_chip(capability, dtype):
    for d, d_v in (
        (16, 16),
        (64, 64),
        (80, 80),
        (128, 128),
        (192, 128),
        (256, 256),
        (288, 256),
        (576, 512),
    ):
        for blocks in (
            extend_tiles(capability, d, d_v, dtype),
            unified_tiles(capability, d, d_v, dtype),
        ):
            assert min(blocks.block_m, blocks.block_n) >= 16
            held = blocks.num_stages * blocks.block_n * (d + d_v)  # keys and values in flight
            if (
                d < 576 or dtype != torch.float32
            ):  # fp32 MLA, at the least tile, needs a server's chip
                assert held * dtype.itemsize <= shared_bytes(capability)


def test_the_grid_has_room_for_every_tile():
    for lengths in ([1], [64, 64], [65, 0, 1], [0, 0, 200], [3] * 40):
        tokens, batch = sum(lengths), len(lengths)
        for longest in (None, max(lengths)):
            compact, places = grid_places(tokens, batch, 64, 1, longest)
            assert places >= (
                sum(-(-n // 64) for n in lengths) if compact else -(-max(lengths) // 64)
            )
    assert grid_places(8 * 64, 8, 64, 1, 64) == (
        False,
        1,
    )  # even batches: no search, no empty programs
    assert grid_places(1000, 100, 64, 1, 901)[0]  # ragged: compact


def test_the_prefix_is_split_only_where_the_chip_would_idle():
    assert prefix_splits(132, 64, 16384, 64) == 4
    assert prefix_splits(132, 133, 16384, 64) == 1
    assert prefix_splits(132, 64, 100, 64) == 1


def test_descriptors_are_refused_where_the_copy_engine_cannot_go():
    k = torch.zeros(4, 2, 64, dtype=torch.float16)
    blocks, none = Tiles(64, 64, 4, 3, descriptors=True), (None, None)
    assert tiles.row_descriptors(k.transpose(0, 1), k, blocks) == none  # heads are not adjacent
    assert tiles.row_descriptors(k[..., :63], k, blocks) == none
    assert tiles.row_descriptors(k, k[..., :48].contiguous(), blocks) == none  # no power of two


@pytest.mark.parametrize("device", [BIG])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("prefix", "new", "heads", "d"),
    [
        ([4096, 100, 0, 1, 2000], [512, 1, 300, 64, 0], (32, 8), (128, 128)),
        ([512] * 8, [64] * 8, (9, 3), (64, 64)),
        ([0, 700], [1000, 129], (16, 16), (192, 128)),
        ([300], [200], (16, 1), (576, 512)),
        ([300, 5], [200, 7], (6, 2), (80, 80)),
        ([300, 5], [200, 7], (8, 8), (256, 256)),
    ],
)
def test_full_size(device, dtype, prefix, new, heads, d):
    sizes = {
        "q_heads": heads[0],
        "kv_heads": heads[1],
        "d": d[0],
        "d_v": d[1],
        "dtype": dtype,
        "page_size": 16,
    }
    masks = {} if sum(new) > 600 else random_mask(prefix, new)
    for option in (
        {},
        {"sliding_window": 100},
        {"logit_cap": 5.0, "xai_temperature_len": 64},
        masks,
    ):
        case = make_case(prefix, new, device=device, **sizes, **option)
        got = extend_attention(
            *case.extend_args(), **case.options, out=case.poisoned_out(), backend="triton"
        )
        want, _ = extend_attention(
            *(x.float() if x.is_floating_point() else x for x in case.extend_args()),
            **case.options, backend="torch", return_lse=True,
        )  # fmt: skip
        assert isinstance(got, torch.Tensor)
        assert_close(got, want)


@pytest.mark.parametrize("name", ["plain", "window", "not_causal"])
def test_pages_that_hold_whole_tiles(device, name, monkeypatch):
    """Tiles of the pool through descriptors give the bits of tiles through pointers, in both
    kernels."""
    asked = []
    real = tiles.row_descriptors

    def watched(*args):
        asked.append(args[0])
        return real(*args)

    monkeypatch.setattr(tiles, "row_descriptors", watched)
    for page_size, prefix, new in ((128, [130, 128, 0], [70, 1, 3]), (256, [300], [66])):
        bits = {}
        for promised in (page_size, 1):
            case = make_case(
                prefix,
                new,
                q_heads=2,
                kv_heads=2,
                d=64,
                dtype=torch.float16,
                page_size=page_size,
                device=device,
                **OPTION_SETS[name],
            )
            case.options["page_size"] = promised
            asked.clear()
            check_case(case, "triton")
            pool = [x for x in asked if x.shape[0] == case.k_cache.shape[0]]
            assert len(pool) == (2 if promised > 1 else 0), "one call of each kernel, or none"
            bits[promised] = [attend(form, case, "triton") for form in ("extend", "unified")]
        for paged, plain in zip(*bits.values(), strict=True):
            assert torch.equal(paged, plain)


@pytest.mark.parametrize("device", [BIG])
@pytest.mark.parametrize(
    ("d", "d_v"),
    [(64, 64), (80, 80), (96, 96), (256, 256), (192, 128), (288, 256), (320, 256), (576, 512)],
)
def test_fp8_pool(d, d_v, device):
    """Head sizes with and without a tail block, through the tiles of each."""
    for seed, (prefix, new) in enumerate([([100], [70]), ([31, 176, 33], [1, 53, 29])]):
        case = make_case(
            prefix,
            new,
            d=d,
            d_v=d_v,
            dtype=torch.bfloat16,
            kv_dtype=torch.float8_e4m3fn,
            k_scale=0.5,
            v_scale=2.0,
            seed=seed,
            device=device,
        )
        check(case)


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90])
def test_kernels_compile_for_gpus(arch):
    pytest.importorskip("triton")
    from compile_check import compile_cases

    reports = compile_cases("attention_extend", arch=arch)
    assert reports
    assert all(
        r["spill_bytes"] <= 96 or "mask" in r["name"] or "192/128 sm80" in r["name"]
        for r in reports
    )
