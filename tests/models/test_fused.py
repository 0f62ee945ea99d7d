"""Fused kernels of a decode step beside their PyTorch twins and float64, at odd sizes, with
poisoned outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_twins import (
    add_norm_torch,
    multiply_torch,
    project_torch,
    rotate_and_store_torch,
    silu_mul_torch,
)
from torch import Tensor

from minikv.attention import AttentionBackend, StepInputs
from minikv.errors import ArgumentError
from minikv.kernels.triton import HAVE_TRITON
from minikv.memory import KVPool, RequestTable
from minikv.memory.store import FP8
from minikv.models import ModelConfig, random_model
from minikv.models.fused.between import add_norm, silu_mul
from minikv.models.fused.decoder import FusedDecoder, fused_for
from minikv.models.fused.few_rows import add_parts, multiply
from minikv.models.fused.one_row import Tiles, project
from minikv.models.fused.qkv import rotate_and_store

CUDA = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value


@pytest.fixture(
    params=[torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d).split(".")[1]
)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cpu" and request.param is torch.bfloat16:
        pytest.skip("Triton's interpreter computes bf16 wrongly")
    return request.param


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel is given to fill holds NaN: what it leaves out shows."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def poisoned(*args: Any, real: Any = real, **options: Any) -> Tensor:
            made = real(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, poisoned)


def same(got: Tensor, twin: Tensor, want: Tensor) -> None:
    """Both within the dtype's tolerance of float64, and no further from each other."""
    bound = TOLERANCE[got.dtype] * max(1.0, want.abs().max().item())
    for made in (got, twin):
        assert made.dtype == got.dtype
        assert made.shape == want.shape
        assert (made.double() - want).abs().max() <= bound
    assert (got.double() - twin.double()).abs().max() <= bound


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


@pytest.mark.parametrize(("n", "k"), [(40, 72), (46, 96), (2, 16)])
@pytest.mark.parametrize(
    "parts", ["", "bias", "norm residual", "norm gated", "bias norm gated residual"]
)
def test_one_row_times_a_matrix(device, dtype, n, k, parts) -> None:
    gated = "gated" in parts
    x, w = torch.randn(1, k), torch.randn(n, k) / k**0.5
    options = {
        "bias": torch.randn(n) if "bias" in parts else None,
        "norm": torch.rand(k) + 0.5 if "norm" in parts else None,
        "residual": torch.randn(1, n // 2 if gated else n) if "residual" in parts else None,
    }
    x, w = x.to(device, dtype), w.to(device, dtype)
    given: dict[str, Any] = {
        name: None if t is None else t.to(device, dtype) for name, t in options.items()
    }
    more: dict[str, Any] = {"eps": 1e-5, "gated": gated}
    want = project_torch(
        x.double(), w.double(), **{name: wide(t) for name, t in given.items()}, **more
    )
    same(project(x, w, **given, **more), project_torch(x, w, **given, **more), want)


@pytest.mark.parametrize("tiles", [(16, 16, 4), (16, 32, 2), (32, 128, 4), (2, 64, 1)])
def test_tiles_may_be_wider_than_the_matrix_or_not_divide_it(device, dtype, tiles) -> None:
    x, w, r, g = (torch.randn(*s).to(device, dtype) for s in ((1, 80), (22, 80), (1, 22), (80,)))
    want = project_torch(x.double(), w.double(), residual=r.double(), norm=g.double(), eps=1e-5)
    got = project(x, w, residual=r, norm=g, eps=1e-5, tiles=Tiles(*tiles))
    same(got, project_torch(x, w, residual=r, norm=g, eps=1e-5), want)


@pytest.mark.parametrize("rows", [2, 17, 32])
@pytest.mark.parametrize(("n", "k"), [(40, 72), (46, 200)])
@pytest.mark.parametrize(("options", "tiles"), [
    ("", None), ("bias", None), ("gated", None), ("bias gated", (16, 64, 4, 2)),
    ("", (16, 16, 1, 1)), ("bias", (32, 16, 2, 3, 2)),
    ("bias", (16, 32, 2, 3, 4)), ("", (16, 128, 2, 3, 3)),
])  # fmt: skip
def test_a_few_rows_times_a_matrix(device, dtype, rows, n, k, options, tiles) -> None:
    gated = "gated" in options
    x, w = torch.randn(rows, k).to(device, dtype), (torch.randn(n, k) / k**0.5).to(device, dtype)
    bias = torch.randn(n).to(device, dtype) if "bias" in options else None
    got = multiply(x, w, bias, gated=gated, tiles=None if tiles is None else Tiles(*tiles))
    want = multiply_torch(x.double(), w.double(), wide(bias), gated=gated)
    same(add_parts(got, dtype), multiply_torch(x, w, bias, gated=gated), want)


def test_a_row_does_not_depend_on_the_others(device, dtype) -> None:
    x, w = (torch.randn(*s).to(device, dtype) for s in ((32, 96), (40, 96)))
    for gated in (False, True):
        all_rows = add_parts(multiply(x, w, gated=gated), dtype)
        for rows in (2, 5, 13, 18):
            assert torch.equal(
                add_parts(multiply(x[:rows], w, gated=gated), dtype), all_rows[:rows]
            )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "gated"),
    [(4096, 1024, False), (1024, 3072, False), (3072, 1024, True), (32768, 576, False)],
)
def test_a_row_does_not_depend_on_the_others_at_full_size(n, k, gated) -> None:
    x = torch.randn(32, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2 * n if gated else n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    all_rows = multiply(x, w, gated=gated)
    same(
        add_parts(all_rows, x.dtype),
        multiply_torch(x, w, gated=gated),
        multiply_torch(x.double(), w.double(), gated=gated),
    )
    for rows in (2, 3, 8, 9, 16, 17, 31):
        assert torch.equal(multiply(x[:rows], w, gated=gated), all_rows[..., :rows, :])


@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 72), (5, 100), (17, 16)])
def test_sum_and_norm(device, dtype, rows, k, with_sum) -> None:
    x, delta, norm = (torch.randn(*s).to(device, dtype) for s in ((rows, k), (rows, k), (k,)))
    given = x, delta if with_sum else None, norm
    twins, wants = add_norm_torch(*given, 1e-5), add_norm_torch(*map(wide, given), 1e-5)  # type: ignore[arg-type]
    for got, twin, want in zip(add_norm(*given, 1e-5), twins, wants, strict=True):
        same(got, twin, want)


@pytest.mark.parametrize("parts", [1, 3])
def test_products_in_parts_are_added_up_where_they_are_read(device, dtype, parts) -> None:
    x, delta, norm = torch.randn(5, 48), torch.randn(parts, 5, 48), torch.rand(48) + 0.5
    x, delta, norm = x.to(device, dtype), delta.to(device), norm.to(device, dtype)
    for got, want in zip(
        add_norm(x, delta, norm, 1e-5),
        add_norm(x, add_parts(delta, dtype), norm, 1e-5),
        strict=True,
    ):
        assert torch.equal(got, want)
    cos, sin = torch.randn(2, 9, 8).to(device, dtype)
    where = (
        torch.tensor([8, 0, 3, 3, 1], device=device),
        torch.tensor([5, 1, 4, 2, 3], device=device),
    )
    pools = [torch.zeros(7, 1, 16, device=device, dtype=dtype) for _ in range(4)]
    got = rotate_and_store(delta, cos, sin, *where, *pools[:2])
    assert torch.equal(got, rotate_and_store(add_parts(delta, dtype), cos, sin, *where, *pools[2:]))
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])


@pytest.mark.parametrize(("rows", "k"), [(1, 20), (3, 1500)])
def test_silu_times_gate(device, dtype, rows, k) -> None:
    x = 4 * torch.randn(rows, 2 * k).to(device, dtype)
    same(silu_mul(x), silu_mul_torch(x), silu_mul_torch(x.double()))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(3, 1, 16), (4, 2, 20), (9, 3, 64)])
def test_heads_are_turned_and_stored(device, dtype, q_heads, kv_heads, d, norm) -> None:
    tokens, slots = (
        6,
        torch.tensor([5, -1, 1, 99, 2, 7], device=device),
    )  # -1, 99 and 7 lie outside the pool
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * d).to(device, dtype)
    angle = torch.randn(9, d // 2)
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    positions = torch.tensor([8, 2, 0, 3, 3, 1], device=device)
    norms: dict[str, Any] = {}
    if norm:
        norms = {name: (torch.rand(d) + 0.5).to(device, dtype) for name in ("q_norm", "k_norm")}
    pools = [torch.full((7, kv_heads, d), 77.0, device=device, dtype=dtype) for _ in range(6)]
    with_eps = {**norms, "eps": 1e-5}
    got = rotate_and_store(qkv, cos, sin, positions, slots, *pools[:2], **with_eps)
    twin = rotate_and_store_torch(qkv, cos, sin, positions, slots, *pools[2:4], **with_eps)
    exact = [p.double() for p in pools[4:]]
    double = {name: t.double() for name, t in norms.items()}
    want = rotate_and_store_torch(
        *(qkv.double(), cos.double(), sin.double(), positions, slots, *exact), **double, eps=1e-5
    )
    same(got, twin, want)
    for mine, theirs, true in zip(pools[:2], pools[2:4], exact, strict=True):
        same(mine, theirs, true)
        assert (mine[[0, 3, 4, 6]] == 77).all(), "other slots are as they were"


@pytest.mark.gpu
def test_keys_go_to_an_fp8_pool() -> None:
    qkv = 300 * torch.randn(
        3, 4 * 64, device="cuda", dtype=torch.bfloat16
    )  # some beyond fp8's range
    cos, sin = torch.ones(2, 4, 32, device="cuda", dtype=torch.bfloat16).unbind()
    where = torch.tensor([0, 1, 3], device="cuda"), torch.tensor([4, 1, 2], device="cuda")
    pools = [torch.zeros(5, 1, 64, device="cuda", dtype=FP8) for _ in range(4)]
    rotate_and_store(qkv, cos, sin, *where, *pools[:2])
    rotate_and_store_torch(qkv, cos, sin, *where, *pools[2:])
    for mine, twin in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(mine.view(torch.uint8), twin.view(torch.uint8))
        assert mine.float().abs().max() == 448


SHAPES = {
    "qwen3": ModelConfig("qwen3", 2, 48, 72, 4, 2, 16, vocab_size=60, max_context=64, qk_norm=True),
    "biased, windowed": ModelConfig(
        "qwen2",
        2,
        32,
        48,
        3,
        1,
        32,
        100,
        64,
        qkv_bias=True,
        o_bias=True,
        tie_embeddings=True,
        sliding_window=(-1, 2),
    ),
    "sinks": ModelConfig("llama", 1, 32, 48, 2, 2, 16, 50, 64, sinks=True),
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("rows", [1, 3, 17, 33])
def test_a_fused_step_gives_the_decoders_logits(device, dtype, shape, rows) -> None:
    config = SHAPES[shape]
    decoder = random_model(config, seed=1, device=device, dtype=dtype, draw_on="cpu")
    lens = torch.randint(2, 6, (rows,))
    total, logits, pools, hidden = int(lens.sum()), [], [], []
    old = torch.randn(config.num_layers, 2, total, config.kv_heads, config.head_dim).to(
        device, dtype
    )
    for make in (lambda d: d, lambda d: FusedDecoder(d, 32)):
        pool = KVPool(256, 4, config.num_layers, config.kv_heads, config.head_dim, dtype, device)
        table = RequestTable(rows, 32, device)
        attention = AttentionBackend(
            pool,
            table,
            page_size=4,
            q_heads=config.q_heads,
            layers=decoder.attention_layers,
            backend="triton",
            max_requests=rows,
        )
        slots = torch.arange(4, 4 + total, device=device)
        taken = table.alloc(rows) or []
        table.write(taken, [0] * rows, lens, slots)
        for i in range(config.num_layers):
            pool.set_kv(i, slots, old[i, 0], old[i, 1])
        out_slots = slots[(lens.cumsum(0) - 1).to(device)]
        step = StepInputs(torch.tensor(taken), lens - 1, lens, out_slots, decode=True)
        metadata = attention.prepare(step)
        tokens = torch.arange(rows, device=device)
        given = tokens, (lens - 1).to(device), attention, metadata
        last = config.num_layers - 1
        model = make(decoder)
        out, states = model(*given, keep=(last, 0) if last else (0,))
        if rows == 3:
            at = torch.tensor([2, 0], device=device)
            torch.testing.assert_close(model(*given, logits_at=at), out[at])
            with pytest.raises(ArgumentError, match="keep="):
                model(*given, keep=(last + 1,))
        logits.append(out)
        hidden.append(states)
        pools.append(
            torch.stack([part(i) for i in range(config.num_layers) for part in (pool.k, pool.v)])
        )
    apart, bound = (
        (logits[0].double() - logits[1].double()).abs(),
        {torch.float32: 1e-4, torch.float16: 1e-2},
    )
    assert apart.max() <= bound.get(dtype, 8e-2), (
        "rounded at the same places, added up in another order"
    )
    assert apart.square().mean().sqrt() <= bound.get(dtype, 8e-2) / 5
    assert hidden[0].shape == (rows, min(config.num_layers, 2), config.hidden_size)
    assert (hidden[0].double() - hidden[1].double()).abs().max() <= bound.get(dtype, 8e-2)
    assert (pools[0].double() - pools[1].double()).abs().max() <= bound.get(dtype, 8e-2)


def test_the_cpu_and_latent_attention_keep_the_plain_decoder() -> None:
    decoder = random_model("tiny")
    config = decoder.config
    pool = KVPool(64, 4, config.num_layers, config.kv_heads, config.head_dim, torch.float32, "cpu")
    attention = AttentionBackend(pool, RequestTable(2, 32), page_size=4, q_heads=config.q_heads)
    assert fused_for(decoder, attention) is None


@pytest.mark.skipif(
    CUDA or not HAVE_TRITON, reason="compiled here by every other test, or Triton is not installed"
)
def test_fused_kernels_compile() -> None:
    from compile_check import compile_cases

    reports = compile_cases("models")
    assert len(reports) >= 20
