"""What the prefix cache is worth: four workloads through the engine with the cache on and off, beside the optimum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from minikv.engine import LLM, Output, SamplingParams
from minikv.measure.table import table
from minikv.measure.traces import WORKLOADS, TraceRequest, optimal_hits, spell

LARGE: dict[str, dict[str, Any]] = {
    "few-shot": {"tasks": 8, "questions": 32, "task_words": 128, "shot_words": 158, "question_words": 64},
    "chat": {
        "systems": 4, "chats": 32, "turns": 6, "system_words": 512, "user_words": (32, 128), "reply_words": (64, 192)
    },
    "tree-of-thought": {"problems": 8, "problem_words": 512, "thought_words": 96},
    "rag": {"documents": 32, "per_question": 3, "questions": 256, "document_words": 768, "max_tokens": 64},
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "few-shot": {"tasks": 2, "questions": 8, "shots": 4},
    "chat": {"chats": 4, "turns": 4},
    "tree-of-thought": {"problems": 2, "thought_words": 16},
    "rag": {"documents": 8, "questions": 16, "document_words": 128, "max_tokens": 8},
}
ENGINES: dict[str, dict[str, Any]] = {
    "cuda": {"model": "random:qwen3-0.6b", "max_requests": 128, "max_context": 4096, "chunk_tokens": 8192},
    "cpu": {"model": "tiny", "max_requests": 16, "kv_tokens": 16384},
}


def run(
    out_dir: str | os.PathLike[str] | None = None, quick: bool = False, device: torch.device | str = "auto"
) -> dict[str, Any]:
    """Run each workload twice through one engine: every request caching, and none.

    All requests of a trace are queued at once, in its order. On CUDA the model has the shape of Qwen3-0.6B and random
    bf16 weights, on the CPU it is ``"tiny"``.

    Parameters
    ----------
    out_dir
        Where the picture of each workload's tree goes (None: nowhere).
    quick
        The small traces on CUDA, too.
    device
        "auto", "cpu" or "cuda".

    Returns
    -------
    dict
        ``rows``: tokens per second count prompts and outputs; `hit rate` is the share of prompt tokens found in the
        cache, `optimum` that of the best cache of this size for the prompts in this order, one after another.
    """
    kind = torch.device(device).type if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    llm = LLM(device=kind, progress=False, **ENGINES[kind])
    sizes = LARGE if kind == "cuda" and not quick else SMALL
    print(f"{ENGINES[kind]['model']}, {llm.decoder.norm.weight.dtype}, {llm.pool}")
    traces = {name: make(0, **sizes[name]) for name, make in WORKLOADS.items()}
    for trace in traces.values():  # kernels are compiled before anything is timed
        for cache in (False, True):
            _serve(llm, trace[: len(trace) // 4], cache, most=2)
    rows = []
    for name, trace in traces.items():
        prompts = [request.token_ids for request in trace]
        length, page = sum(map(len, prompts)), llm.allocator.page_size
        seconds, outs = {}, []
        for cache in (False, True):
            seconds[cache], outs = _serve(llm, trace, cache)
        served = length + sum(len(out.token_ids) for out in outs)
        best = optimal_hits(prompts, page, llm.allocator.num_pages, spare_last=True)
        rows.append(
            {
                "workload": name,
                "requests": len(trace),
                "prompt tokens": length,
                "output tokens": served - length,
                "tok/s on": served / seconds[True],
                "tok/s off": served / seconds[False],
                "on / off": seconds[False] / seconds[True],
                "hit rate": sum(out.cached_tokens for out in outs) / length,
                "optimum": sum(best) / length,
                "device": kind,
            }
        )
        if out_dir is not None:
            _draw(llm, name, Path(out_dir))
    print(table(rows))
    return {"rows": rows}


def _serve(llm: LLM, trace: Sequence[TraceRequest], cache: bool, most: int | None = None) -> tuple[float, list[Output]]:
    """Seconds to serve a trace from an empty cache, and the outputs."""
    llm.cache.reset()
    prompts = [request.token_ids for request in trace]
    params = [
        SamplingParams(max_tokens=most or request.max_tokens, temperature=0, ignore_eos=True, cache=cache)
        for request in trace
    ]
    started = perf_counter()
    outs = llm.generate(prompts, params)
    return perf_counter() - started, outs


def _draw(llm: LLM, name: str, folder: Path) -> None:
    from minikv.viz import tree

    folder.mkdir(parents=True, exist_ok=True)
    title = f"What {name} left in the prefix cache"
    print(f"drawn to {tree.draw(llm.cache, decode=spell, colour_by='hits', title=title).save(folder / f'{name}.svg')}")
