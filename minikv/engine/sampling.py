"""From logits to tokens, all rows at once, in fp32: tensor code that a graph can hold and the
engine can call.

Order: grammar mask, temperature, top-k, top-p, min-p. Nothing here is random and nothing is read on
the host. A draw inverts the cumulative distribution at one uniform number per row, which the caller
draws beforehand, so a token depends on its own row only and comes out the same in a graph, in a
larger batch, or eagerly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.engine.cuts import ALL, WHOLE, keep_likeliest
from minikv.engine.draw import draw
from minikv.engine.tokens import first_max

VARIANTS = ("greedy", "sampled", "truncated", "logprobs", "grammar", "logits")
"""Ways of choosing. Each does what those before it do and one thing more, so a batch takes the last
that one of its requests needs: first maxima; temperature and min-p; top-k and top-p, which look for
a border; log probabilities; a grammar's mask. ``logits`` chooses nothing: what has no fixed shape
(biases, penalties, more log probabilities than :data:`TOP`) is done outside the graph, on its
logits."""
DRAWS, MASKED = VARIANTS[1:5], VARIANTS[4:5]
"""The variants that read the knobs, and the mask."""
KNOBS = ("temperature", "top_k", "top_p", "min_p", "u")
"""What a row of the knobs holds. All zero, as padding is, is a greedy row."""
TOP = 20
"""Likeliest tokens that the ``logprobs`` variant tells of; fixed, since a graph's output has one
shape."""


def sample(
    logits: Tensor,
    variant: str,
    knobs: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    edited: Tensor | None = None,
    truncates: bool = True,
    top: int = TOP,
) -> Tensor:
    """Choose one token per row of logits.

    Parameters
    ----------
    logits
        `[n, vocab]` as the model gives them, any float dtype; not changed.
    variant
        One of :data:`VARIANTS`.
    knobs
        `[n * 5]` float64, the :data:`KNOBS` of each row; not read by "greedy".
    mask
        `[n * ceil(vocab / 32)]` int32, for "grammar": bit j of word i allows token 32 i + j.
    edited
        Choose from these instead; log probabilities stay those of `logits`.
    truncates
        False promises that no row uses top-k or top-p, which spares looking for its border.
    top
        Likeliest tokens per row of the last two variants.

    Returns
    -------
    Tensor
        int64 `[n]`, -1 where no finite maximum is left. "logprobs" and "grammar" give float64 `[n,
        2 + 2 * top]`, all in one tensor that is read in one copy: the token, its log probability,
        the likeliest tokens (best first), and their log probabilities. "logits" gives the logits.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.0, 3.0]])
    >>> sample(logits, "greedy").tolist()
    [1, 0]
    >>> half = torch.tensor([1.0, 0, 1, 0, 0.99, 0, 0, 0, 0, 0])  # row 1 is greedy
    >>> sample(logits, "sampled", half).tolist()
    [2, 0]
    >>> mask = torch.tensor([0b011, 0b100], dtype=torch.int32)
    >>> sample(logits, "grammar", half, mask, top=1)[:, 0].tolist()
    [1.0, 2.0]
    """
    if variant == "logits":
        return logits
    if variant == "greedy":
        return first_max(logits)
    assert knobs is not None
    temperature, top_k, top_p, min_p, u = knobs.view(-1, len(KNOBS)).unbind(1)
    if variant == "sampled" and edited is None:
        return draw(logits, temperature, min_p, u)
    bad = ~torch.isfinite(logits.amax(dim=-1))  # NaN wins over all numbers
    x = (logits if edited is None else edited).float()
    if variant in MASKED and mask is not None:
        x = x.masked_fill(~unpack(mask, *x.shape), -torch.inf)
        bad |= x.amax(dim=-1) == -torch.inf
    cuts = truncates and variant != "sampled"
    tokens = choose(x, temperature, top_k, top_p, min_p, u, cuts)
    tokens = tokens.masked_fill(bad, -1)
    if variant in ("sampled", "truncated"):
        return tokens
    lp = torch.log_softmax(logits.float(), dim=-1)
    values, ids = lp.topk(min(top, lp.shape[-1]), dim=-1)
    own = lp.gather(1, tokens.clamp_min(0)[:, None])
    return torch.cat([t.double() for t in (tokens[:, None], own, ids, values)], dim=1)


def unpack(mask: Tensor, rows: int, vocab: int) -> Tensor:
    """A packed mask as bool `[rows, vocab]`.

    Examples
    --------
    >>> unpack(torch.tensor([-1, 0b101], dtype=torch.int32), 1, 36)[0, 31:].tolist()
    [True, True, False, True, False]
    """
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.view(rows, -1, 1) >> bits) & 1).view(rows, -1)[:, :vocab].bool()


def choose(
    x: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
    truncates: bool = True,
) -> Tensor:
    """Draw one token per row of `x`; rows of temperature 0 take their first maximum.

    Parameters
    ----------
    x
        `[n, vocab]` fp32 logits.
    temperature, top_k, top_p, min_p
        `[n]` float64 on x's device; `top_k` < 1 and `top_p` >= 1 are off.
    u
        `[n]` float64 in [0, 1).
    truncates
        False promises that no row uses top-k or top-p, which spares looking for its border.

    Returns
    -------
    Tensor
        int64 `[n]`.
    """
    if truncates:
        # The maximum goes first: whatever the temperature, the largest exponent is 0 and nothing
        # overflows.
        best = x.amax(dim=-1, keepdim=True)
        x = ((x - best) / temperature.float().clamp_min(1e-10)[:, None]).contiguous()
        keep_likeliest(x, torch.where(top_k < 1, ALL, top_k.long()))
        keep_likeliest(x, mass_limit(top_p), torch.softmax(x, dim=-1))
    return draw(x, temperature, min_p, u, scaled=truncates)


def mass_limit(top_p: Tensor) -> Tensor:
    """What may lie before a token that stays, in units of 2^-62: less than top_p when rounded to
    fp32, as the probabilities are.

    So 0.4 + 0.2 reach 0.6, and the likeliest token stays whatever top_p is.
    """
    p = top_p.float()
    rounds_up = (p.double() + torch.nextafter(p, torch.zeros_like(p)).double()) / 2
    return torch.where(top_p < 1, (rounds_up * WHOLE).long().clamp_min(1), ALL)
