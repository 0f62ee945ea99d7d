"""One token per row, drawn where a uniform number falls among the tokens' weights laid end to end.

Weights are ``exp((logit - best) / temperature)``, counted in whole units, so that their sums are
exact: a draw moves neither with the order of additions nor with the batch. PyTorch takes twenty
kernels for it; here are three: the best of each part of a row, the weight of each part, and the
search within the one part that the uniform number falls into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minikv.kernels.choice import use_triton
from minikv.kernels.launch import launch
from minikv.kernels.triton import tl, triton

BLOCK = 4096  # logits of a part


def draw(x: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, scaled: bool = False) -> Tensor:
    """Draw a token for each row; rows of temperature 0 take their first maximum.

    Parameters
    ----------
    x
        `[n, vocab]` logits, any float dtype; -inf is never drawn.
    temperature, min_p, u
        `[n]` float64 on x's device; tokens less than `min_p` times as likely as the best are left
        out; `u` is in [0, 1).
    scaled
        Whether x is divided by the temperature already.

    Returns
    -------
    Tensor
        int64 `[n]`; -1 where a row has no finite maximum (one NaN is enough).

    Examples
    --------
    >>> x = torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0], [0.0, torch.nan, 0.0]])
    >>> one, none = torch.ones(3).double(), torch.zeros(3).double()
    >>> draw(x, torch.tensor([1.0, 0, 1]).double(), none, 0.99 * one).tolist()
    [2, 0, -1]
    """
    if use_triton("auto", x.device):
        return draw_triton(x, temperature, min_p, u, scaled)
    return draw_torch(x, temperature, min_p, u, scaled)


def draw_triton(
    x: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, scaled: bool = False
) -> Tensor:
    """:func:`draw` by the kernels below."""
    n, vocab = x.shape
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    if n == 0:
        return out
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty((n, parts), dtype=torch.float32, device=x.device)
    where = torch.empty((n, parts), dtype=torch.int32, device=x.device)
    weight = torch.empty((n, parts), dtype=torch.int64, device=x.device)
    x, knobs = x.contiguous(), (temperature, min_p, u)
    sizes: dict[str, Any] = {"VOCAB": vocab, "BLOCK": min(BLOCK, triton.next_power_of_2(vocab))}
    shape: dict[str, Any] = {
        "PARTS": triton.next_power_of_2(parts),
        "SCALED": scaled,
        "UNIT": unit(vocab),
    }
    strides = tuple(knob.stride(0) for knob in knobs)
    launch(best_kernel, (parts, n), (x, best, where), **sizes)
    launch(weight_kernel, (parts, n), (x, best, *knobs, weight, *strides, parts), **sizes, **shape)
    given = (x, best, where, *knobs, weight, out, *strides, parts)
    launch(search_kernel, (n,), given, **sizes, **shape)
    return out


def draw_torch(
    x: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, scaled: bool = False
) -> Tensor:
    """:func:`draw` with PyTorch operations."""
    x = x.float()
    best, first = x.max(dim=-1, keepdim=True)  # NaN wins over all numbers
    x = x - best
    if not scaled:
        x = x / temperature.float().clamp_min(1e-10)[:, None]
    weight = torch.exp(x)
    weight = weight.masked_fill(weight < min_p.float()[:, None], 0.0)
    sums = (weight.double() * unit(x.shape[1])).long().cumsum(dim=-1)
    total = sums[:, -1:]
    target = torch.minimum((u[:, None] * total).long(), total - 1)
    drawn = torch.searchsorted(sums, target, right=True).clamp_max(x.shape[1] - 1)
    drawn = torch.where(temperature[:, None] == 0, first, drawn)
    return drawn.masked_fill(~torch.isfinite(best), -1).squeeze(1)


def unit(vocab: int) -> float:
    """What the likeliest token weighs: so much that the weights of all fit in 62 bits."""
    return 2.0 ** (62 - vocab.bit_length())


@triton.jit
def best_kernel(x, best, where, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Program (part, row): the largest of `BLOCK` logits (NaN if one of them is), and its first
    place."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(x + row * VOCAB + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
    broken = tl.max((logits != logits).to(tl.int32), 0) > 0
    top = tl.max(logits, 0)
    at = row * tl.num_programs(0) + part
    tl.store(best + at, tl.where(broken, float("nan"), top))
    tl.store(where + at, tl.min(tl.where(logits == top, i, VOCAB), 0))


@triton.jit
def row_best(best, row, parts, PARTS: tl.constexpr):
    """The row's largest logit, and whether it is a finite number."""
    i = tl.arange(0, PARTS)
    each = tl.load(best + row * parts + i, mask=i < parts, other=float("-inf"))
    broken = tl.max((each != each).to(tl.int32), 0) > 0
    top = tl.max(each, 0)
    usable = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    return tl.where(usable, top, 0.0), usable


@triton.jit
def weights(
    x, row, part, top, temperature, min_p,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Weights of one part of a row, int64 `[BLOCK]`: in units, 0 for what is left out."""
    i = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(x + row * VOCAB + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
    scores = logits - top
    if not SCALED:
        scores = scores / tl.maximum(temperature.to(tl.float32), 1e-10)
    weight = tl.exp(scores)
    weight = tl.where(weight < min_p.to(tl.float32), 0.0, weight)
    return (weight.to(tl.float64) * UNIT).to(tl.int64)


@triton.jit
def weight_kernel(
    x, best, temperature, min_p, u, weight, stride_t, stride_m, stride_u, parts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Program (part, row): what the tokens of the part weigh together."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    top, usable = row_best(best, row, parts, PARTS)
    t = tl.load(temperature + row * stride_t)
    least = tl.load(min_p + row * stride_m)
    each = weights(x, row, part, top, t, least, VOCAB, BLOCK, SCALED, UNIT)
    tl.store(weight + row * parts + part, tl.where(usable, tl.sum(each, 0), 0))


@triton.jit
def search_kernel(
    x, best, where, temperature, min_p, u, weight, out, stride_t, stride_m, stride_u, parts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """One program per row: the part, and in it the token, that the row's uniform number falls
    on."""
    row = tl.program_id(0).to(tl.int64)
    top, usable = row_best(best, row, parts, PARTS)
    i = tl.arange(0, PARTS)
    each = tl.load(weight + row * parts + i, mask=i < parts, other=0)
    total = tl.sum(each, 0)
    target = (tl.load(u + row * stride_u) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    behind = tl.cumsum(each, 0)  # with the part itself
    part = tl.sum((behind <= target).to(tl.int32), 0)
    part = tl.minimum(part, parts - 1)
    before = tl.sum(tl.where(i < part, each, 0), 0)
    t = tl.load(temperature + row * stride_t)
    least = tl.load(min_p + row * stride_m)
    inside = tl.cumsum(weights(x, row, part, top, t, least, VOCAB, BLOCK, SCALED, UNIT), 0)
    drawn = part * BLOCK + tl.sum((before + inside <= target).to(tl.int32), 0)
    tops = tl.load(best + row * parts + i, mask=i < parts, other=float("-inf"))
    places = tl.load(where + row * parts + i, mask=i < parts, other=VOCAB)
    first = tl.min(tl.where(tops == top, places, VOCAB), 0)
    token = tl.where(t == 0.0, first, tl.minimum(drawn, VOCAB - 1))
    tl.store(out + row, tl.where(usable, token, -1).to(tl.int64))
