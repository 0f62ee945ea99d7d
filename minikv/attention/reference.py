"""What attention computes, as plainly as it can be written: float64, one request at a time, every
option in turn.

Nothing here is fast. Every implementation is tested against this one function, and this one against
numbers worked out by hand. It covers all three forms:

=======  ================================  ====================================================
form     call                              keys of a request
=======  ================================  ====================================================
extend   ``k, v, qo_indptr`` given         its list (the prefix), then its rows of k and v
unified  ``qo_indptr, prefix_lens`` given  its list, which holds prefix and new tokens
decode   none of them                      its list, whose last entry is the query's own token
=======  ================================  ====================================================
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minikv.attention.options import Options, check
from minikv.errors import ArgumentError


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in float64; see the table at the top of the file for the three forms.

    Parameters
    ----------
    q
        Queries [tokens, q_heads, d_qk]; in the decode form one per request.
    k_cache, v_cache
        Pools [slots, kv_heads, d_qk] and [slots, kv_heads, d_v].
    kv_indptr, kv_indices
        int [batch + 1] and int [entries]: the slots of request r are
        ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``.
    k, v
        New keys and values [tokens, kv_heads, d_qk or d_v] (extend form).
    qo_indptr
        int [batch + 1]: the rows of q (and of k and v) that belong to each request.
    prefix_lens
        int [batch]: how many entries of each list are prefix (unified form).
    **options
        As in ``extend_attention``: sm_scale, causal, logit_cap, sliding_window, window_start,
        custom_mask, mask_indptr, skip_prefix_mask, sinks, xai_temperature_len,
        xai_temperature_rule, k_scale, v_scale.

    Returns
    -------
    out, lse
        float64 [tokens, q_heads, d_v], and the natural log of the summed exponentials of each row's
        scores [tokens, q_heads]: -inf (and out 0) for a row without keys.

    Examples
    --------
    Equal scores: plain means.

    >>> q, keys, values = torch.zeros(1, 1, 16), torch.zeros(3, 1, 16), torch.arange(3.0)
    >>> lists = torch.tensor([0, 3]), torch.tensor([0, 1, 2])
    >>> out, lse = reference_attention(q, keys, values.view(3, 1, 1), *lists, sliding_window=1)
    >>> out.item(), math.exp(lse.item())
    (1.5, 2.0)
    """
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    arguments |= {"kv_indptr": kv_indptr, "kv_indices": kv_indices}
    new = {"k": k, "v": v, "qo_indptr": qo_indptr, "prefix_lens": prefix_lens}
    given = {name: tensor for name, tensor in new.items() if tensor is not None}
    if set(given) not in ({"k", "v", "qo_indptr"}, {"qo_indptr", "prefix_lens"}, set()):
        remedy = "give k, v and qo_indptr, or qo_indptr and prefix_lens, or none"
        raise ArgumentError("qo_indptr", qo_indptr, remedy)
    opts = check({**arguments, **given, **options})
    starts = kv_indptr.tolist()
    rows = list(range(len(starts))) if qo_indptr is None else qo_indptr.tolist()

    out = torch.zeros(
        q.shape[0], q.shape[1], v_cache.shape[2], dtype=torch.float64, device=q.device
    )
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for r in range(len(starts) - 1):
        mine = slice(rows[r], rows[r + 1])
        slots = kv_indices[starts[r] : starts[r + 1]].long()
        keys = k_cache[slots].double() * opts.k_scale  # [listed, kv_heads, d_qk]
        values = v_cache[slots].double() * opts.v_scale
        if k is not None and v is not None:
            keys = torch.cat((keys, k[mine].double()))
            values = torch.cat((values, v[mine].double()))
        out[mine], lse[mine] = _attend(q[mine].double(), keys, values, r, opts)
    return out, lse


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, r: int, opts: Options
) -> tuple[Tensor, Tensor]:
    """One request: q [N, Hq, d_qk], keys [T, Hk, d_qk], values [T, Hk, d_v], all float64."""
    new, q_heads, _ = q.shape
    prefix = keys.shape[0] - new
    start = 0 if opts.window_start is None else int(opts.window_start[r])
    q_pos = start + prefix + torch.arange(new, device=q.device)
    k_pos = start + torch.arange(keys.shape[0], device=q.device)
    seen = _seen(q_pos, k_pos, prefix, r, opts)  # [N, T]

    # What no query sees may hold anything, NaN included; 0 * NaN would spread it.
    hidden = ~seen.any(0)
    group = q_heads // keys.shape[1]
    keys = keys.masked_fill(hidden[:, None, None], 0).repeat_interleave(group, 1)
    values = values.masked_fill(hidden[:, None, None], 0).repeat_interleave(group, 1)

    scores = torch.einsum("nhd,thd->hnt", q, keys) * opts.sm_scale
    if opts.logit_cap > 0:
        scores = opts.logit_cap * torch.tanh(scores / opts.logit_cap)
    scores = scores * _temperature(q_pos, opts)[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)  # [Hq, N]
    total = lse if opts.sinks is None else torch.logaddexp(lse, opts.sinks.double()[:, None])
    weights = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(scores - total[..., None]))
    return torch.einsum("hnt,thd->nhd", weights, values), lse.T


def _seen(q_pos: Tensor, k_pos: Tensor, prefix: int, r: int, opts: Options) -> Tensor:
    """bool [N, T]: which keys each query sees."""
    distance = q_pos[:, None] - k_pos[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if opts.custom_mask is not None and opts.mask_indptr is not None:
        first = int(opts.mask_indptr[r])
        seen = opts.custom_mask[first : first + seen.numel()].view(seen.shape).clone()
        if opts.skip_prefix_mask:
            seen[:, :prefix] = True
    elif opts.causal:
        seen = distance >= 0
    if opts.sliding_window >= 0:
        seen = seen & (distance <= opts.sliding_window)
    return seen


def _temperature(q_pos: Tensor, opts: Options) -> Tensor:
    """float64 [N]: what multiplies the scores of each query."""
    ones = torch.ones_like(q_pos, dtype=torch.float64)
    length, pos = opts.xai_temperature_len, q_pos.double()
    if length < 0:
        return ones
    if opts.xai_temperature_rule == "log":
        return torch.where(q_pos > length, torch.log2(pos) / math.log2(length), ones)
    return torch.where(q_pos >= length, length / (pos + 1), ones)
