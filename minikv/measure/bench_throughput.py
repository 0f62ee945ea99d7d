"""Many requests of uneven lengths: our engine beside transformers with the same weights, in one run."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from minikv.device import default_dtype, memory_facts, synchronize
from minikv.engine import LLM, SamplingParams
from minikv.measure.limits import copy_bandwidth, matmul_rate
from minikv.measure.table import table
from minikv.models.shapes import shape


@dataclass(frozen=True)
class Load:
    """How much is asked of whom; lengths are drawn evenly from `low` to `high`, for prompts and outputs alike."""

    model: str
    requests: int
    low: int
    high: int
    static_batch: int  # transformers' generate serves one batch of so many of the requests
    patience: float  # seconds for transformers' continuous batching, and what it finished is counted; 0: not tried


LOADS = {
    "cuda": Load("random:qwen3-0.6b", 256, 100, 1024, static_batch=128, patience=90.0),
    "cuda quick": Load("random:qwen3-0.6b", 64, 20, 200, static_batch=32, patience=30.0),
    "cpu": Load("tiny", 16, 10, 60, static_batch=8, patience=0.0),
}


def run(
    out_dir: str | os.PathLike[str] | None = None, quick: bool = False, device: torch.device | str = "auto"
) -> dict[str, Any]:
    """Serve all requests greedily; then some of them by transformers, where it is installed.

    The limit is what this machine needs at least: each decode step reads all weights once and the keys and values of
    its requests, at the speed of a copy, and prompts run at the speed of a large matrix product. transformers'
    ``generate`` gets one static batch (padded left, run until its longest output is complete; only the tokens asked for
    are counted), its continuous batching all requests for a limited time.

    Parameters
    ----------
    out_dir
        Not used: the suite writes the result.
    quick
        Fewer and shorter requests on CUDA.
    device
        "auto", "cpu" or "cuda".

    Returns
    -------
    dict
        ``rows``: one per path, tokens per second are those of outputs.
    """
    kind = torch.device(device).type if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    load = LOADS["cuda quick" if quick and kind == "cuda" else kind]
    rng = np.random.default_rng(0)
    lengths = rng.integers(load.low, load.high + 1, (load.requests, 2))
    per_token = shape(load.model.removeprefix("random:")).kv_bytes_per_token(default_dtype(kind))
    pages = min(int((-(-lengths.sum(1) // 16)).sum()), memory_facts(kind).free // 2 // per_token // 16)
    llm = LLM(
        load.model, device=kind, max_requests=load.requests, max_context=2 * load.high, prefix_cache=False,
        kv_tokens=16 * pages, chunk_tokens=8192, progress=False,
    )  # fmt: skip
    prompts = [rng.integers(0, llm.config.vocab_size, n) for n in lengths[:, 0]]
    asked = lengths[:, 1].tolist()
    print(f"{load.model}, {llm.decoder.norm.weight.dtype}, {llm.pool}")
    _ours(llm, prompts[: max(4, load.requests // 8)], [4] * load.requests)  # kernels are compiled first
    seconds = _ours(llm, prompts, asked)
    rate = sum(asked) / seconds
    rows = [_row("minikv", lengths, seconds, None), _row("limit of this machine", lengths, _limit(llm, lengths), rate)]
    decoder = llm.decoder
    del llm  # its pool makes room for theirs
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
    try:
        model = transformers_model(decoder)
    except ImportError:
        print("transformers is not installed here (pip install 'minikv[bench]'): only minikv was measured")
    else:
        rows += _peers(model, load, prompts, lengths, rate)
    print(table(rows))
    return {"rows": rows}


def _row(path: str, lengths: np.ndarray, seconds: float, ours: float | None) -> dict[str, Any]:
    """`ours` are minikv's tokens per second."""
    prompt, output = lengths.sum(0).tolist()
    return {
        "path": path,
        "requests": len(lengths),
        "prompt tokens": prompt,
        "output tokens": output,
        "seconds": seconds,
        "tok/s": output / seconds,
        "minikv / this": None if ours is None else ours * seconds / output,
    }


def _ours(llm: LLM, prompts: list[np.ndarray], asked: list[int]) -> float:
    params = [SamplingParams(max_tokens=asked[i], temperature=0, ignore_eos=True) for i in range(len(prompts))]
    started = perf_counter()
    outs = llm.generate(prompts, params)
    seconds = perf_counter() - started
    assert [len(out.token_ids) for out in outs] == [p.max_tokens for p in params], outs[0].error
    return seconds


def _limit(llm: LLM, lengths: np.ndarray) -> float:
    """Seconds below which no engine gets that computes each request by itself, with all requests decoding at once."""
    weights = sum(p.numel() for p in llm.decoder.parameters())
    size = llm.decoder.norm.weight.element_size()
    prompt, output = lengths.astype(np.float64).T
    kv = llm.pool.bytes_per_token * float((output * prompt + output * (output - 1) / 2).sum())
    moved = float(output.max()) * weights * size + kv
    embedding = 0 if llm.config.tie_embeddings else llm.decoder.embed_tokens.weight.numel()
    computed = 2 * (weights - embedding - llm.decoder.lm_head.weight.numel()) * float(prompt.sum())
    return moved / copy_bandwidth(llm.device) + computed / matmul_rate(llm.device, llm.decoder.norm.weight.dtype)


# ---- transformers


def transformers_model(decoder: Any) -> Any:
    """transformers' model of the same shape, on the same device, with a copy of the same weights.

    Raises
    ------
    ImportError
        Where transformers is not installed.
    """
    import transformers

    ours, family = decoder.config, {"llama": "Llama", "qwen3": "Qwen3"}[decoder.config.architecture]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=ours.hidden_size, intermediate_size=ours.intermediate_size, vocab_size=ours.vocab_size,
        num_hidden_layers=ours.num_layers, num_attention_heads=ours.q_heads, num_key_value_heads=ours.kv_heads,
        head_dim=ours.head_dim, max_position_embeddings=ours.max_context, rms_norm_eps=ours.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=ours.tie_embeddings, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    like = decoder.norm.weight
    with torch.device(like.device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(like.dtype).eval()
    found = model.load_state_dict(decoder.checkpoint_views(), strict=False)
    assert not found.unexpected_keys, found
    assert set(found.missing_keys) <= {"lm_head.weight"}, found
    return model


def _peers(model: Any, load: Load, prompts: list[np.ndarray], lengths: np.ndarray, ours: float) -> list[dict[str, Any]]:
    given = [prompt.tolist() for prompt in prompts]
    _static(model, given[:2], 4)  # warm-up
    n = load.static_batch
    seconds = _static(model, given[:n], int(lengths[:n, 1].max()))
    rows = [_row("transformers, static batch", lengths[:n], seconds, ours)]
    if not load.patience:  # on a CPU it fills most of the memory before it begins
        return rows
    try:
        done, seconds = _continuous(model, given, lengths[:, 1].tolist(), load.patience)
        print(f"transformers' continuous batching finished {len(done)} of {len(given)} requests in {seconds:.0f} s")
        if done:
            rows.append(_row("transformers, continuous batching", lengths[done], seconds, ours))
    except Exception as e:  # versions differ in what they have and need
        print(f"transformers' continuous batching does not run here: {type(e).__name__}: {e}")
    return rows


def _static(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds that ``generate`` takes for one batch, padded left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    synchronize(model.device)
    started = perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
    synchronize(model.device)
    seconds = perf_counter() - started
    assert out.shape[1] == longest + tokens
    return seconds


def _continuous(model: Any, prompts: list[list[int]], asked: list[int], patience: float) -> tuple[list[int], float]:
    """Which requests finished within `patience` seconds, and when the last of them did."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=max(asked), eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    done: list[int] = []
    numbers: dict[str, int] = {}
    started = finished = perf_counter()
    try:
        for i, (prompt, tokens) in enumerate(zip(prompts, asked, strict=True)):
            numbers[manager.add_request(prompt, max_new_tokens=tokens)] = i
        while len(done) < len(prompts) and perf_counter() - started < patience and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done.append(numbers[result.request_id])
                finished = perf_counter()
    finally:
        with contextlib.suppress(Exception):
            manager.stop(block=True, timeout=10, hard_stop=True)
    return done, finished - started
