"""Attention over paged keys and values: one oracle, and two implementations (Triton, PyTorch)
behind one signature.

Read in this order: ``reference.py`` says what is computed, ``api.py`` how it is called and
``options.py`` what is checked; ``cpu.py`` says how a CPU does it, ``softmax.py``, ``decode.py``,
``extend.py``, ``unified.py`` and ``merge.py`` how a GPU does it. ``plan.py`` and ``tiles.py``
choose how the work is cut, ``slot_lists.py`` makes the lists, and a model calls ``backend.py``.
"""

from minikv.attention.api import decode_attention, extend_attention, extend_attention_unified
from minikv.attention.backend import AttentionBackend, LayerAttention, StepInputs
from minikv.attention.merge import merge_states
from minikv.attention.plan import AttentionPlan
from minikv.attention.reference import reference_attention
from minikv.attention.slot_lists import build_kv_indices, build_unified_kv_indices

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
    "StepInputs",
]
