"""What one step runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from minikv.engine.request import Request


@dataclass
class Batch:
    """Requests of one step with everything the model needs; the tokens of the requests lie end to
    end.

    All tensors are int64 on the CPU, except `out_slots`, which stays where the allocator put it.

    Parameters
    ----------
    kind
        ``"decode"``: one new token per request. ``"extend"``: the tokens from `prefix_lens` to
        `seq_lens` of each (in mixed batches some of these are decodes of length 1).
    requests
        In batch order, n of them.
    token_ids, positions
        `[tokens]` what to compute, and at which positions.
    rows, prefix_lens, seq_lens
        `[n]` line in the request table, tokens with K/V before this step, and after it.
    out_slots
        `[tokens]` pool slots that the new K/V are written to.
    sampled
        The requests that get a token from this step (those that are not cut within their prompt).
    logits_at
        `[len(sampled)]` index in `token_ids` of the last token of each sampled request.
    knobs, mask
        What a graph that samples reads: float64 `[n * 5]` and int32 `[n * ceil(vocab / 32)]`, see
        :mod:`minikv.engine.sampling`; None where its variant has no use for them.
    """

    kind: Literal["decode", "extend"]
    requests: list[Request]
    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    out_slots: torch.Tensor
    sampled: list[Request] = field(default_factory=list)
    logits_at: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    knobs: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens in this step."""
        return self.token_ids.numel()
