"""What an engine is built with: its options, checked, and the size of its KV pool."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from minikv.device import memory_facts
from minikv.errors import ArgumentError
from minikv.memory import KVPool, MLAPool, plan_size
from minikv.models import ModelConfig
from minikv.models.files.load import DTYPES
from minikv.numbers import real, whole

CPU_POOL = 2 << 30  # most bytes of a pool on a CPU, unless more are asked for: they are zeroed
KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}
REMEDIES = {
    "page_size": "must be an integer between 1 and 256",
    "kv_tokens": "must be None or a number of tokens, at least one page",
    "kv_memory": "must be None or a number of bytes that holds at least one page",
    "max_requests": "must be 1 or more",
    "max_context": "must be None or 1 or more",
    "chunk_tokens": "must be 1 or more",
}


def check_options(attention: Any, graphs: Any, **sizes: Any) -> list[Any]:
    """Raise ArgumentError for what no engine can be built with, before a model is loaded for it;
    the sizes as numbers, in their order."""
    if not isinstance(attention, str) or attention not in ("auto", "triton", "torch"):
        raise ArgumentError("attention", attention, "use 'auto', 'triton' or 'torch'")
    if not isinstance(graphs, bool | np.bool_ | str) or graphs not in (True, False, "auto"):
        raise ArgumentError("graphs", graphs, "use 'auto', True or False")
    for name, value in sizes.items():
        remedy = REMEDIES[name]
        if name == "kv_memory" and value is not None:
            sizes[name] = real(name, value, 1, sys.float_info.max, remedy)
        elif value is not None or name not in ("kv_tokens", "kv_memory", "max_context"):
            sizes[name] = whole(name, value, 1, 256 if name == "page_size" else None, remedy)
    kv_tokens, kv_memory = sizes["kv_tokens"], sizes["kv_memory"]
    if kv_tokens is not None and kv_memory is not None:
        raise ArgumentError("kv_memory", kv_memory, "give kv_tokens or kv_memory, not both")
    if kv_tokens is not None and kv_tokens < sizes["page_size"]:
        raise ArgumentError("kv_tokens", kv_tokens, REMEDIES["kv_tokens"])
    return list(sizes.values())


def check_room(argument: str, value: Any, need: int, device: torch.device) -> None:
    """Raise ArgumentError where `need` bytes are more than what is free: asking for them could end
    the process."""
    free = memory_facts(device).free
    if need > free:
        needs, left = (f"{min(n, 2**99) / 2**30:,.1f} GiB" for n in (need, free))
        remedy = f"needs {needs}, and {left} are free on {device}; lower it"
        raise ArgumentError(argument, value, remedy)


def pick_context(max_context: int | None, longest: int) -> int:
    """The context length, checked against what the model was trained for."""
    remedy = f"the model reads at most {longest} tokens; lower it or pass None"
    return whole("max_context", max_context or longest, 1, longest, remedy)


def pool_size(
    per_token: int,
    page_size: int,
    device: torch.device,
    kv_tokens: int | None,
    kv_memory: float | None,
    most: int,
) -> int:
    """Tokens of the KV pool: `kv_tokens`, or what `kv_memory` bytes hold at `per_token` bytes each,
    or a quarter of the free memory, and then no more than `most` tokens, nor 2 GiB on a CPU."""
    size = kv_tokens
    if size is None:
        try:
            memory = None if kv_memory is None else int(kv_memory)
            size = plan_size(memory, bytes_per_token=per_token, page_size=page_size, device=device)
        except ArgumentError as e:
            raise ArgumentError("kv_memory", e.value, e.remedy) from None
        if kv_memory is None:
            if device.type == "cpu":
                most = min(most, CPU_POOL // per_token)
            size = min(size, -(-most // page_size) * page_size)
    asked = "kv_tokens" if kv_memory is None else "kv_memory"
    check_room(asked, kv_memory or size, (size + page_size) * per_token, device)
    return size


def build_pool(
    config: ModelConfig, size: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVPool | MLAPool:
    """The KV pool of a model."""
    shape, kind = (config.num_layers, config.kv_heads, config.head_dim), KVPool
    if config.mla is not None:
        shape, kind = (config.num_layers, config.mla.kv_lora_rank, config.mla.rope_dim), MLAPool
    return kind(size, page_size, *shape, dtype, device)
