"""The three public functions of attention: their signatures, what they promise, and which
implementation runs.

Arguments are checked once (``options.py``). On CUDA Triton's kernels run (``extend.py``,
``unified.py``, ``decode.py``), on the CPU PyTorch (``cpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minikv.attention import cpu, options
from minikv.attention.decode import launch_decode
from minikv.attention.extend import launch_extend
from minikv.attention.plan import AttentionPlan
from minikv.attention.unified import launch_unified
from minikv.kernels.choice import use_triton


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    window_start: Tensor | None = None,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    skip_prefix_mask: bool = False,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    xai_temperature_rule: str = "log",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    max_extend_len: int | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over a cached prefix and over themselves, for a ragged batch laid end
    to end.

    Query i of a request with P prefix tokens has position P + i; it sees the whole prefix and, when
    causal, the new keys 0..i. A row that sees no key is 0, with log-sum-exp -inf. Keys and values
    that no query of their request may see may hold anything, NaN included.

    A graph can capture this call: the launch follows from shapes, `max_extend_len` and the plan's
    number of splits alone, and with a plan (on CUDA without one, too) the host reads no tensor. A
    replay then serves any batch of as many requests whose new tokens, laid end to end, fill no more
    than the rows of q, and are at most `max_extend_len` each, 0 included: refill `qo_indptr`,
    `kv_indptr`, `kv_indices`, and `mask_indptr` with `custom_mask`, in place. With Triton rows past
    ``qo_indptr[-1]`` may hold anything in the result.

    Parameters
    ----------
    q
        ``[tokens, q_heads, d_qk]``, fp16, bf16 or fp32; any ratio of query to KV heads.
    k, v
        The new keys and values, ``[tokens, kv_heads, d_qk]`` and ``[tokens, kv_heads, d_v]``.
    k_cache, v_cache
        The pool, ``[slots, kv_heads, d_qk]`` and ``[slots, kv_heads, d_v]``; only the listed slots
        are read.
    qo_indptr, kv_indptr
        int32 or int64 ``[batch + 1]``: where each request's new tokens, and its prefix in
        `kv_indices`, begin and end.
    kv_indices
        int32 or int64: the prefix slots of all requests, in order of position.
    sm_scale
        Multiplies the dot products; None is ``1 / sqrt(d_qk)``.
    logit_cap
        c > 0 turns a scaled score x into ``c * tanh(x / c)``; 0 is off.
    sliding_window
        W >= 0: a key is seen when ``query position - key position <= W``, so W + 1 keys; -1 is off.
    window_start
        int ``[batch]``: the position of each list's first entry, when lists hold only the window.
    custom_mask, mask_indptr
        bool, flattened ``[new, prefix + new]`` per request, and where each begins: replaces
        causality.
    skip_prefix_mask
        The prefix part of `custom_mask` is all True and need not be read.
    sinks
        ``[q_heads]``: a logit per head that joins the denominator once.
    xai_temperature_len, xai_temperature_rule
        L >= 2: scores of a query at pos > L times ``log2(pos) / log2(L)`` ("log"), or at pos >= L
        times ``L / (pos + 1)`` ("inverse").
    k_scale, v_scale
        Multiply what is read from the pool; the new `k` and `v` are not scaled.
    page_size
        A promise about `kv_indices`: each list (without `window_start`) is whole pages of
        neighbouring slots, the last one cut short. Pages that are a multiple of the kernel's key
        tile (64 keys; 128 for heads of up to 64) are then loaded by Hopper's copy engine.
    max_extend_len
        The longest request's new tokens, or a bound of it, if the caller knows: spares a search per
        program.
    return_lse
        Also return the natural log-sum-exp over keys (without the sink), fp32 ``[tokens,
        q_heads]``.
    plan
        Its ``num_kv_splits``, if it has a fixed number, is the number of parts that every prefix is
        cut into. With a plan no value of a tensor is looked at, on the CPU neither.
    out
        Where to write the result.
    backend
        "triton", "torch", or "auto": Triton on CUDA.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[tokens, q_heads, d_v]`` in q's dtype, and the log-sum-exp if asked for.

    Raises
    ------
    ArgumentError
        For shapes, dtypes, devices or options that do not fit together.

    Examples
    --------
    Two requests: one continues a prefix of 3 tokens with 2, one starts with 1. Scale 0 makes all
    weights equal.

    >>> import torch
    >>> q, k = torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    >>> v = torch.tensor([3.0, 4.0, 9.0])[:, None, None].repeat(1, 1, 16)
    >>> pool = torch.arange(8.0)[:, None, None].repeat(1, 1, 16)
    >>> lists = torch.tensor([0, 2, 3]), torch.tensor([0, 3, 3]), torch.tensor([0, 1, 2])
    >>> extend_attention(q, k, v, pool, pool, *lists)[:, 0, 0].tolist()
    [1.5, 2.0, 9.0]
    """
    return _attention(launch_extend, locals())


def extend_attention_unified(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    window_start: Tensor | None = None,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    skip_prefix_mask: bool = False,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    xai_temperature_rule: str = "log",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    max_extend_len: int | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over one list of slots that covers prefix and new tokens (their K and
    V already written).

    The Triton kernel gives a request the same bits whatever else is in the batch and wherever its
    prefix ends: tiles of queries and keys begin at multiples of the tile size counted from position
    0, their sizes depend on head dims and dtype only, and tiles are added in one fixed order. So a
    cold run, a run after a cache hit and a chunked run agree bit for bit. (The idea of
    batch-invariant kernels: Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025.)

    Parameters
    ----------
    q
        ``[tokens, q_heads, d_qk]``.
    k_cache, v_cache
        The pool, ``[slots, kv_heads, d_qk]`` and ``[slots, kv_heads, d_v]``.
    qo_indptr
        int ``[batch + 1]``: where each request's new tokens begin and end in q.
    kv_indptr, kv_indices
        int ``[batch + 1]`` and the slots of prefix and new tokens, as ``build_unified_kv_indices``
        makes them.
    prefix_lens
        int ``[batch]``: how many entries of each list are the prefix.
    k_scale, v_scale
        Multiply everything that is read, since everything is read from the pool.
    sm_scale, causal, logit_cap, sliding_window, window_start, custom_mask, mask_indptr,
    skip_prefix_mask, sinks, \
xai_temperature_len, xai_temperature_rule, page_size, max_extend_len, return_lse, plan, out, \
backend
        As in :func:`extend_attention`, whose call a graph can capture on the same terms.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[tokens, q_heads, d_v]`` in q's dtype, and the log-sum-exp ``[tokens, q_heads]`` if asked
        for.

    Raises
    ------
    ArgumentError
        For shapes, dtypes, devices or options that do not fit together.

    Examples
    --------
    A request with 3 cached tokens in slots 2, 5, 6 and 2 new ones in slots 7 and 1. Scale 0 makes
    all weights equal.

    >>> import torch
    >>> q, pool = torch.zeros(2, 1, 16), torch.arange(8.0)[:, None, None].repeat(1, 1, 16)
    >>> qo_indptr, kv_indptr, prefix_lens = map(torch.tensor, ([0, 2], [0, 5], [3]))
    >>> lists = qo_indptr, kv_indptr, torch.tensor([2, 5, 6, 7, 1]), prefix_lens
    >>> extend_attention_unified(q, pool, pool, *lists)[:, 0, 0].tolist()
    [5.0, 4.2...]
    """
    return _attention(launch_unified, locals())


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    window_start: Tensor | None = None,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    xai_temperature_rule: str = "log",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    num_kv_splits: int | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    early: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each request's newest token over all its listed keys, the newest (its own)
    included.

    A request of length L has its query at position L - 1 (plus `window_start`). Length 0 gives 0,
    and log-sum-exp -inf. Slots that are not listed, and listed ones outside the window, may hold
    anything, NaN included.

    Parameters
    ----------
    q
        ``[batch, q_heads, d_qk]``, fp16, bf16 or fp32; any ratio of query to KV heads.
    k_cache, v_cache
        The pool, ``[slots, kv_heads, d_qk]`` and ``[slots, kv_heads, d_v]``. For MLA, `v_cache` is
        a view of the first columns of `k_cache`: each row is then read once.
    kv_indptr
        int32 or int64 ``[batch + 1]``: where each request's slots in `kv_indices` begin and end.
    kv_indices
        int32 or int64: the slots of all requests, in order of position.
    sm_scale, logit_cap, sliding_window, window_start, sinks, xai_temperature_len,
    xai_temperature_rule
        As in ``extend_attention``.
    k_scale, v_scale
        Multiply what is read from the pool.
    page_size
        A promise about `kv_indices` that this kernel does not need.
    num_kv_splits
        n cuts every request into n parts of ``ceil(L / n)`` keys rounded up to the tile: a
        request's result is then bitwise the same whatever else is in the batch. None chooses by
        `plan`, or without one by the batch's shape.
    return_lse
        Also return the natural log-sum-exp over keys (without the sink), fp32 ``[batch, q_heads]``.
    plan
        An :class:`AttentionPlan` updated for these lengths: best for uneven batches, needed inside
        a captured graph. Without one, and nothing is read back from the device, each request is cut
        into equally many parts.
    out
        Where to write the result.
    backend
        "triton", "torch", or "auto": Triton on CUDA.
    early
        A promise that the lists and the plan are older than the kernel before this one, so that
        they can be read while it runs (sm90 and newer). It pays for a single request.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[batch, q_heads, d_v]`` in q's dtype, and the log-sum-exp if asked for.

    Raises
    ------
    ArgumentError
        For shapes, dtypes, devices, options or a plan that do not fit together.
    StateError
        For a plan that was last updated for another batch size.

    Examples
    --------
    Two requests of 3 and 1 tokens. Scale 0 makes all weights equal, so the results are means.

    >>> import torch
    >>> pool = torch.arange(8.0)[:, None, None].repeat(1, 1, 16)
    >>> indptr, indices = torch.tensor([0, 3, 4]), torch.tensor([4, 5, 6, 2])
    >>> o = decode_attention(torch.zeros(2, 1, 16), pool, pool, indptr, indices, sm_scale=0.0)
    >>> o[:, 0, 0].tolist()
    [5.0, 2.0]
    """
    return _attention(launch_decode, locals())


def _attention(launch: Callable[..., None], arguments: dict[str, Any]) -> Any:
    """Check the arguments of a public function, then run PyTorch, or the form's Triton kernels."""
    opts = options.check(arguments)
    tensors = {name: arguments[name] for name in options.REQUIRED if name in arguments}
    q, k_cache, v_cache = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    out, return_lse, plan = arguments["out"], arguments["return_lse"], arguments["plan"]
    if plan is not None and "num_kv_splits" in arguments:
        plan.check(q, v_cache, arguments["num_kv_splits"], opts.sliding_window)
    if not use_triton(arguments["backend"], q.device):
        k, v = tensors.get("k"), tensors.get("v")
        lists = tensors["kv_indptr"], tensors["kv_indices"]
        qo_indptr = tensors.get("qo_indptr")
        parts = cpu.plan(q, k_cache, v_cache, *lists, opts, qo_indptr, new_keys=k is not None)
        return cpu.run(parts, q, k_cache, v_cache, opts, return_lse, out, k, v)
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    numbers = {name: arguments[name] for name in options.BESIDE if name in arguments}
    launch(**tensors, out=out, lse=lse, opts=opts, **numbers)
    return out if lse is None else (out, lse)
