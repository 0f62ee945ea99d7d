"""From logits to tokens, all rows at once, in fp32.

Order: logit_bias, penalties, temperature, top-k, top-p, min-p. A draw inverts the cumulative distribution at one
uniform number, and that number is a hash of (seed, index of the token): nothing else in the batch can change it, and a
retracted request draws again what it drew before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minikv.engine.request import Request, TokenLogprob

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Sampled:
    """One token per row (-1: its logits hold no finite maximum), and the log probabilities that were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None


class Sampler:
    """Chooses one token per row of logits."""

    @staticmethod
    def variant(requests: Sequence[Request]) -> str:
        """``"greedy"`` when plain maxima of the raw logits answer all of `requests`, else ``"sample"``."""
        return "greedy" if all(r.plain_greedy for r in requests) else "sample"

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Choose a token for each request.

        Parameters
        ----------
        logits
            `[n, vocab]`, any float dtype; not changed.
        requests
            The n requests of the rows.
        """
        best, first = logits.max(dim=-1)  # of equal values the first; NaN wins over all numbers
        bad = ~torch.isfinite(best)
        if self.variant(requests) == "greedy":
            return Sampled(first.masked_fill(bad, -1).tolist())
        x = apply_edits(logits, requests)
        rows = [r.params for r in requests]
        drawn = uniforms([r.seed for r in requests], [r.length - r.prompt_len for r in requests])
        knobs = np.array([[p.temperature, p.top_k, p.top_p, p.min_p] for p in rows], np.float64).T
        packed = torch.from_numpy(np.vstack([knobs, drawn])).to(x.device)  # one copy to the device
        truncates = any(0 < p.top_k < x.shape[-1] or p.top_p < 1 for p in rows)
        tokens = choose(x, *packed, truncates=truncates).masked_fill(bad, -1)
        return Sampled(tokens.tolist(), _logprobs(logits, tokens, requests))


def choose(
    x: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
    truncates: bool = True,
) -> torch.Tensor:
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
        False promises that no row uses top-k or top-p, which spares the sort.

    Returns
    -------
    torch.Tensor
        int64 `[n]`.
    """
    first = x.argmax(dim=-1)
    # The maximum goes first: whatever the temperature, the largest exponent is 0 and nothing overflows.
    x = (x - x.amax(dim=-1, keepdim=True)) / temperature.float().clamp_min(1e-10)[:, None]
    if truncates:
        ranked, order = x.sort(dim=-1, descending=True, stable=True)
        limit = torch.where(top_k < 1, x.shape[-1], top_k)[:, None]
        cut = torch.arange(x.shape[-1], device=x.device) >= limit
        mass = torch.softmax(ranked.masked_fill(cut, -torch.inf), dim=-1).cumsum(dim=-1)
        before = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # a sum, not a difference: exact on borders
        cut |= before >= torch.where(top_p < 1, top_p.float(), 2.0)[:, None]
        cut[:, 0] = False
        # Back to the order of the vocabulary: a row draws the same whether or not its neighbours need the sort.
        x = x.masked_fill(torch.empty_like(cut).scatter_(1, order, cut), -torch.inf)
    p = torch.softmax(x, dim=-1)
    p = p.masked_fill(p < min_p.float()[:, None] * p.amax(dim=-1, keepdim=True), 0.0)
    mass = p.double().cumsum(dim=-1)  # double: a draw must not move with the order of additions
    total = mass[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(mass, target[:, None], right=True).clamp_max(x.shape[-1] - 1).squeeze(1)
    return torch.where(temperature == 0, first, drawn)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Float64 numbers in [0, 1), each a function of its seed and index only (SplitMix64, Steele et al. 2014).

    Examples
    --------
    >>> a, b = uniforms([7, 7], [0, 1])
    >>> bool(a != b), bool(uniforms([3, 7], [5, 1])[1] == b)
    (True, True)
    """
    state = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    counter = np.array(indices, np.uint64) + np.uint64(1)
    return (_mix(_mix(state + _GOLDEN) + counter * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def apply_edits(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """fp32 logits after logit_bias and penalties, a copy where a row has any. Only the named tokens are touched."""
    x = logits.float()
    edited = [(i, r) for i, r in enumerate(requests) if r.params.edits_logits]
    if not edited:
        return x
    x = x.clone() if x is logits else x
    bias, repeat, spent = [], [], []  # (row, token ids, values)
    for i, r in edited:
        p = r.params
        if p.logit_bias:
            bias.append((i, np.array(list(p.logit_bias)), list(p.logit_bias.values())))
        if p.repetition_penalty != 1:
            repeat.append((i, np.unique(r.token_ids), p.repetition_penalty))
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = np.unique(r.output_ids, return_counts=True)
            spent.append((i, ids, p.presence_penalty + p.frequency_penalty * counts))
    if at := _cells(bias, x.device):
        x[at[0]] += at[1]
    if at := _cells(repeat, x.device):
        x[at[0]] = torch.where(x[at[0]] > 0, x[at[0]] / at[1], x[at[0]] * at[1])
    if at := _cells(spent, x.device):
        x[at[0]] -= at[1]
    return x


def _cells(edits: list, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """(row, ids, values) triples as one index pair into the logits and one fp32 vector."""
    if not sum(len(ids) for _, ids, _ in edits):
        return None
    rows = np.concatenate([np.full(len(ids), i) for i, ids, _ in edits])
    ids = np.concatenate([ids for _, ids, _ in edits]).astype(np.int64)
    values = np.concatenate([np.broadcast_to(np.asarray(v, np.float32), len(ids)) for _, ids, v in edits])
    to = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device)  # noqa: E731
    return (to(rows), to(ids)), to(values)


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
) -> list[TokenLogprob | None] | None:
    asked = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    if not asked:
        return None
    lp = torch.log_softmax(logits[asked].float(), dim=-1)
    tokens = tokens[asked].clamp_min(0)
    most = min(max(requests[i].params.logprobs or 0 for i in asked), lp.shape[-1])
    values, ids = (t.tolist() for t in lp.topk(most, dim=-1))
    chosen, own = tokens.tolist(), lp.gather(1, tokens[:, None]).squeeze(1).tolist()
    result: list[TokenLogprob | None] = [None] * len(requests)
    for j, i in enumerate(asked):
        n = min(requests[i].params.logprobs or 0, most)
        result[i] = TokenLogprob(chosen[j], own[j], dict(zip(ids[j][:n], values[j][:n], strict=True)))
    return result
