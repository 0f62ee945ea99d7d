"""Decoding SmolLM2 on the CPU: our engine beside transformers' ``generate``, in one run, with the
bandwidth limit."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from minikv.errors import StateError


def run(
    out_dir: str | Path | None = None, quick: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Time fp32 greedy decode steps of both at batch 1 and 8.

    A step is the time between two tokens, prefill left out. The two take turns, so that foreign
    load on the machine hits both; medians are compared, and the fastest step of each ("best
    ratio").

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer tokens and repeats.
    device
        Only "cpu" is measured here.

    Returns
    -------
    dict
        ``rows``: one per batch size with tokens per second of both, their ratio, and bytes per
        second beside this machine's copy bandwidth.
    """
    try:
        import transformers
    except ImportError as e:
        raise StateError(
            "bench decode_cpu compares with transformers: "
            "pip install -c constraints.txt -e '.[bench]'"
        ) from e
    from minikv.engine import LLM, SamplingParams
    from minikv.measure.limits import copy_bandwidth
    from minikv.measure.table import table
    from minikv.models.files.download import model_path

    if torch.device(device).type != "cpu":
        print("decode_cpu measures the CPU only")
        return {"rows": []}
    path = model_path()
    transformers.utils.logging.disable_progress_bar()
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = read(path.parent, gguf_file=path.name, dtype=torch.float32)
    llm = LLM("smollm2-135m", device="cpu", dtype="float32", kv_tokens=4096, progress=False)
    weights = sum(p.numel() * p.element_size() for p in llm.decoder.parameters())
    tokens, repeats = (9, 2) if quick else (33, 4)
    limit, rows = copy_bandwidth("cpu"), []
    for batch in (1, 8):
        prompts = [[(7 * i + 13 * j) % 40000 + 100 for j in range(32)] for i in range(batch)]
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, cache=False)

        def ours(
            prompts: list = prompts, params: SamplingParams = params
        ) -> tuple[list[list[int]], list[float]]:
            ids, moments = [llm.add(prompt, params) for prompt in prompts], []
            found: dict[int, list[int]] = {id: [] for id in ids}
            while llm.has_work:
                for delta in llm.step():
                    found[delta.id] += delta.token_ids
                moments.append(perf_counter())
            return list(found.values()), moments

        def peer(prompts: list = prompts) -> tuple[list[list[int]], list[float]]:
            given, moments = torch.tensor(prompts), []

            def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                moments.append(perf_counter())
                return scores

            options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            with torch.inference_mode():
                out = theirs.generate(
                    given, attention_mask=torch.ones_like(given), logits_processor=[note], **options
                )
            return out[:, given.shape[1] :].tolist(), moments

        equal = ours()[0] == peer()[0]  # also the warm-up
        runs = [(_steps(ours()[1]), _steps(peer()[1])) for _ in range(repeats)]
        ours_s, peer_s = (median(itertools.chain(*column)) for column in zip(*runs, strict=True))
        kv = batch * (32 + tokens // 2) * llm.pool.bytes_per_token
        rows.append(
            {
                "batch": batch,
                "minikv tok/s": batch / ours_s,
                "transformers tok/s": batch / peer_s,
                "ratio": peer_s / ours_s,
                "best ratio": min(itertools.chain(*(r[1] for r in runs)))
                / min(itertools.chain(*(r[0] for r in runs))),
                "GB/s": (weights + kv) / ours_s / 1e9,
                "copy GB/s": limit / 1e9,
                "same tokens": str(equal),
            }
        )
    print(table(rows))
    return {"rows": rows}


def _steps(moments: list[float]) -> list[float]:
    """Seconds of each decode step, from the moments of its tokens."""
    return [after - before for before, after in itertools.pairwise(moments)]
