"""Attention in plain PyTorch: the CPU's real path, and the twin that Triton's kernels are compared
with.

A ragged batch becomes a few rectangles. Long requests are cut into blocks of queries, each with
only the keys it can see; blocks of as many queries and new keys share a rectangle, as long as
padding their listed keys at most doubles the work and the keys stay within a cache's reach. Padding
repeats a key that the block sees anyway, so that a masked weight never meets a NaN. All of this
depends on lengths and slots only: a model works it out once per step for all layers.

Each rectangle gathers its keys and values once and goes through the fused attention of PyTorch, or,
where an option needs the scores themselves (cap, sinks, log-sum-exp, unequal head sizes), through
two matrix products in fp32. Lengths are read on the host, which on CUDA waits for the device: there
Triton is the path.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention.options import Options

QUERY_BLOCK = 256
KV_BYTES = 8 << 20  # keys and values gathered at once: more would leave the cache before being read
CELLS = 1 << 24  # scores (queries x keys x heads) at once
SMALL_CELLS = 1 << 16  # smaller rectangles are padded freely: there each call costs more than cells
SMALL_BYTES = 1 << 17  # smaller copies of keys get fresh memory
_workspace = threading.local()


@dataclass(frozen=True, eq=False)
class Rectangle:
    """n blocks of N queries over T = L + M keys: L from the pool, M from the new ones.

    Attributes
    ----------
    shape
        (n, N).
    rows
        Rows of q: a slice, or int64 [n * N].
    slots
        Slots of the pool [n * L]; a slice when they are one run, which needs no copy.
    new
        Rows of the new keys: slice, int64 [n * M], or None for none.
    mask
        bool [n, 1, N, T], True where seen; None when all is seen, or `triangle` says what is.
    triangle
        Query i sees keys 0..i.
    hidden
        bool [n, T, 1, 1]: keys that no query sees and that may hold anything; None for none.
    dead
        bool [n, N]: queries that see no key; None for none.
    temperature
        fp32 [n, N], what multiplies each query's scores; None for 1.
    """

    shape: tuple[int, int]
    rows: slice | Tensor
    slots: slice | Tensor | None
    new: slice | Tensor | None
    mask: Tensor | None = None
    triangle: bool = False
    hidden: Tensor | None = None
    dead: Tensor | None = None
    temperature: Tensor | None = None


class Block(NamedTuple):
    """Some neighbouring queries of one request, and the keys they can see.

    Positions count from the request's first listed key. The keys seen lie at positions ``first ..
    first + listed + new``: the listed ones, then the new ones.
    """

    request: int
    row: int  # of q: the first query
    rows: int
    pos: int  # of the first query
    first: int
    listed_at: int  # where its listed keys begin in kv_indices
    listed: int
    new_row: int  # of its first new key: new keys and queries of a position have the same row
    new: int
    prefix: int  # of the request
    width: int  # keys of the request: columns of its custom mask


# ---- from a batch to rectangles


def plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    opts: Options,
    qo_indptr: Tensor | None = None,
    new_keys: bool = False,
) -> list[Rectangle]:
    """Cut and pad a batch; the same for all layers with the same mask and temperature.

    Parameters
    ----------
    q, k_cache, v_cache, kv_indptr, kv_indices, qo_indptr
        As in the three public functions; None for `qo_indptr` means one query per request (decode).
    new_keys
        Whether the new tokens' keys are given as tensors beside the lists; else they are the last
        ones of each list.

    Returns
    -------
    list of Rectangle
        Together they hold every query that has a key to see.
    """
    starts = kv_indptr.tolist()
    rows = list(range(len(starts))) if qo_indptr is None else qo_indptr.tolist()
    causal = opts.causal and opts.custom_mask is None
    window = opts.sliding_window if opts.sliding_window >= 0 else math.inf
    blocks = []
    for r in range(len(starts) - 1):
        listed, queries = starts[r + 1] - starts[r], rows[r + 1] - rows[r]
        width = listed + queries if new_keys else listed
        prefix = width - queries
        for begin in range(0, queries, QUERY_BLOCK):
            stop = min(queries, begin + QUERY_BLOCK)
            first = int(max(0, prefix + begin - window))
            end = min(width, prefix + stop) if causal else width
            old_end = max(first, min(end, listed))
            block = Block(
                request=r,
                row=rows[r] + begin,
                rows=stop - begin,
                pos=prefix + begin,
                first=first,
                listed_at=starts[r] + first,
                listed=old_end - first,
                new_row=rows[r] + old_end - prefix,
                new=end - old_end,
                prefix=prefix,
                width=width,
            )
            if first < end:
                blocks.append(block)
    token_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
    groups: list[list[Block]] = []
    for block in sorted(blocks, key=lambda b: (b.rows, b.new, b.listed), reverse=True):
        if groups and _fits(groups[-1], block, q.shape[1], token_bytes):
            groups[-1].append(block)
        else:
            groups.append([block])
    return [_rectangle(sorted(group), kv_indices, opts) for group in groups]


def _fits(group: list[Block], block: Block, q_heads: int, token_bytes: int) -> bool:
    """Whether a group's rectangle takes one more block, padded to the group's first and longest."""
    longest, n = group[0], len(group) + 1
    keys = longest.listed + longest.new
    cells = n * block.rows * keys
    asked = block.rows * sum(b.listed + b.new for b in (*group, block))
    return (
        (block.rows, block.new) == (longest.rows, longest.new)
        and (block.listed > 0 or longest.listed == 0)
        and cells <= max(2 * asked, SMALL_CELLS)
        and cells * q_heads <= CELLS
        and n * keys * token_bytes <= KV_BYTES
    )


def _rectangle(blocks: list[Block], kv_indices: Tensor, opts: Options) -> Rectangle:
    """One rectangle from blocks of as many queries and new keys."""
    device, window = kv_indices.device, opts.sliding_window
    n = len(blocks)
    N = blocks[0].rows
    M = blocks[0].new
    L = max(b.listed for b in blocks)
    rows = _places([b.row for b in blocks], [N] * n, N, device)
    new = _places([b.new_row for b in blocks], [M] * n, M, device) if M else None
    slots = None
    if L:
        counts = [b.listed for b in blocks]
        slots = kv_indices[_places([b.listed_at for b in blocks], counts, L, device)]
        end = int(slots[0]) + n * L
        if device.type == "cpu" and int(slots[-1]) == end - 1 and bool((slots.diff() == 1).all()):
            slots = slice(end - n * L, end)
    plain, cold = opts.custom_mask is None, opts.xai_temperature_len < 0
    if plain and cold and N == 1 and all(b.listed == L for b in blocks):
        # What most decode steps are: each request sees all its keys.
        return Rectangle((n, N), rows, slots, new)

    table = torch.tensor(blocks, device=device)  # int64 [n, 11]
    column = dict(zip(Block._fields, table.T[..., None], strict=True))  # each [n, 1]
    q_at, l_at, m_at = (torch.arange(size, device=device) for size in (N, L, M))
    q_pos = column["pos"] + q_at  # [n, N]
    temperature = None if cold else _temperature(q_pos, column["request"], opts)
    from_start = all(b.pos == b.first and N == M for b in blocks)
    if plain and opts.causal and N > 1 and not L and not 0 <= window < N and from_start:
        return Rectangle((n, N), rows, slots, new, triangle=True, temperature=temperature)

    k_pos = torch.cat((l_at.expand(n, L), column["listed"] + m_at), 1) + column["first"]
    k_pos = k_pos[:, None, :]  # [n, 1, T]
    seen = torch.cat((l_at < column["listed"], (m_at < M).expand(n, M)), 1)[:, None, :]
    distance = q_pos[:, :, None] - k_pos  # [n, N, T]
    if opts.custom_mask is not None and opts.mask_indptr is not None:
        line = (q_pos - column["prefix"]) * column["width"]  # of the request's part of the mask
        at = (opts.mask_indptr[column["request"]] + line)[:, :, None] + k_pos
        asked = opts.custom_mask[at.clamp(max=opts.custom_mask.shape[0] - 1)]
        if opts.skip_prefix_mask:
            asked = asked | (k_pos < column["prefix"][:, :, None])
        seen = seen & asked
    elif opts.causal:
        seen = seen & (distance >= 0)
    if window >= 0:
        seen = seen & (distance <= window)
    mask = None if bool(seen.all()) else seen[:, None].expand(n, 1, N, L + M)
    if plain:
        return Rectangle((n, N), rows, slots, new, mask, temperature=temperature)
    hidden, dead = ~seen.any(1)[:, :, None, None], ~seen.any(2)
    return Rectangle((n, N), rows, slots, new, mask, False, hidden, dead, temperature)


def _places(
    start: list[int], count: list[int], longest: int, device: torch.device
) -> slice | Tensor:
    """``start[i] .. start[i] + count[i]``, all padded to `longest`; a slice where they follow each
    other."""
    n = len(start)
    if min(count) == longest and start == list(range(start[0], start[0] + n * longest, longest)):
        return slice(start[0], start[0] + n * longest)
    begin, size = torch.tensor((start, count), device=device)[..., None]
    return (begin + torch.minimum(torch.arange(longest, device=device), size - 1)).flatten()


def _temperature(q_pos: Tensor, request: Tensor, opts: Options) -> Tensor:
    """fp32 [n, N]: what multiplies the scores of each query."""
    length = opts.xai_temperature_len
    if opts.window_start is not None:
        q_pos = q_pos + opts.window_start[request]
    if opts.xai_temperature_rule == "log":
        factor = q_pos.clamp(min=1).float().log2() / math.log2(length)
        return torch.where(q_pos > length, factor, 1.0)
    return torch.where(q_pos >= length, length / (q_pos + 1.0), 1.0)


# ---- from rectangles to results


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
    """Attention of q [tokens, q_heads, d_qk] over a planned batch: out, or (out, lse)."""
    tokens, q_heads, _ = q.shape
    if not return_lse and out is None and len(parts) == 1 and parts[0].rows == slice(0, tokens):
        return _attend(parts[0], q, k_cache, v_cache, opts, False, k, v)[0]
    out = q.new_zeros(tokens, q_heads, v_cache.shape[2]) if out is None else out.zero_()
    lse = torch.full((tokens, q_heads), -torch.inf, device=q.device)
    for part in parts:
        out[part.rows], got_lse = _attend(part, q, k_cache, v_cache, opts, return_lse, k, v)
        if got_lse is not None:
            lse[part.rows] = got_lse
    return (out, lse) if return_lse else out


def _attend(
    part: Rectangle,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    opts: Options,
    need_lse: bool,
    k_new: Tensor | None,
    v_new: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One rectangle: out [n * N, q_heads, d_v] in q's dtype and, if asked for, lse fp32 [n * N,
    q_heads]."""
    n, N = part.shape
    q_heads = q.shape[1]
    d_v = v_cache.shape[2]
    scores_needed = need_lse or opts.logit_cap > 0 or opts.sinks is not None or q.shape[2] != d_v
    exact = k_cache.dtype == q.dtype and opts.k_scale == opts.v_scale == 1.0
    scale, wide = opts.sm_scale, torch.float32
    if exact and not scores_needed and part.temperature is None and scale > 0:
        wide = q.dtype

    k = _gather("k", part, k_cache, k_new, opts.k_scale, wide)  # [n, T, kv_heads, d_qk]
    same_rows = v_cache.data_ptr() == k_cache.data_ptr() and opts.k_scale == opts.v_scale
    if same_rows and v_new is None:
        v = k[..., :d_v]
    else:
        v = _gather("v", part, v_cache, v_new, opts.v_scale, wide)
    if part.hidden is not None:
        k, v = k.masked_fill(part.hidden, 0), v.masked_fill(part.hidden, 0)
    rows = q[part.rows].to(wide).view(n, N, q_heads, -1)
    if scale <= 0:  # fused kernels multiply by the scale after masking: 0 * -inf
        rows, scale = rows * scale, 1.0
    if part.temperature is not None and not opts.logit_cap:
        rows = rows * part.temperature[:, :, None, None]

    k, v = k.transpose(1, 2), v.transpose(1, 2)  # heads before tokens
    if N == 1 and not scores_needed and part.dead is None:
        # Heads that share a KV head are one block of queries.
        rows = rows.view(n, k.shape[1], -1, q.shape[2])
        out = F.scaled_dot_product_attention(rows, k, v, part.mask, scale=scale)
        return out.reshape(n, q_heads, -1).to(q.dtype), None
    rows, lse = rows.transpose(1, 2), None
    if scores_needed:
        out, lse = _with_scores(part, rows, k, v, scale, opts)
    else:
        how = {"is_causal": part.triangle, "scale": scale, "enable_gqa": q_heads != k.shape[1]}
        out = F.scaled_dot_product_attention(rows, k, v, part.mask, **how)
    out = out.transpose(1, 2)  # [n, N, q_heads, d_v]
    if part.dead is not None:
        out = out.masked_fill(part.dead[:, :, None, None], 0)
    return out.reshape(n * N, q_heads, -1).to(q.dtype), lse


def _gather(
    name: str, part: Rectangle, cache: Tensor, new: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Keys (or values) of one rectangle [n, T, kv_heads, d]: from the pool, then the new ones.

    On the CPU a large copy goes to memory that this thread keeps, valid until the next call with
    this name: fresh memory can cost more than the copy.
    """
    n, pieces = part.shape[0], []
    if part.slots is not None:
        if isinstance(part.slots, slice):
            old = cache[part.slots]
        else:
            size, memory = part.slots.shape[0] * cache.shape[1] * cache.shape[2], None
            if cache.device.type == "cpu" and SMALL_BYTES < size * cache.element_size() <= KV_BYTES:
                kept, key = vars(_workspace), f"{name} {cache.dtype}"
                if key not in kept:
                    with torch.inference_mode(False):
                        kept[key] = torch.empty(KV_BYTES // cache.element_size(), dtype=cache.dtype)
                memory = kept[key][:size].view(-1, *cache.shape[1:])
            old = torch.index_select(cache, 0, part.slots, out=memory)
        old = old.to(dtype)
        pieces.append((old if scale == 1.0 else old * scale).view(n, -1, *cache.shape[1:]))
    if part.new is not None and new is not None:
        pieces.append(new[part.new].to(dtype).unflatten(0, (n, -1)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _with_scores(
    part: Rectangle, q: Tensor, k: Tensor, v: Tensor, scale: float, opts: Options
) -> tuple[Tensor, Tensor]:
    """The definition in fp32: q [n, Hq, N, d_qk], k [n, Hk, T, d_qk], v [n, Hk, T, d_v] -> out, lse
    [n * N, Hq]."""
    n, q_heads, N, _ = q.shape
    kv_heads, T = k.shape[1], k.shape[2]
    products = q.reshape(n, kv_heads, -1, q.shape[3]) @ k.transpose(2, 3)
    scores = products.view(n, q_heads, N, T) * scale
    if opts.logit_cap > 0:
        scores = opts.logit_cap * torch.tanh(scores / opts.logit_cap)
        if part.temperature is not None:
            scores = scores * part.temperature[:, None, :, None]
    if part.triangle:
        later = torch.ones(N, T, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    elif part.mask is not None:
        scores = scores.masked_fill(~part.mask, -torch.inf)
    lse = scores.logsumexp(-1)  # [n, Hq, N]
    total = lse if opts.sinks is None else torch.logaddexp(lse, opts.sinks.float()[:, None])
    weights = torch.exp(scores - total[..., None])  # NaN in rows without keys: `dead` clears them
    out = weights.view(n, kv_heads, -1, T) @ v
    return out.view(n, q_heads, N, -1), lse.transpose(1, 2).reshape(n * N, q_heads)
