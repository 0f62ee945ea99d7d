"""Many requests of uneven lengths: our engine beside transformers with the same weights, in one
run."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from minikv.device import default_dtype, memory_facts, synchronize
from minikv.engine import LLM, SamplingParams
from minikv.measure.limits import copy_bandwidth, matmul_rate
from minikv.measure.table import table
from minikv.models.files.shapes import shape


@dataclass(frozen=True)
class Load:
    """How much is asked of whom; lengths are drawn evenly from `low` to `high`, for prompts and
    outputs alike."""

    model: str
    requests: int
    low: int
    high: int
    static_batch: int  # transformers' generate serves one batch of so many of the requests
    # seconds for each of transformers' ways; what it made of the outputs until then is counted
    patience: float
    continuous: bool = True


LOADS = {
    "cuda": Load("random:qwen3-0.6b", 256, 100, 1024, static_batch=128, patience=35.0),
    "cuda quick": Load("random:qwen3-0.6b", 64, 20, 200, static_batch=32, patience=15.0),
    # continuous batching fills most of a CPU's memory before it begins
    "cpu": Load("tiny", 16, 10, 60, static_batch=8, patience=35.0, continuous=False),
}


def run(
    out_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    device: torch.device | str = "auto",
) -> dict[str, Any]:
    """Serve all requests greedily; then as many by transformers, where it is installed, as it gets
    done in its time.

    The limit is what this machine needs at least: each decode step reads all weights once and the
    keys and values of its requests, at the speed of a copy, and prompts run at the speed of a large
    matrix product. transformers' ``generate`` gets one static batch (padded left; only the tokens
    asked for are counted), its continuous batching all requests. Each row is printed as soon as it
    is measured.

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
        ``rows``: one per path, tokens per second are those of outputs. Ours says how the time was
        spent: `steps`, requests per decode step (`batch`), the share of extend steps (`extend`),
        and of the decode steps' time the share in which the host did not wait for the device
        (`host`, on CUDA).
    """
    kind = (
        torch.device(device).type
        if device != "auto"
        else "cuda"
        if torch.cuda.is_available()
        else "cpu"
    )
    rows = []
    for row in _measured(LOADS["cuda quick" if quick and kind == "cuda" else kind], kind):
        rows.append(row)
        print(table([row]), flush=True)
    print(table(rows))
    return {"rows": rows}


def _measured(load: Load, kind: str) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(load.low, load.high + 1, (load.requests, 2))
    per_token = shape(load.model.removeprefix("random:")).kv_bytes_per_token(default_dtype(kind))
    pages = min(
        int((-(-lengths.sum(1) // 16)).sum()), memory_facts(kind).free // 2 // per_token // 16
    )
    started = perf_counter()
    llm = LLM(
        load.model,
        device=kind,
        max_requests=load.requests,
        max_context=2 * load.high,
        prefix_cache=False,
        kv_tokens=16 * pages,
        chunk_tokens=8192,
        progress=False,
    )
    prompts = [rng.integers(0, llm.config.vocab_size, n) for n in lengths[:, 0]]
    print(f"{load.model}, {llm.decoder.norm.weight.dtype}, {llm.pool}")
    # The same prompts, so that kernels of all extend steps are compiled, and batches of every size.
    _ours(llm, prompts, [min(n, 4 + i // 2) for i, n in enumerate(lengths[:, 1].tolist())])
    print(f"ready after {perf_counter() - started:.1f} s", flush=True)
    with _watched(llm) as seen:
        seconds = _ours(llm, prompts, lengths[:, 1].tolist())
    rate = lengths[:, 1].sum() / seconds
    yield _row("minikv", lengths, seconds, None) | seen
    yield _row("limit of this machine", lengths, _limit(llm, lengths), rate)
    decoder = llm.decoder
    del llm  # its pool makes room for theirs
    try:
        model = transformers_model(decoder)
    except ImportError:
        print(
            "only minikv was measured; for transformers: "
            "pip install -c constraints.txt -e '.[bench]'"
        )
        return
    given, asked = [prompt.tolist() for prompt in prompts], lengths[:, 1]
    paths = {
        "static batch": (_static, load.static_batch),
        "continuous batching": (_continuous, load.requests),
    }
    for name, (serve, n) in list(paths.items())[: 1 + load.continuous]:
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
        try:
            made, seconds = serve(model, given[:n], asked[:n], load.patience)
        except Exception as e:  # versions differ in what they have and need
            print(f"transformers' {name} does not run here: {type(e).__name__}: {e}")
            continue
        print(
            f"transformers' {name} made {made.sum() / asked[:n].sum():.0%} of the tokens asked for"
        )
        if made.sum():
            served = np.stack([lengths[:n, 0], made], 1)
            yield _row(f"transformers, {name}", served, seconds, rate)


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
        "minikv / this": None if ours is None else float(ours) * seconds / output,
    }


def _ours(llm: LLM, prompts: list[np.ndarray], asked: list[int]) -> float:
    params = [
        SamplingParams(max_tokens=asked[i], temperature=0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    started = perf_counter()
    outs = llm.generate(prompts, params)
    seconds = perf_counter() - started
    assert [len(out.token_ids) for out in outs] == [p.max_tokens for p in params], outs[0].error
    return seconds


@contextlib.contextmanager
def _watched(llm: LLM) -> Iterator[dict[str, Any]]:
    """A dict that says, in the end, which steps the engine took and how long the host waited in
    decode steps."""
    events: list[dict] = []
    waits: list[float] = []
    seen: dict[str, Any] = {}
    wait = torch.cuda.Event.synchronize  # decode steps wait nowhere else

    def timed(event: Any) -> None:
        started = perf_counter()
        wait(event)
        waits.append(perf_counter() - started)

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
    llm.events.listeners.append(events.append)
    before = perf_counter()
    try:
        yield seen
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
        llm.events.listeners.remove(events.append)
    spent: dict[str, list[float]] = {"extend": [], "decode": []}
    steps = [e for e in events if e["event"] == "step"]
    for step in steps:
        spent[step["kind"]].append(step["t"] - before)
        before = step["t"]
    extend, decode = (sum(spent[kind]) for kind in ("extend", "decode"))
    seen["steps"] = len(steps)
    seen["batch"] = sum(len(step["decodes"]) for step in steps) / max(1, len(spent["decode"]))
    seen["extend"] = extend / (extend + decode)
    seen["host"] = 1 - sum(waits) / decode if waits else None


def _limit(llm: LLM, lengths: np.ndarray) -> float:
    """Seconds below which no engine gets that computes each request by itself, with all requests
    decoding at once."""
    weights = sum(p.numel() for p in llm.decoder.parameters())
    size = llm.decoder.norm.weight.element_size()
    prompt, output = lengths.astype(np.float64).T
    kv = llm.pool.bytes_per_token * float((output * prompt + output * (output - 1) / 2).sum())
    moved = float(output.max()) * weights * size + kv
    embedding = 0 if llm.config.tie_embeddings else llm.decoder.embed_tokens.weight.numel()
    computed = 2 * (weights - embedding - llm.decoder.lm_head.weight.numel()) * float(prompt.sum())
    return moved / copy_bandwidth(llm.device) + computed / matmul_rate(
        llm.device, llm.decoder.norm.weight.dtype
    )


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
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        vocab_size=ours.vocab_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.q_heads,
        num_key_value_heads=ours.kv_heads,
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_context,
        rms_norm_eps=ours.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=ours.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    like = decoder.norm.weight
    with torch.device(like.device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(like.dtype).eval()
    found = model.load_state_dict(decoder.checkpoint_views(), strict=False)
    assert not found.unexpected_keys, found
    assert set(found.missing_keys) <= {"lm_head.weight"}, found
    return model


def _static(
    model: Any, prompts: list[list[int]], asked: np.ndarray, patience: float
) -> tuple[np.ndarray, float]:
    """Tokens of each request that ``generate`` makes of one batch, padded left, and seconds."""
    longest, most = max(map(len, prompts)), int(asked.max())
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    seen = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    started, made = 0.0, 0
    for tokens in (2, most):  # the first is a warm-up
        synchronize(model.device)
        started = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=seen,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                max_time=patience,
            )
        made = out.shape[1] - longest
    synchronize(model.device)
    return np.minimum(asked, made), perf_counter() - started


def _continuous(
    model: Any, prompts: list[list[int]], asked: np.ndarray, patience: float
) -> tuple[np.ndarray, float]:
    """Tokens of each request that were there after `patience` seconds, or seconds until all
    were."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False, max_new_tokens=int(asked.max()), eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=config)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    made, numbers = np.zeros(len(prompts), np.int64), {}

    def take(timeout: float) -> bool:
        result = manager.get_result(timeout=timeout)
        if result is not None and result.is_finished():  # in the end also those that were cut off
            made[numbers[result.request_id]] = len(result.generated_tokens)
        return result is not None

    started = perf_counter()
    try:
        for i, (prompt, tokens) in enumerate(zip(prompts, asked.tolist(), strict=True)):
            numbers[manager.add_request(prompt, max_new_tokens=tokens)] = i
        while (made < asked).any() and perf_counter() - started < patience and manager.is_running():
            take(timeout=0.2)
        seconds = perf_counter() - started
    finally:
        with contextlib.suppress(Exception):
            manager.stop(block=True, timeout=10, hard_stop=True)
    while take(timeout=0.2):
        pass
    return made, seconds
