"""Decoding, whole steps: eager beside graph beside compiled, and the time that reading all weights
and keys takes."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from minikv.device import pick_device, synchronize
from minikv.engine import LLM, SamplingParams
from minikv.engine.step import CompiledStep, RecordedStep, decode_buffers
from minikv.errors import StateError
from minikv.graphs import CudaGraphRunner
from minikv.measure.limits import copy_bandwidth
from minikv.measure.table import table
from minikv.measure.timing import measure

CONTEXT, NEW = 512, 128


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Greedy tokens per second of decode steps alone, for random weights of published shapes and
    for SmolLM2.

    The limit is the time that reading every weight once, and the keys and values of all requests,
    takes at the speed of a copy on this machine. "gpu us" is the captured graph replayed by itself;
    "host us" is a step of the engine with the replay left out, which hides behind the graph as long
    as it is the shorter one.

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer batch sizes and tokens.
    device
        "auto", "cpu" (SmolLM2: eager and compiled, in turns) or "cuda".

    Returns
    -------
    dict
        ``rows``: one per model, batch and way of running. On CUDA ``captures``: graph memory and
        time, largest batch first and smallest first.
    """
    on = pick_device(device)
    if on.type == "cpu":
        rows = _cpu(quick)
        print(table(rows))
        return {"rows": rows}
    batches = (1, 32) if quick else (1, 8, 32, 128, 256)
    rows, captures, calls = _shape("random:qwen3-0.6b", batches, 33 if quick else NEW, ways=True)
    if not quick:
        rows += _shape("random:llama-3-8b", (1,), 65)[0]
        try:
            rows += _shape("smollm2-135m", (1, 32), NEW)[0]
        except (StateError, ImportError) as e:  # no model file, or nothing that reads it
            print(f"SmolLM2 left out: {e}")
    print(table(rows))
    print(table(calls))
    print(table(captures))
    return {"rows": rows, "calls": calls, "captures": captures}


def _shape(
    model: str, batches: tuple[int, ...], new: int, ways: bool = False
) -> tuple[list[dict], list[dict], list[dict]]:
    """Rows of one model on CUDA, and with `ways` the eager and compiled ones, too, how graphs are
    captured, and what other calls and ways of sampling take."""
    most = max(batches)
    options: dict[str, Any] = {
        "device": "cuda",
        "max_requests": most,
        "kv_tokens": most * (CONTEXT + NEW + 16),
        "max_context": 1024,
        "chunk_tokens": 8192,
        "prefix_cache": False,
        "progress": False,
    }
    started = perf_counter()
    llm = LLM(model, graphs=True, **options)
    print(
        f"{model}: built and captured {llm.runner.stats['captures']} graphs in "
        f"{perf_counter() - started:.1f} s"
    )
    rows, captures, calls = [], [], []
    for batch in batches:
        rows.append(
            _row(model, llm, batch, "graph", new if batch < 128 else new // 2) | _inside(llm, batch)
        )
        print(table(rows[-1:]), flush=True)
    sizes = llm.runner.sizes
    if ways:
        calls = [row for batch in (1, 32) for row in _calls(llm, batch, new)]
    del llm  # its graphs would share their memory with those that are captured next
    if ways:
        eager = LLM(model, graphs=False, **options)
        captures = [_captured(eager, sizes, order) for order in ("largest first", "smallest first")]
        for batch in batches:
            rows.append(_row(model, eager, batch, "eager", 9))
        for batch in batches[:1] if new < NEW else batches[::2]:  # each is compiled for 15 seconds
            rows.append(_compiled(model, eager, batch, new if batch < 128 else new // 2))
            print(table(rows[-1:]), flush=True)
        rows.sort(key=lambda row: row["batch"])  # graph, eager, compiled
        del eager
    gc.collect()
    torch.cuda.empty_cache()
    return rows, captures, calls


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1},
    "greedy, 2 logprobs": {"temperature": 0, "logprobs": 2},
}


def _calls(llm: LLM, batch: int, new: int) -> list[dict[str, Any]]:
    """Tokens per second by `generate`, `step` and (one request) `stream`, for ways of sampling."""
    rows: list[dict[str, Any]] = []
    prompts = _prompts(llm, batch)
    for way, options in WAYS.items():
        params = SamplingParams(max_tokens=new, ignore_eos=True, **options)
        llm.generate(prompts, params)  # captures what comes for the first time
        calls: dict[str, Callable[[], list[tuple[float, int]]]] = {
            "generate": lambda params=params: _generated(llm, prompts, params),
            "step": lambda params=params: _stepped(llm, prompts, params),
        }
        if batch == 1:
            calls["stream"] = lambda params=params: [
                (perf_counter(), delta.id) for delta in llm.stream(prompts[0], params)
            ]
        for call, run in calls.items():
            seen = run()
            first: dict[int, float] = {}
            for moment, id in seen:
                first.setdefault(id, moment)
            seconds = (max(moment for moment, _ in seen) - max(first.values())) / (new - 1)
            rows.append({"batch": batch, "call": call, "sampling": way, "tok/s": batch / seconds})
    for row in rows:
        row["of greedy generate"] = row["tok/s"] / rows[0]["tok/s"]
    return rows


def _generated(llm: LLM, prompts: list, params: SamplingParams) -> list[tuple[float, int]]:
    """The moments of each request's first and last token, and its number."""
    timings = [out.timing for out in llm.generate(prompts, params)]
    moments = [(t.first_token or 0.0, t.finished or 0.0) for t in timings]
    return [(moment, i) for i, pair in enumerate(moments) for moment in pair]


def _stepped(llm: LLM, prompts: list, params: SamplingParams) -> list[tuple[float, int]]:
    """The moment at which each delta came, and the number of its request."""
    for prompt in prompts:
        llm.add(prompt, params)
    seen = []
    while llm.has_work:
        seen += [(perf_counter(), delta.id) for delta in llm.step()]
    return seen


def _row(model: str, llm: LLM, batch: int, way: str, new: int) -> dict[str, Any]:
    """Seconds per step from the moment that all requests have their first token, and what that is
    of the limit."""
    _steps(llm, batch, 8)  # warm
    seconds = _steps(llm, batch, new)
    least = _bytes(llm, batch, CONTEXT + new // 2) / copy_bandwidth(llm.device)
    return {
        "model": model.removeprefix("random:"),
        "batch": batch,
        "way": way,
        "tok/s": batch / seconds,
        "limit": batch / least,
        "share": least / seconds,
        "step us": seconds * 1e6,
        "gpu us": None,
        "host us": None,
        "kernels": None,
        "per layer": None,
    }


def _steps(llm: LLM, batch: int, new: int) -> float:
    """Seconds per decode step of `batch` requests."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    timings = [out.timing for out in llm.generate(_prompts(llm, batch), params)]
    began = max(t.first_token or 0.0 for t in timings)
    return (max(t.finished or 0.0 for t in timings) - began) / (new - 1)


def _prompts(llm: LLM, batch: int, length: int = CONTEXT) -> list[list[int]]:
    ids = torch.randint(
        0, llm.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch)
    )
    return ids.tolist()


def _bytes(llm: LLM, batch: int, context: int) -> int:
    """What a step cannot do without reading."""
    weights = sum(p.nbytes for p in llm.decoder.parameters())
    if not llm.config.tie_embeddings:
        weights -= llm.decoder.embed_tokens.weight.nbytes  # a few rows of it
    return weights + batch * context * llm.pool.bytes_per_token


def _compiled(model: str, llm: LLM, batch: int, new: int) -> dict[str, Any]:
    """The plain decoder by ``torch.compile`` inside a captured graph, attention by our kernels."""
    step = CompiledStep(llm.decoder, llm.attention)
    buffers = decode_buffers(batch, llm.device, llm.config.vocab_size)
    started = perf_counter()
    llm.loop.runner = CudaGraphRunner(
        step,
        buffers,
        [batch],
        variants=("greedy",),
        prepare=step.prepare,
        eager=step.run,
        compile_up_to=batch,
        progress=False,
    )
    print(f"compiled and captured in {perf_counter() - started:.1f} s")
    return _row(model, llm, batch, "compiled, in a graph", new)


def _inside(llm: LLM, batch: int) -> dict[str, Any]:
    """The two halves of a step in the middle of a run: the graph without the host, and the host
    without the graph."""
    runner: Any = llm.runner
    size = runner.bucket(batch)
    if (runner.variants[0], size) not in runner.graphs:
        return {}
    graph, out = runner.graphs[runner.variants[0], size]
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    requests = [llm._request(prompt, params) for prompt in _prompts(llm, batch)]
    for request in requests:
        llm.scheduler.add(request)
    while len(llm.scheduler.running) < batch and llm.has_work:
        llm.step()
    for _ in range(3):
        llm.step()
    gpu = measure(graph.replay, device=llm.device)
    kernels = _kernels(graph)
    replay, runner._replay = runner._replay, lambda variant, size, inputs: out
    host = []
    for _ in range(60):
        synchronize(llm.device)
        started = perf_counter()
        llm.step()
        host.append(perf_counter() - started)
    runner._replay = replay
    for request in requests:
        llm.abort(request.id)
    llm.step()
    return {
        "gpu us": gpu.us,
        "host us": median(host) * 1e6,
        "kernels": kernels,
        "per layer": kernels and kernels / llm.config.num_layers,
    }


def _kernels(graph: Any) -> int | None:
    """Kernels of a replay, counted by PyTorch's profiler; None where it sees none."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        return sum(e.device_type.name == "CUDA" for e in seen.events() or ()) or None
    except Exception as e:
        warnings.warn(f"the profiler counts no kernels here: {e}", stacklevel=2)
        return None


class _SmallestFirst(CudaGraphRunner):
    """Captures in the order that needs more memory, to show by how much."""

    def capture_order(self) -> list[int]:
        return self.sizes


def _captured(llm: LLM, sizes: list[int], order: str) -> dict[str, Any]:
    """Memory and seconds of capturing the greedy graphs of an engine that has none."""
    kind = CudaGraphRunner if order == "largest first" else _SmallestFirst
    step = RecordedStep(llm.decoder, llm.attention)
    buffers = decode_buffers(max(sizes), llm.device, llm.config.vocab_size)
    gc.collect()
    torch.cuda.empty_cache()
    started = perf_counter()
    made = kind(step, buffers, sizes, variants=("greedy",), prepare=step.prepare, progress=False)
    synchronize(llm.device)
    return {
        "captured": order,
        "graphs": made.stats["captures"],
        "graph MiB": made.stats["graph_bytes"] / 2**20,
        "seconds": perf_counter() - started,
    }


def _cpu(quick: bool) -> list[dict[str, Any]]:
    """SmolLM2 in fp32, one request: eager and compiled take turns, so that foreign load hits
    both."""
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_requests": 1,
        "max_context": 512,
    }
    options |= {"kv_tokens": 1024, "prefix_cache": False, "progress": False}
    ways = {
        name: LLM("smollm2-135m", graphs=graphs, **options)
        for name, graphs in (("eager", False), ("compiled", True))
    }
    new, found = 9 if quick else 33, {name: [] for name in ways}
    prompts = _prompts(ways["eager"], 1, 64)
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)

    def seconds(llm: LLM) -> float:
        [out] = llm.generate(prompts, params)
        return ((out.timing.finished or 0.0) - (out.timing.first_token or 0.0)) / (new - 1)

    tokens = {
        name: llm.generate(prompts, params)[0].token_ids for name, llm in ways.items()
    }  # compiles
    _in_turns(lambda name: found[name].append(seconds(ways[name])), list(ways), 2 if quick else 6)
    limit = copy_bandwidth("cpu")
    return [
        {
            "model": "smollm2-135m",
            "batch": 1,
            "way": name,
            "tok/s": 1 / median(found[name]),
            "of eager": median(found["eager"]) / median(found[name]),
            "GB/s": _bytes(ways[name], 1, 64 + new // 2) / median(found[name]) / 1e9,
            "copy GB/s": limit / 1e9,
            "same tokens": str(tokens[name] == tokens["eager"]),
        }
        for name in ways
    ]


def _in_turns(do: Callable[[str], None], names: list[str], times: int) -> None:
    for i in range(times):
        for name in names if i % 2 else reversed(names):
            do(name)
