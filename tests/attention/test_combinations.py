"""All options in all combinations that make sense, on every way of running attention, against the
oracle."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case, check, make_case, random_mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HEAD_SIZES = [(16, 16), (24, 24), (64, 64), (80, 80), (96, 96), (112, 112), (128, 64), (256, 256)]
LATENT = [(576, 512), (288, 256), (192, 128)]


@st.composite
def batches(draw: Any, way: Any, decode: bool = False) -> Case:
    """Any batch and any options that go together; small ones where kernels are interpreted."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    interpreted = way == ("triton", "cpu")
    size = draw(st.integers(1, 2 if interpreted else 5))
    longest = 12 if interpreted else 60
    lengths = st.lists(
        st.one_of(st.integers(0, 9), st.integers(0, longest)), min_size=size, max_size=size
    )
    prefix, new = draw(lengths), [1] * size if decode else draw(lengths)
    latent = pick(False, False, True)
    d, d_v = pick(*(LATENT if latent else HEAD_SIZES))
    kv_heads = 1 if latent or interpreted else pick(1, 2, 3)
    ratio = pick(1, 2, 3) if d >= 128 or interpreted else pick(1, 2, 3, 4, 5, 7, 17, 24, 48)
    dtype = pick(torch.float32, torch.float16, *([] if interpreted else [torch.bfloat16]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["sm_scale"] = pick(0.0, 0.05, -0.1)
    if draw(st.booleans()):
        options["sliding_window"] = pick(0, 1, 4, 30)
    if draw(st.booleans()):
        options["logit_cap"] = pick(0.5, 3.0)
    if draw(st.booleans()):
        options |= {
            "xai_temperature_len": pick(2, 7),
            "xai_temperature_rule": pick("log", "inverse"),
        }
        if draw(st.booleans()):
            options["window_start"] = torch.arange(size, dtype=torch.int32) * 3
    if draw(st.booleans()):
        options["sinks"] = torch.randn(kv_heads * ratio, generator=torch.Generator().manual_seed(3))
    if not decode:
        options["causal"] = draw(st.booleans())
        if draw(st.booleans()):
            keep = pick(0.05, 0.6)
            options |= {
                **random_mask(prefix, new, keep=keep),
                "skip_prefix_mask": draw(st.booleans()),
            }
    k_scale, v_scale = (1.0, 1.0) if latent else pick((1.0, 1.0), (0.5, 2.0))
    return make_case(
        prefix,
        new,
        q_heads=kv_heads * ratio,
        kv_heads=kv_heads,
        d=d,
        d_v=d_v,
        shared_kv=latent,
        dtype=dtype,
        kv_dtype=dtype if interpreted else pick(dtype, dtype, torch.float8_e4m3fn),
        k_scale=k_scale,
        v_scale=v_scale,
        page_size=pick(1, 4, 16),
        index_dtype=pick(torch.int32, torch.int64),
        device=way.device,
        **options,
    )


def _walk(way: Any, decode: bool) -> None:
    forms = "decode" if decode else "extend unified"

    @settings(
        max_examples={("torch", "cpu"): 60, ("triton", "cpu"): 8}.get(way, 25),
        deadline=None,
        derandomize=way == ("triton", "cpu"),
        suppress_health_check=list(HealthCheck),
    )
    @given(batches(way, decode))
    def equal(case: Case) -> None:
        check(case, way.backend, forms)

    equal()


def test_extend_and_unified_equal_the_oracle(way):
    _walk(way, decode=False)


def test_decode_equals_the_oracle(way):
    _walk(way, decode=True)
