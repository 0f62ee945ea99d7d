"""What an allocator on a GPU promises beyond its results: no waiting, one launch, one binary, exact
pages.

Where the promise does not need a GPU it is shown here without one: device tensors' filter on CPU
tensors, and the key by which Triton chooses a binary in a process that compiles for sm90.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from allocator_oracle import PlainAllocator

from minikv.kernels import launch
from minikv.kernels.staging import Staging
from minikv.memory import PagedAllocator
from minikv.memory import slots as kernels
from minikv.memory.free_list import FREE, HELD, FreeList

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(20))
def test_b03_filter_lets_no_page_back_twice(seed: int) -> None:
    """Frees as a device does them, a third of them wrong: the list stays exact while the host still
    counts wrongly."""
    draw = random.Random(seed)
    free = FreeList(9, torch.device("cpu"))
    free.exact = False
    want, held = list(range(1, 10)), set()
    for _ in range(40):
        if draw.random() < 0.5:
            count = draw.randrange(3)
            front = free.head + int(free.lost) - free.seen
            taken = max(0, min(count, free.num_pages - front))
            got = free.page_at(
                torch.arange(free.head, free.head + count), torch.ones(count, dtype=torch.bool)
            )
            assert got.tolist() == want[:taken] + [0] * (count - taken), (
                "past the end padding's page is written"
            )
            free.mark(free.head, count, HELD)
            free.head += count
            held |= set(want[:taken])
            want = want[taken:]
        else:
            pages = [draw.randrange(-2, 13) for _ in range(draw.randrange(1, 5))]
            free.push_filtered(torch.tensor(pages))
            good = sorted(set(pages) & held)
            want, held = good + want, held - set(good)
        if draw.random() < 0.3:  # the host hears of it at some later time
            late = int(free.lost) - free.seen
            free.head, free.seen = free.head + late, free.seen + late
            assert free.available == len(want)
        assert free.pages().tolist() == want
        assert {p for p in range(1, 10) if free.state[p] != FREE} == held


KEYS = """
import itertools, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from minikv.memory import slots as kernels

backend = make_backend(GPUTarget("cuda", 90, 32))
def key(kernel, *args, **constexprs):
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return str(binder(*args, **constexprs)[1])

i64, i32, u8 = (torch.zeros(64, dtype=d) for d in (torch.int64, torch.int32, torch.uint8))
numbers = [0, 1, 2, 15, 16, 17, 4096, 2**31 - 1]
for page in (1, 16):
    extend, decode = set(), set()
    for (a, b), off in itertools.product(itertools.product(numbers, repeat=2), (0, 1, 2)):
        o, f, s, l, m, w = i64[off:], i64[off:], u8[off:], i64[off:], i64[off:], i32[off:]
        sizes = a, b, a, b, a, 2 - off % 2
        options = {"PAGE": page, "BLOCK": 512}
        extend.add(key(kernels.extend_kernel, o, f, s, l, m, w, *sizes, **options))
        options = {"PAGE": page, "BLOCK": 256}
        decode.add(key(kernels.decode_kernel, o, f, s, l, w, *sizes, **options))
    print(page, len(extend), len(decode))
"""


def test_nothing_in_the_traffic_chooses_another_binary() -> None:
    """Triton's own specialisation key over sizes, the value 1, multiples of 16 and unaligned
    pointers: one each."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", KEYS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["1 1 1", "16 1 1"]


def test_kernels_compile_for_gpus() -> None:
    pytest.importorskip("triton")
    from compile_check import compile_cases

    reports = compile_cases("memory")
    assert {r["arch"] for r in reports} >= {80, 90}
    assert all(r["spill_bytes"] == 0 for r in reports)


def traffic(a: PagedAllocator, seed: int, steps: int) -> None:
    """Varied calls whose inputs are made beforehand on the device, as a server has them; reads
    nothing back."""
    draw = random.Random(seed)
    for _ in range(steps):
        n = draw.choice([1, 2, 3, 16, 17, 31])
        prefix = torch.tensor([draw.choice([0, 1, 15, 16, 17]) for _ in range(n)])
        seq = prefix + torch.tensor([draw.choice([0, 1, 5, 16, 600]) for _ in range(n)])
        last = (prefix - 1).to(a.device, torch.int64 if draw.random() < 0.5 else torch.int32)
        last = torch.nn.functional.pad(last, (draw.randrange(3), 0))[-n:]  # now and then unaligned
        slots = a.alloc_extend(prefix, seq, last, int((seq - prefix).sum()))
        a.alloc_decode(seq + 1, (seq - 1).to(a.device))
        if slots is None:
            a.clear()


@pytest.mark.gpu
def test_one_binary_per_page_size() -> None:
    for kernel in (kernels.extend_kernel, kernels.decode_kernel):
        kernel.device_caches.clear()
    launch._binaries.clear()
    for count, page_size in enumerate((1, 2, 3, 16, 64, 256), start=1):
        a = PagedAllocator(page_size * 4096, page_size, device="cuda")
        traffic(a, page_size, 40)
        for kernel in (kernels.extend_kernel, kernels.decode_kernel):
            compiled = kernel.device_caches[torch.cuda.current_device()][0]
            assert len(compiled) == count


@pytest.mark.gpu
def test_no_call_waits_for_the_device() -> None:
    a = PagedAllocator(1 << 20, 16, device="cuda")
    prefix, seq = torch.tensor([0, 0, 0]), torch.tensor([40, 16, 3])
    none = torch.full((3,), -1, device="cuda")
    a.alloc_extend(prefix, seq, none, 59)
    last = torch.tensor([39, 15, 2], device="cuda")
    a.alloc_decode(seq + 1, last)
    held = a.alloc(160)
    a._staging = Staging(a.device, capacity=64)  # every eighth call needs other pinned memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300):
            a.alloc_extend(prefix, seq, none, 59)
            a.alloc_decode(seq + 1, last)
        state = a.backup()
        a.alloc(64)
        a.restore(state)
        with a.free_group():
            a.free(held[:80])
            a.free(held[80:])
        a.available_size()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_lengths_are_kept_until_the_device_has_read_them() -> None:
    """The host runs far ahead of a busy device through many small arenas: no call sees the lengths
    of another."""
    a, plain = (PagedAllocator(1 << 20, 16, device=d) for d in ("cuda", "cpu"))
    a._staging = Staging(a.device, capacity=16)
    draw = random.Random(0)
    batches = [torch.tensor([draw.randrange(1, 50) for _ in range(3)]) for _ in range(400)]
    zero, none = torch.zeros(3, dtype=torch.int64), torch.full((3,), -1)
    on_device = none.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = [a.alloc_extend(zero, seq, on_device, int(seq.sum())) for seq in batches]
    for slots, seq in zip(got, batches, strict=True):
        assert torch.equal(slots.cpu(), plain.alloc_extend(zero, seq, none, int(seq.sum())))
    torch.cuda._sleep(1_000_000)
    a.alloc_extend(zero, batches[0], on_device, int(batches[0].sum()))
    torch.cuda.synchronize()
    arenas = len(a._staging._spent)
    for seq in batches[:40]:
        a.alloc_extend(zero, seq, on_device, int(seq.sum()))
        torch.cuda.synchronize()
    assert len(a._staging._spent) == arenas, "arenas that the device is done with are used again"


@pytest.mark.gpu
def test_allocation_can_be_captured_in_a_graph() -> None:
    """Stream capture forbids every wait and every read-back; the captured kernels then do the same
    again."""
    a = PagedAllocator(4096, 16, device="cuda")
    prefix, seq = torch.tensor([0, 0]), torch.tensor([40, 5])
    none, last = torch.full((2,), -1, device="cuda"), torch.tensor([39, 4], device="cuda")
    state = a.backup()
    want = a.alloc_extend(prefix, seq, none, 45).tolist(), a.alloc_decode(seq + 1, last).tolist()
    a.restore(state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = a.alloc_extend(prefix, seq, none, 45), a.alloc_decode(seq + 1, last)
    for slots in got:
        slots.fill_(-7)
    graph.replay()
    assert (got[0].tolist(), got[1].tolist()) == want


@pytest.mark.gpu
def test_one_launch_per_call() -> None:
    a = PagedAllocator(1 << 20, 16, device="cuda")
    prefix, seq = torch.tensor([0, 0]), torch.tensor([48, 5])
    none, last = torch.full((2,), -1, device="cuda"), torch.tensor([47, 4], device="cuda")

    def calls() -> None:
        a.alloc_extend(prefix, seq, none, 53)
        a.alloc_decode(seq + 1, last)

    calls()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        calls()
        torch.cuda.synchronize()
    on_device = [
        e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert sorted(on_device) == ["decode_kernel", "extend_kernel"], (
        "no copies either: lengths are read where they are"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_extends_beyond_a_million_tokens(page_size: int) -> None:
    million = (1 << 20) + 12345
    need = -(-million // page_size) + 4
    a, b = (
        PagedAllocator(need * page_size, page_size, device="cuda", kernels=k)
        for k in ("triton", "torch")
    )
    for lengths in ([million], [3, 1 << 18, 0, 77, 1 << 18]):
        seq = torch.tensor(lengths)
        none = torch.full_like(seq, -1).cuda()
        states = a.backup(), b.backup()
        got, want = (x.alloc_extend(torch.zeros_like(seq), seq, none, sum(lengths)) for x in (a, b))
        assert torch.equal(got, want)
        plain = PlainAllocator(need, page_size).alloc_extend(
            [0] * len(lengths), lengths, [-1] * len(lengths)
        )
        assert torch.equal(got.cpu(), torch.tensor(plain))
        assert torch.equal(a.page_is_held, b.page_is_held)
        for x, state in zip((a, b), states, strict=True):
            x.restore(state)


@pytest.mark.gpu
def test_large_decode_batches() -> None:
    n = 3000
    results = []
    for kernel in ("triton", "torch"):
        a = PagedAllocator(1 << 20, 16, device="cuda", kernels=kernel)
        seq = torch.arange(n) % 40 + 1
        slots = a.alloc_extend(
            torch.zeros_like(seq), seq, torch.full_like(seq, -1).cuda(), int(seq.sum())
        )
        last = slots[seq.cumsum(0).cuda() - 1]
        results.append(a.alloc_decode(seq + 1, last))
    assert torch.equal(*results)


@pytest.mark.gpu
def test_debug_reads_device_tensors() -> None:
    a = PagedAllocator(64, 4, device="cuda", debug=True)
    slots = a.alloc(16)
    with a.free_group():
        a.free(slots[5:7])
        with pytest.raises(ValueError, match="page 2 is already free"):
            a.free(slots[4:8])
    with pytest.raises(ValueError, match="page 2 is already free"):
        a.free(slots[:8])
    a.free(slots.flip(0)[:4])
    assert a.free_pages.tolist()[:2] == [4, 2]
    with pytest.raises(ValueError, match="last_loc"):
        a.alloc_decode(torch.tensor([3]), torch.tensor([4], device="cuda"))


@pytest.mark.gpu
def test_cpu_slots_are_checked_on_a_cuda_allocator() -> None:
    a = PagedAllocator(64, 4, device="cuda")
    slots = a.alloc(16)
    a.free(slots[4:8])
    with pytest.raises(ValueError, match="page 2 is already free"):
        a.free([8])
    a.free([13, 4])
    assert a.free_pages.tolist()[:3] == [1, 3, 2]


@pytest.mark.gpu
def test_b03_double_free_on_the_device_is_ignored_and_told_later() -> None:
    a = PagedAllocator(64, 4, device="cuda")
    slots = a.alloc(64)
    a.free(slots[8:16])
    a.free(slots[8:20])
    assert a.free_pages.tolist() == [5, 3, 4]
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="not held"):
        assert a.available_size() == 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert a.alloc(12).tolist() == [*range(20, 24), *range(12, 20)]
        assert a.alloc(4) is None
