"""Attention over paged keys and values: one oracle, and two implementations (Triton, PyTorch)
behind one signature.

Read in this order: ``reference.py`` says what is computed, ``torch_path.py`` how a CPU does it,
``inner.py``, ``decode.py``, ``extend.py`` and ``unified.py`` how a GPU does it, ``backend.py`` how
a model calls it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minikv.attention.backend import AttentionBackend, LayerAttention
    from minikv.attention.decode import decode_attention
    from minikv.attention.extend import extend_attention
    from minikv.attention.merge import merge_states
    from minikv.attention.plan import AttentionPlan
    from minikv.attention.reference import reference_attention
    from minikv.attention.slot_lists import build_kv_indices, build_unified_kv_indices
    from minikv.attention.unified import extend_attention_unified

_HOME = {
    "AttentionBackend": "backend",
    "AttentionPlan": "plan",
    "LayerAttention": "backend",
    "build_kv_indices": "slot_lists",
    "build_unified_kv_indices": "slot_lists",
    "decode_attention": "decode",
    "extend_attention": "extend",
    "extend_attention_unified": "unified",
    "merge_states": "merge",
    "reference_attention": "reference",
}
__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "reference_attention",
    "extend_attention",
    "extend_attention_unified",
    "decode_attention",
    "merge_states",
    "build_kv_indices",
    "build_unified_kv_indices",
    "AttentionPlan",
    "AttentionBackend",
    "LayerAttention",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"minikv.attention.{_HOME[name]}"), name)
    raise AttributeError(f"module 'minikv.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
