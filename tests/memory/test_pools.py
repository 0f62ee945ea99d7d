"""K and V arrive in their slots, bit for bit, whatever their strides and types, and nothing else
changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from minikv import device as devices
from minikv.errors import ArgumentError
from minikv.kernels.triton import HAVE_TRITON, tl, triton
from minikv.memory import DEFAULT_SHARE, KVPool, MLAPool, PagedAllocator, plan_size, pools
from minikv.memory.store import FP8, row_offset

CUDA = torch.cuda.is_available()
KINDS = [
    ("torch", "cpu"),
    pytest.param(
        ("triton", "cpu"),
        marks=pytest.mark.skipif(CUDA or not HAVE_TRITON, reason="no interpreter"),
    ),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request) -> dict[str, str]:
    kernels, device = request.param
    return {"kernels": kernels, "device": device}


def fused(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of one fused projection, awkward values included."""
    qkv = torch.randn(tokens, (heads * 4) * dim, device=device) * 3
    qkv[0, -1], qkv[0, -dim - 1], qkv[1, -2] = float("nan"), float("inf"), -0.0
    parts = qkv.to(dtype).view(tokens, heads * 4, dim)
    return parts[:, heads * 2 : heads * 3], parts[:, heads * 3 :]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def interpreted_bf16(kind: dict[str, str], *dtypes: torch.dtype) -> bool:
    return kind == {"kernels": "triton", "device": "cpu"} and torch.bfloat16 in dtypes


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (3, 64), (8, 128), (2, 80), (5, 20), (16, 256)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_set_kv(kind, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if interpreted_bf16(kind, dtype):
        pytest.skip("refused, see below")
    pool = KVPool(48, 4, 2, *shape, dtype, **kind)
    pool.k(1).fill_(7)
    pool.v(1).fill_(8)
    want = pool.k(1).clone(), pool.v(1).clone()
    k, v = fused(29, *shape, dtype, kind["device"])
    slots = torch.randperm(52, device=kind["device"])[:29]
    for token, slot in enumerate(slots.tolist()):
        want[0][slot], want[1][slot] = k[token], v[token]
    for cast in (torch.int64, torch.int32):
        pool.set_kv(1, slots.to(cast), k, v)
        assert torch.equal(bits(pool.k(1)), bits(want[0]))
        assert torch.equal(bits(pool.v(1)), bits(want[1]))
    assert not pool.k(0).any()
    assert not pool.v(0).any()


@pytest.mark.parametrize(("of", "to"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_types_are_converted_as_pytorch_does(kind, of, to) -> None:
    if interpreted_bf16(kind, of, to):
        pytest.skip("refused, see below")
    pool = KVPool(16, 4, 1, 2, 8, to, **kind)
    k, v = fused(5, 2, 8, of, kind["device"])
    slots = torch.tensor([9, 4, 19, 0, 7], device=kind["device"])
    pool.set_kv(0, slots, k, v)
    torch.testing.assert_close(pool.k(0)[slots], k.to(to), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pool.v(0)[slots], v.to(to), rtol=0, atol=0, equal_nan=True)


def test_stored_is_value_over_scale(kind) -> None:
    pool = KVPool(16, 4, 1, 2, 8, torch.float32, **kind)
    k, v = fused(5, 2, 8, torch.float16, kind["device"])
    slots = torch.arange(3, 8, device=kind["device"])
    pool.set_kv(0, slots, k, v, k_scale=0.3, v_scale=7.0)
    scales = torch.tensor([0.3, 7.0], device=kind["device"])
    assert torch.equal(bits(pool.k(0)[3:8]), bits(k.float() / scales[0]))
    assert torch.equal(bits(pool.v(0)[3:8]), bits(v.float() / scales[1]))


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.37])
@pytest.mark.parametrize("of", FLOATS, ids=str)
def test_fp8_saturates_and_keeps_nan(kind, of, scale) -> None:
    if kind["device"] == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    k, v = fused(40, 2, 64, of, kind["device"])
    k = k.clone()
    k[3:6] *= 1000
    pool = KVPool(64, 16, 1, 2, 64, FP8, **kind)
    slots = torch.randperm(80, device=kind["device"])[:40]
    if kind == {"kernels": "triton", "device": "cpu"}:
        with pytest.raises(ArgumentError, match="interpreter"):
            pool.set_kv(0, slots, k, v, scale, scale)
        return
    pool.set_kv(0, slots, k, v, scale, scale * 2)
    steps = torch.arange(256, dtype=torch.uint8).view(FP8).float().double()
    steps = steps[steps.isfinite()].unique()
    for part, cache, s in ((k, pool.k(0), scale), (v, pool.v(0), scale * 2)):
        got, value = cache[slots].float().double().cpu(), (part.float() / s).double().cpu()
        assert torch.equal(got.isnan(), value.isnan())
        nearest = (
            (value.nan_to_num(0, 448, -448).clamp(-448, 448)[..., None] - steps).abs().amin(-1)
        )
        distance = (got - value.clamp(-448, 448)).abs().nan_to_num(0)
        assert torch.equal(distance, torch.where(value.isnan(), 0, nearest))


@pytest.mark.parametrize("rank", [(512, 64), (6, 2), (32, 16)])
def test_mla_rows_and_their_view(kind, rank) -> None:
    pool = MLAPool(32, 8, 2, *rank, torch.float16, **kind)
    width = sum(rank)
    assert pool.k(0).shape == (40, 1, width)
    assert pool.v(0).shape == (40, 1, rank[0])
    assert pool.v(1).data_ptr() == pool.k(1).data_ptr()
    rows = torch.randn(11, 1, width + 3, dtype=torch.float16, device=kind["device"])[..., :width]
    slots = torch.randperm(40, device=kind["device"])[:11]
    pool.set_kv(1, slots, rows, rows[..., : rank[0]])
    assert torch.equal(pool.k(1)[slots], rows)
    assert torch.equal(pool.v(1)[slots], rows[..., : rank[0]])
    assert int((pool.k(1) != 0).any(-1).sum()) == 11
    assert not pool.k(0).any()
    assert pool.bytes_per_token == 2 * width * 2
    with pytest.raises(ArgumentError, match="v_scale"):
        pool.set_kv(1, slots, rows, None, 2.0, 1.0)


def test_a_last_dimension_with_gaps_and_an_empty_batch(kind) -> None:
    pool = KVPool(16, 4, 1, 2, 8, torch.float32, **kind)
    k = torch.randn(3, 2, 16, device=kind["device"])[..., ::2]
    slots = torch.tensor([4, 9, 5, 6, 7], device=kind["device"])[::2]
    pool.set_kv(0, slots, k, k.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(pool.k(0)[slots], k)
    assert torch.equal(pool.v(0)[slots], k)
    before = pool.k(0).clone()
    pool.set_kv(0, slots[:0], k[:0], k[:0])
    assert torch.equal(pool.k(0), before)


def test_shapes_and_sizes() -> None:
    pool = KVPool(14, 4, 3, 2, 8, torch.float16, "cpu")
    assert pool.k(2).shape == (16, 2, 8), "three pages, and page 0"
    assert pool.bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert (
        repr(pool)
        == "KVPool(16 slots of 2×8 in 3 layers, float16 on cpu: 0.0 MiB, 192 bytes per token)"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([1, 2, 3, 16])}, "slots=16.*16 slots"),
        ({"slots": torch.tensor([1, -2, 3, 5])}, "slots=-2"),
        ({"slots": torch.tensor([1.0, 2, 3, 4])}, "slots"),
        ({"k": torch.zeros(4, 2, 7)}, r"k=\(4, 2, 7\).*\(4, 2, 8\)"),
        ({"v": torch.zeros(4, 1, 8)}, "v="),
        ({"v": torch.zeros(4, 2, 8, dtype=torch.int64)}, "v="),
        ({"k_scale": 0.0}, "k_scale=0.0"),
        ({"v_scale": float("nan")}, "v_scale=nan"),
    ],
)
def test_wrong_calls_change_nothing(kind, change, message) -> None:
    if kind["device"] == "cuda" and "slots" in change and change["slots"].dtype == torch.int64:
        pytest.skip("slots on the device are not read")
    pool = KVPool(12, 4, 1, 2, 8, torch.float32, **kind)
    call = {"slots": torch.arange(4), "k": torch.ones(4, 2, 8), "v": torch.ones(4, 2, 8), **change}
    call = {
        name: x.to(kind["device"]) if isinstance(x, torch.Tensor) else x for name, x in call.items()
    }
    with pytest.raises(ArgumentError, match=message):
        pool.set_kv(0, **call)
    assert not pool.k(0).any()
    assert not pool.v(0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [1, 2, 3, 4]}, r"slots=\[1, 2, 3, 4\]: must be a tensor"),
        ({"k": np.ones((4, 2, 8), np.float32)}, "k=.*(?s:.)*must be a tensor on"),
        ({"v": None}, "v=None: must be a tensor"),
        ({"k_scale": 1e300}, "k_scale=1e\\+300.*float32"),
        ({"v_scale": 1e-300}, "v_scale=1e-300"),
        ({"k_scale": "2"}, "k_scale='2'"),
        ({"layer": 0.0}, "layer=0.0"),
        ({"layer": None}, "layer=None"),
    ],
)
def test_plain_mistakes_are_named(kind, change, message) -> None:
    pool = KVPool(12, 4, 1, 2, 8, torch.float32, **kind)
    right = {"slots": torch.arange(4), "k": torch.ones(4, 2, 8), "v": torch.ones(4, 2, 8)}
    right = {name: x.to(kind["device"]) for name, x in right.items()}
    with pytest.raises(ArgumentError, match=f"^{message}"):
        pool.set_kv(**{"layer": 0, **right, **change})
    assert not pool.k(0).any()
    pool.set_kv(np.int64(0), **right, k_scale=np.float32(2), v_scale=2)


@pytest.mark.parametrize(
    ("rank", "rope", "message"),
    [
        (0, 4, "kv_lora_rank=0"),
        (-3, 4, "kv_lora_rank=-3"),
        (8, -2, "rope_dim=-2"),
        (8.0, 2, "kv_lora_rank=8.0"),
    ],
)
def test_latent_rows_that_cannot_be(rank, rope, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        MLAPool(8, 4, 1, rank, rope, torch.float32, "cpu")
    assert MLAPool(8, 4, 1, 8, 0, torch.float32, "cpu").v(0).shape == (12, 1, 8), (
        "no rope part is a row, too"
    )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"size": 12.0}, "size=12.0"),
        ({"size": "12"}, "size='12'"),
        ({"page_size": None}, "page_size=None"),
        ({"num_layers": 1.0}, "num_layers=1.0"),
        ({"kv_heads": 2.5}, "kv_heads=2.5"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"head_dim": -1}, "head_dim=-1"),
    ],
)
def test_pools_are_sized_by_whole_numbers(numbers, message) -> None:
    right = {"size": 12, "page_size": 4, "num_layers": 1, "kv_heads": 2, "head_dim": 8}
    with pytest.raises(ArgumentError, match=message):
        KVPool(**{**right, **numbers}, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"memory": float("nan")}, "memory=nan"),
        ({"memory": float("inf")}, "memory=inf"),
        ({"memory": "1G"}, "memory='1G'"),
        ({"bytes_per_token": 0}, "bytes_per_token=0"),
        ({"bytes_per_token": 2.5}, "bytes_per_token=2.5"),
        ({"page_size": -16}, "page_size=-16"),
    ],
)
def test_a_plan_needs_numbers_to_plan_with(numbers, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan_size(**{"memory": 10**6, "bytes_per_token": 100, "page_size": 16, **numbers})
    size = plan_size(1e6, bytes_per_token=100, page_size=16)
    assert type(size) is int
    assert size == plan_size(10**6, bytes_per_token=100, page_size=16)


@pytest.mark.parametrize("size", [(3, 4), (8, 0), (0, 1)])
def test_sizes_that_cannot_be(size) -> None:
    with pytest.raises(ArgumentError):
        KVPool(*size, 1, 1, 8, torch.float32, "cpu")
    with pytest.raises(ArgumentError, match="dtype"):
        KVPool(8, 4, 1, 1, 8, torch.int8, "cpu")


def test_plan_size_is_modest(monkeypatch) -> None:
    pool = KVPool(64, 16, 2, 2, 8, torch.float16, "cpu")
    for memory in (10_000, 123_456, 10**9):
        size = plan_size(memory, bytes_per_token=pool.bytes_per_token, page_size=16)
        assert size % 16 == 0
        assert (size + 16) * pool.bytes_per_token <= memory < (size + 32) * pool.bytes_per_token
    monkeypatch.setattr(
        pools, "memory_facts", lambda device: devices.MemoryFacts(free=10**9, total=10**11)
    )
    assert DEFAULT_SHARE <= 0.5
    default = plan_size(bytes_per_token=1000, page_size=16)
    assert (default + 16) * 1000 <= DEFAULT_SHARE * 10**9
    with pytest.raises(ArgumentError, match="at least 32000"):
        plan_size(31_999, bytes_per_token=1000, page_size=16)


@pytest.mark.skipif(CUDA or not HAVE_TRITON, reason="about the interpreter")
def test_b121_bf16_is_refused_in_the_interpreter() -> None:
    pool = KVPool(8, 4, 1, 1, 8, torch.bfloat16, "cpu", kernels="triton")
    with pytest.raises(ArgumentError, match="bfloat16"):
        pool.set_kv(0, torch.tensor([4]), torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))


def test_fp8_is_refused_on_old_gpus(monkeypatch) -> None:
    monkeypatch.setattr(pools, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")
    with pytest.raises(ArgumentError, match="Old GPU has no fp8"):
        KVPool(8, 4, 1, 1, 8, FP8, "cuda")


@triton.jit
def _offsets_kernel(slot_ptr, stride_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, row_offset(tl.load(slot_ptr + i), tl.load(stride_ptr + i)))


def test_b08_offsets_are_64_bit(device) -> None:
    """int32 slots times int32 strides past 2^31, in the helper by which the kernel addresses both
    sides."""
    slot = torch.tensor([3_728_271, 131_073], dtype=torch.int32, device=device)
    stride = torch.tensor([576, 16_384], dtype=torch.int32, device=device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    _offsets_kernel[(1,)](slot, stride, out, 2)
    assert out.tolist() == [2_147_484_096, 2_147_500_032]


@pytest.mark.gpu
def test_b08_the_last_slot_of_a_large_pool() -> None:
    pool = MLAPool(3_728_272, 16, 1, 512, 64, torch.float16, "cuda")
    row = torch.randn(1, 1, 576, dtype=torch.float16, device="cuda")
    pool.set_kv(0, torch.tensor([3_728_271], dtype=torch.int32, device="cuda"), row)
    assert torch.equal(pool.k(0)[3_728_271:3_728_272], row)


@pytest.mark.parametrize("page_size", [1, 4])
def test_b80_padding_writes_to_page_0_only(kind, page_size: int) -> None:
    """All pages are handed out; padded batches then write to slot 0 and no live slot changes."""
    a = PagedAllocator(8 * page_size, page_size, **kind)
    pool = KVPool(8 * page_size, page_size, 1, 2, 8, torch.float32, **kind)
    live = a.alloc(8 * page_size)
    assert a.alloc(page_size) is None
    k, v = fused(live.numel(), 2, 8, torch.float32, kind["device"])
    pool.set_kv(0, live, k, v)
    for padded in (1, 5):
        slots = torch.cat([live[:2], torch.zeros(padded, dtype=torch.int64, device=live.device)])
        rows = torch.cat([k[:2], torch.full((padded, 2, 8), 99.0, device=live.device)])
        pool.set_kv(0, slots, rows, torch.cat([v[:2], rows[2:]]))
        assert torch.equal(bits(pool.k(0)[live]), bits(k))
        assert torch.equal(bits(pool.v(0)[live]), bits(v))
    assert pool.k(0)[0].tolist() == [[99.0] * 8] * 2


def test_b82_lengths_that_differ_raise_and_store_nothing(kind) -> None:
    pool = KVPool(12, 4, 1, 1, 8, torch.float32, **kind)
    rows = torch.ones(4, 1, 8, device=kind["device"])
    slots = torch.tensor([4, 5, 6], device=kind["device"])
    for k, v in ((rows, rows), (rows[:3], rows), (rows, rows[:3])):
        with pytest.raises(ArgumentError, match="one row per slot"):
            pool.set_kv(0, slots, k, v)
    assert not pool.k(0).any()
    pool.set_kv(0, slots, rows[:3], rows[:3])
    assert pool.k(0).any(-1).flatten().nonzero().flatten().tolist() == [4, 5, 6]


@pytest.mark.gpu
def test_set_kv_is_one_launch_without_a_copy() -> None:
    pool = KVPool(4096, 16, 1, 8, 128, torch.bfloat16, "cuda")
    k, v = fused(1024, 8, 128, torch.bfloat16, "cuda")
    slots = torch.randperm(4096, device="cuda")[:1024]
    pool.set_kv(0, slots, k, v)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pool.set_kv(0, slots, k, v)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["store_kernel"]


@pytest.mark.gpu
def test_slots_outside_the_pool_overwrite_nothing_on_a_gpu() -> None:
    pool = KVPool(16, 4, 1, 1, 8, torch.float16, "cuda")
    rows = torch.ones(3, 1, 8, dtype=torch.float16, device="cuda")
    pool.set_kv(0, torch.tensor([-1, 20, 5], device="cuda"), rows, rows)
    assert pool.k(0).any(-1).flatten().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("layer", [99, -1, 2, "0", 0.0, None])
def test_p08_layers_that_a_pool_does_not_have_are_named(layer) -> None:
    for pool in (
        KVPool(8, 4, 2, 1, 8, torch.float32, "cpu"),
        MLAPool(8, 4, 2, 4, 2, torch.float32, "cpu"),
    ):
        for read in (pool.k, pool.v):
            with pytest.raises(ArgumentError, match=r"layer=.*must be 0 to 1"):
                read(layer)
        assert pool.k(np.int64(1)).shape[0] == 12
