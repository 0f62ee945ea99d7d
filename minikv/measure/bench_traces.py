"""What the prefix cache is worth: four workloads through the engine with the cache on and off,
beside the optimum."""

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
    "few-shot": {
        "tasks": 8,
        "questions": 32,
        "task_words": 128,
        "shot_words": 158,
        "question_words": 64,
    },
    "chat": {
        "systems": 4,
        "chats": 32,
        "turns": 6,
        "system_words": 512,
        "user_words": (32, 128),
        "reply_words": (64, 192),
    },
    "tree-of-thought": {"problems": 8, "problem_words": 512, "thought_words": 96},
    "rag": {
        "documents": 32,
        "per_question": 3,
        "questions": 256,
        "document_words": 768,
        "max_tokens": 64,
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "few-shot": {"tasks": 2, "questions": 8, "shots": 4},
    "chat": {"chats": 4, "turns": 4},
    "tree-of-thought": {"problems": 2, "thought_words": 16},
    "rag": {"documents": 8, "questions": 16, "document_words": 128, "max_tokens": 8},
}
ENGINES: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": "random:qwen3-0.6b",
        "max_requests": 128,
        "max_context": 4096,
        "chunk_tokens": 8192,
    },
    "cpu": {"model": "tiny", "max_requests": 16, "kv_tokens": 16384},
}


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Run each workload through one engine with every request caching, and with none; each twice,
    the second counts.

    All requests of a trace are queued at once, in its order. On CUDA the model has the shape of
    Qwen3-0.6B and random bf16 weights, on the CPU it is ``"tiny"``.

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
        ``rows``: tokens per second of outputs, and of prompts and outputs together (`total`); `hit
        rate` is the share of prompt tokens found in the cache, `optimum` that of the best cache of
        this size for the prompts in this order, one after another. `same` is the share of requests
        whose greedy outputs are equal with the cache on and off: batches of other sizes round
        otherwise, so that close choices fall either way.
    """
    kind = (
        torch.device(device).type
        if device != "auto"
        else "cuda"
        if torch.cuda.is_available()
        else "cpu"
    )
    llm = LLM(device=kind, progress=False, **ENGINES[kind])
    print(f"{ENGINES[kind]['model']}, {llm.decoder.norm.weight.dtype}, {llm.pool}", flush=True)
    sizes, rows = LARGE if kind == "cuda" and not quick else SMALL, []
    for name, make in WORKLOADS.items():
        trace = make(0, **sizes[name])
        prompts = [request.token_ids for request in trace]
        best = optimal_hits(
            prompts, llm.allocator.page_size, llm.allocator.num_pages, spare_last=True
        )
        runs = [_serve(llm, trace, cache) for cache in (False, True, False, True)]
        (off, without), (on, outs) = runs[2:]  # before, kernels were compiled for all their batches
        length, made = sum(map(len, prompts)), sum(len(out.token_ids) for out in outs)
        same = [a.token_ids == b.token_ids for a, b in zip(outs, without, strict=True)]
        rows.append(
            {
                "workload": name,
                "requests": len(trace),
                "prompt tokens": length,
                "output tokens": made,
                "tok/s on": made / on,
                "tok/s off": made / off,
                "total tok/s on": (length + made) / on,
                "total tok/s off": (length + made) / off,
                "on / off": off / on,
                "hit rate": sum(out.cached_tokens for out in outs) / length,
                "optimum": sum(best) / length,
                "same": sum(same) / len(same),
            }
        )
        print(table(rows[-1:]), flush=True)
        if out_dir is not None:
            _draw(llm, rows[-1], Path(out_dir))
    print(table(rows))
    return {"rows": rows}


def _serve(llm: LLM, trace: Sequence[TraceRequest], cache: bool) -> tuple[float, list[Output]]:
    """Seconds to serve a trace from an empty cache, and the outputs."""
    llm.cache.reset()
    params = [
        SamplingParams(max_tokens=r.max_tokens, temperature=0, ignore_eos=True, cache=cache)
        for r in trace
    ]
    started = perf_counter()
    outs = llm.generate([request.token_ids for request in trace], params)
    seconds = perf_counter() - started
    assert all(out.finish_reason == "length" for out in outs), [
        out.error for out in outs if out.error
    ]
    return seconds, outs


def _draw(llm: LLM, row: dict[str, Any], folder: Path) -> None:
    from minikv.viz import tree

    name, found = (
        row["workload"],
        f"{row['hit rate']:.0%} of {row['prompt tokens']:,} prompt tokens were found cached",
    )
    look: dict[str, Any] = {"colour_by": "hits", "max_nodes": 28, "max_siblings": 4, "note": found}
    drawing = tree.draw(
        llm.cache, decode=spell, title=f"What {name} left in the prefix cache", **look
    )
    folder.mkdir(parents=True, exist_ok=True)
    print(f"drawn to {drawing.save(folder / f'{name}.svg')}", flush=True)
