"""Decoding SmolLM2 on the CPU: our engine beside transformers' ``generate``, in one run, with the bandwidth limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from minikv.errors import StateError


def run(out_dir: str | Path | None = None, quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Time fp32 greedy decode steps of both at batch 1 and 8.

    A step's time is (time for n tokens - time for 1 token) / (n - 1), so prefill and set-up cancel; the two take turns
    and the best of each is taken, so that foreign load on the machine hits both.

    Parameters
    ----------
    out_dir
        Folder for ``decode_cpu.json``; None writes nothing.
    quick
        Fewer tokens and repeats.
    device
        Only "cpu" is measured here.

    Returns
    -------
    dict
        ``rows``: one per batch size with tokens per second of both, their ratio, and bytes per second beside this
        machine's copy bandwidth.
    """
    try:
        import transformers
    except ImportError as e:
        raise StateError("bench decode_cpu compares with transformers: pip install 'minikv[bench]'") from e
    from minikv.engine import LLM, SamplingParams
    from minikv.measure.limits import copy_bandwidth
    from minikv.models.download import model_path

    if torch.device(device).type != "cpu":
        return {"name": "decode_cpu", "rows": []}
    path = model_path()
    transformers.utils.logging.disable_progress_bar()
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    llm = LLM("smollm2-135m", device="cpu", dtype="float32", kv_tokens=4096)
    weights = sum(p.numel() * p.element_size() for p in llm.decoder.parameters())
    tokens, repeats, limit = (9, 2, copy_bandwidth("cpu")) if quick else (33, 4, copy_bandwidth("cpu"))
    rows = []
    for batch in (1, 8):
        prompts = [[(7 * i + 13 * j) % 40000 + 100 for j in range(32)] for i in range(batch)]
        given = torch.tensor(prompts)

        def ours(n: int, prompts: list = prompts) -> list[list[int]]:
            params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, cache=False)
            return [out.token_ids for out in llm.generate(prompts, params)]

        def peer(n: int, given: torch.Tensor = given) -> list[list[int]]:
            options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
            with torch.inference_mode():
                return theirs.generate(given, attention_mask=torch.ones_like(given), **options)[:, 32:].tolist()

        equal = ours(tokens) == peer(tokens)  # also the warm-up
        ours_s, peer_s = _steps(ours, tokens, repeats), _steps(peer, tokens, repeats)
        for _ in range(repeats - 1):
            ours_s, peer_s = min(ours_s, _steps(ours, tokens, 1)), min(peer_s, _steps(peer, tokens, 1))
        kv = batch * (32 + tokens // 2) * llm.pool.bytes_per_token
        row = {
            "batch": batch,
            "minikv_tok_s": batch / ours_s,
            "transformers_tok_s": batch / peer_s,
            "ratio": peer_s / ours_s,
            "bytes_s": (weights + kv) / ours_s,
            "copy_bytes_s": limit,
            "same_tokens": equal,
        }
        rows.append(row)
        print(
            f"decode cpu fp32 batch {batch}: minikv {row['minikv_tok_s']:.1f} tok/s, "
            f"transformers {row['transformers_tok_s']:.1f} tok/s, ratio {row['ratio']:.2f}; "
            f"{row['bytes_s'] / 1e9:.1f} GB/s of {limit / 1e9:.1f} GB/s copied; same tokens: {equal}"
        )
    result = {"name": "decode_cpu", "rows": rows}
    if out_dir is not None:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        (Path(out_dir) / "decode_cpu.json").write_text(json.dumps(result, indent=1))
    return result


def _steps(generate: Callable[[int], object], tokens: int, repeats: int) -> float:
    """Seconds per decode step, the best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        moments = []
        for n in (1, tokens):
            start = perf_counter()
            generate(n)
            moments.append(perf_counter() - start)
        best = min(best, (moments[1] - moments[0]) / (tokens - 1))
    return best
