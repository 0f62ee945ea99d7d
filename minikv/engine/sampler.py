"""Tokens for the requests of a step: what each asks for as knobs, random numbers and masks, and the
answers read back.

The choosing itself is :func:`minikv.engine.sampling.sample`, called here on logits, or part of a
decode graph. The random number of a draw is a hash of (seed, index of the token), made here:
nothing else in the batch can change it, and a retracted request draws again what it drew before.
logit_bias and penalties edit the logits here as well: how many they touch differs from step to
step, so a batch that uses them decodes by the graph that ends at the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minikv.engine.batch import Batch
from minikv.engine.request import Request, TokenLogprob
from minikv.engine.sampling import DRAWS, MASKED, TOP, VARIANTS, sample

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Sampled:
    """One token per row (-1: its logits hold no finite maximum), and the log probabilities that
    were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None


class Sampler:
    """Chooses one token for each request of a step."""

    def __init__(self) -> None:
        self._masks = np.empty((0, 0), np.int32)  # one line per request, written in place

    @staticmethod
    def variant(requests: Sequence[Request]) -> str:
        """The first of the sampler's variants (:data:`minikv.engine.sampling.VARIANTS`) that serves
        all `requests`."""
        return VARIANTS[max(map(_level, requests), default=0)]

    def fill(self, batch: Batch, variant: str) -> None:
        """Give a batch what a graph of this variant reads beside the model's inputs."""
        batch.knobs = _knobs(batch.sampled, batch) if variant in DRAWS else None
        batch.mask = self._mask(batch.sampled) if variant in MASKED else None

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Choose a token for each request, outside any graph, and read it.

        Parameters
        ----------
        logits
            `[n, vocab]`, any float dtype; not changed.
        requests
            The n requests of the rows.
        """
        return self.read(self.choose(logits, requests), requests)

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], batch: Batch | None = None
    ) -> torch.Tensor:
        """What :func:`~minikv.engine.sampling.sample` makes of logits, on their device."""
        variant, device = self.variant(requests), logits.device
        if variant == "greedy":
            return sample(logits, variant)
        if variant == "logits":
            variant = "grammar"  # which can do everything, once the logits are edited
        mask = self._mask(requests) if variant in MASKED else None
        return sample(
            logits,
            variant,
            _knobs(requests, batch).to(device),
            None if mask is None else mask.to(device),
            edited=apply_edits(logits, requests),
            truncates=any(
                0 < r.params.top_k < logits.shape[-1] or r.params.top_p < 1 for r in requests
            ),
            top=max(r.params.logprobs or 0 for r in requests),
        )

    @staticmethod
    def read(out: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """What :func:`~minikv.engine.sampling.sample` gave for these requests: one copy, the step's
        only wait."""
        if out.dim() == 1:
            return Sampled(out.tolist())
        table = out.cpu().numpy()
        tokens, top = table[:, 0].astype(np.int64).tolist(), table.shape[1] // 2 - 1
        logprobs: list[TokenLogprob | None] = [None] * len(requests)
        for i, r in enumerate(requests):
            if r.params.logprobs is not None:
                n = min(r.params.logprobs, top)
                ids, values = table[i, 2 : 2 + n].astype(np.int64), table[i, 2 + top : 2 + top + n]
                best = dict(zip(ids.tolist(), values.tolist(), strict=True))
                logprobs[i] = TokenLogprob(tokens[i], float(table[i, 1]), best)
        return Sampled(tokens, logprobs)

    def _mask(self, requests: Sequence[Request]) -> torch.Tensor | None:
        """The packed masks of these requests, end to end; all ones for those that no grammar
        rules."""
        ruled = [(i, r.grammar) for i, r in enumerate(requests) if r.grammar is not None]
        if not ruled:
            return None
        words = ruled[0][1].words
        if self._masks.shape[0] < len(requests) or self._masks.shape[1] != words:
            self._masks = np.empty((len(requests), words), np.int32)
        masks = self._masks[: len(requests)]
        masks.fill(-1)
        for i, grammar in ruled:
            grammar.fill(masks[i])
        return torch.from_numpy(masks.reshape(-1))


def _level(r: Request) -> int:
    """Index of the first variant that serves a request; worked out once."""
    if r.level is None:
        p = r.params
        if p.edits_logits or (p.logprobs or 0) > TOP:
            r.level = 5
        elif r.grammar is not None:
            r.level = 4
        elif p.logprobs is not None:
            r.level = 3
        else:
            r.level = 0 if p.greedy else 2 if p.top_k > 0 or p.top_p < 1 else 1
    return r.level


def _knobs(requests: Sequence[Request], batch: Batch | None = None) -> torch.Tensor:
    """float64 `[n * 5]`: what each asks for, and its random number."""
    lengths = [r.length for r in requests]
    if batch is not None:  # the token before may not be known yet
        lengths = (batch.positions[batch.logits_at] + 1).tolist()
    given = [
        (r.params.temperature, r.params.top_k, r.params.top_p, r.params.min_p) for r in requests
    ]
    u = uniforms(
        [r.seed for r in requests],
        [n - r.prompt_len for n, r in zip(lengths, requests, strict=True)],
    )
    return torch.from_numpy(np.column_stack((np.array(given, np.float64), u)).reshape(-1))


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Float64 numbers in [0, 1), each a function of its seed and index only (SplitMix64, Steele et
    al. 2014).

    Examples
    --------
    >>> a, b = uniforms([7, 7], [0, 1])
    >>> bool(a != b), bool(uniforms([3, 7], [5, 1])[1] == b)
    (True, True)
    """
    state = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    counter = np.array(indices, np.uint64) + np.uint64(1)
    return (_mix(_mix(state + _GOLDEN) + counter * _GOLDEN) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def apply_edits(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """fp32 logits after logit_bias and penalties, a copy where a row has any. Only the named tokens
    are touched."""
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


def _cells(
    edits: list, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """(row, ids, values) triples as one index pair into the logits and one fp32 vector."""
    if not sum(len(ids) for _, ids, _ in edits):
        return None
    rows = np.concatenate([np.full(len(ids), i) for i, ids, _ in edits])
    ids = np.concatenate([ids for _, ids, _ in edits]).astype(np.int64)
    values = np.concatenate(
        [np.broadcast_to(np.asarray(v, np.float32), len(ids)) for _, ids, v in edits]
    )
    to = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device)  # noqa: E731
    return (to(rows), to(ids)), to(values)
