"""Attention in plain PyTorch: the CPU's real path, and the twin that Triton's kernels are compared
with.

A batch becomes a few rectangles (``padding.py``); each gathers its keys and values once and goes
through the fused attention of PyTorch, or, where an option needs the scores themselves (cap, sinks,
log-sum-exp, unequal head sizes), through two matrix products in fp32. Lengths are read on the host,
which on CUDA waits for the device: there Triton is the path.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention.options import Options
from minikv.attention.padding import KV_BYTES, Rectangle, rectangles

SMALL_BYTES = 1 << 17
New = tuple[Tensor | None, Tensor | None]  # the keys and values that are not in the pool
_workspace = threading.local()


def plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    opts: Options,
    **lists: Any,
) -> list[Rectangle]:
    """What :func:`run` needs to know of a batch; the same for all layers with the same mask and
    temperature.

    `lists` are what the form of the call has beside the keys' lists: ``qo_indptr``, ``prefix_lens``
    and ``new_keys`` of :func:`~minikv.attention.padding.rectangles`; a decode has none.
    """
    token_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
    return rectangles(
        kv_indptr, kv_indices, opts, q_heads=q.shape[1], token_bytes=token_bytes, **lists
    )


def run(
    parts: list[Rectangle],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    opts: Options,
    return_lse: bool = False,
    out: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [tokens, q_heads, d_qk] over a planned batch; returns out, or (out, lse)."""
    tokens, q_heads, _ = q.shape
    if not return_lse and out is None and len(parts) == 1 and parts[0].rows == slice(0, tokens):
        return _attend(parts[0], q, k_cache, v_cache, opts, False, (k, v))[0]
    out = q.new_zeros(tokens, q_heads, v_cache.shape[2]) if out is None else out.zero_()
    lse = torch.full((tokens, q_heads), -torch.inf, device=q.device) if return_lse else None
    for part in parts:
        got, got_lse = _attend(part, q, k_cache, v_cache, opts, return_lse, (k, v))
        _scatter(out, part, got)
        if lse is not None and got_lse is not None:
            _scatter(lse, part, got_lse)
    return out if lse is None else (out, lse)


def _attend(
    part: Rectangle,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    opts: Options,
    need_lse: bool,
    new: New,
) -> tuple[Tensor, Tensor | None]:
    """One rectangle: out [n * N, q_heads, d_v] in q's dtype and, if asked for, lse fp32 [n * N,
    q_heads]."""
    (n, N), q_heads, (k_new, v_new) = part.shape, q.shape[1], new
    scores_needed = (
        need_lse or opts.logit_cap > 0 or opts.sinks is not None or q.shape[2] != v_cache.shape[2]
    )
    exact = k_cache.dtype == q.dtype and opts.k_scale == opts.v_scale == 1.0
    scale, wide = opts.sm_scale, torch.float32
    if exact and not scores_needed and part.temperature is None and scale > 0:
        wide = q.dtype

    k = _gather("k", part, k_cache, k_new, opts.k_scale, wide)  # [n, T, kv_heads, d_qk]
    same_rows = (
        v_cache.data_ptr() == k_cache.data_ptr() and v_new is None and opts.k_scale == opts.v_scale
    )
    v = (
        k[..., : v_cache.shape[2]]
        if same_rows
        else _gather("v", part, v_cache, v_new, opts.v_scale, wide)
    )
    if part.hidden is not None:
        k, v = k.masked_fill(part.hidden, 0), v.masked_fill(part.hidden, 0)
    rows = q[part.rows].to(wide).view(n, N, q_heads, -1)
    if scale <= 0:  # fused kernels multiply by the scale after masking: 0 * -inf
        rows, scale = rows * scale, 1.0
    if part.temperature is not None and not opts.logit_cap:
        rows = rows * part.temperature[:, :, None, None]

    k, v = k.transpose(1, 2), v.transpose(1, 2)  # heads before tokens
    if (
        N == 1 and not scores_needed and part.dead is None
    ):  # heads that share a KV head are one block of queries
        rows = rows.view(n, k.shape[1], -1, q.shape[2])
        out = F.scaled_dot_product_attention(rows, k, v, part.mask, scale=scale)
        return out.reshape(n, q_heads, -1).to(q.dtype), None
    rows, lse = rows.transpose(1, 2), None
    if scores_needed:
        out, lse = _with_scores(part, rows, k, v, scale, opts)
    else:
        out = F.scaled_dot_product_attention(
            rows,
            k,
            v,
            part.mask,
            is_causal=part.triangle,
            scale=scale,
            enable_gqa=q_heads != k.shape[1],
        )
    out = out.transpose(1, 2)  # [n, N, q_heads, d_v]
    if part.dead is not None:
        out = out.masked_fill(part.dead[:, :, None, None], 0)
    return out.reshape(n * N, q_heads, -1).to(q.dtype), lse


def _gather(
    name: str, part: Rectangle, cache: Tensor, new: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Keys (or values) of one rectangle [n, T, kv_heads, d]: from the pool, then the new ones."""
    n, pieces = part.shape[0], []
    if part.slots is not None:
        old = (
            cache[part.slots] if isinstance(part.slots, slice) else _select(name, cache, part.slots)
        )
        old = old.to(dtype)
        pieces.append((old if scale == 1.0 else old * scale).view(n, -1, *cache.shape[1:]))
    if part.new is not None and new is not None:
        pieces.append(new[part.new].to(dtype).unflatten(0, (n, -1)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _select(name: str, cache: Tensor, slots: Tensor) -> Tensor:
    """``cache[slots]``; on the CPU in memory that this thread keeps, valid until the next call with
    this name.

    Fresh memory can cost more than the copy: for large blocks malloc asks the system for new pages
    every time.
    """
    size = slots.shape[0] * cache.shape[1] * cache.shape[2]
    if cache.device.type != "cpu" or not SMALL_BYTES < size * cache.element_size() <= KV_BYTES:
        return cache.index_select(0, slots)
    key = f"{name} {cache.dtype}"
    if key not in vars(_workspace):
        with torch.inference_mode(False):
            setattr(
                _workspace, key, torch.empty(KV_BYTES // cache.element_size(), dtype=cache.dtype)
            )
    out = getattr(_workspace, key)[:size].view(-1, *cache.shape[1:])
    return torch.index_select(cache, 0, slots, out=out)


def _with_scores(
    part: Rectangle, q: Tensor, k: Tensor, v: Tensor, scale: float, opts: Options
) -> tuple[Tensor, Tensor]:
    """The definition in fp32: q [n, Hq, N, d_qk], k [n, Hk, T, d_qk], v [n, Hk, T, d_v] -> out, lse
    [n * N, Hq]."""
    n, q_heads, N, _ = q.shape
    kv_heads, T = k.shape[1], k.shape[2]
    scores = (q.reshape(n, kv_heads, -1, q.shape[3]) @ k.transpose(2, 3)).view(
        n, q_heads, N, T
    ) * scale
    if opts.logit_cap > 0:
        scores = opts.logit_cap * torch.tanh(scores / opts.logit_cap)
        if part.temperature is not None:
            scores = scores * part.temperature[:, None, :, None]
    if part.triangle:
        scores = scores.masked_fill(
            torch.ones(N, T, dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    elif part.mask is not None:
        scores = scores.masked_fill(~part.mask, -torch.inf)
    lse = scores.logsumexp(-1)  # [n, Hq, N]
    total = lse if opts.sinks is None else torch.logaddexp(lse, opts.sinks.float()[:, None])
    weights = torch.exp(scores - total[..., None])  # NaN in rows without keys: `dead` clears them
    out = weights.view(n, kv_heads, -1, T) @ v
    return out.view(n, q_heads, N, -1), lse.transpose(1, 2).reshape(n * N, q_heads)


def _scatter(into: Tensor, part: Rectangle, rows: Tensor) -> None:
    """Write a rectangle's real rows where they belong."""
    if isinstance(part.rows, slice):
        into[part.rows] = rows
    elif part.real is None:
        into.index_copy_(0, part.rows, rows)
    else:
        into.index_copy_(0, part.rows[part.real], rows[part.real])
