"""What one step runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minikv.engine.request import Request


@dataclass
class Batch:
    """n requests of one step with everything the model needs; their tokens lie end to end.

    All tensors are int64 on the CPU, except `out_slots`, which stays where the allocator put it.

    Parameters
    ----------
    requests
        In batch order, n of them.
    token_ids, positions
        `[tokens]` what to compute, and at which positions. A token id of -1 is the newest token of
        its request, which the step before chose and the host has not read yet.
    rows, prefix_lens, seq_lens, new_lens
        `[n]` line in the request table; tokens with K/V before this step and after it; the
        difference, which is the number of tokens that this step computes.
    out_slots
        `[tokens]` pool slots that the new K/V are written to.
    sampled
        The requests that get tokens from this step: those that are not cut within their prompt.
    logits_at
        Index in `token_ids` of each token whose logits are wanted: the last of each sampled
        request, and all of one with drafts.
    decode
        Whether every request was running already and computes one token.
    knobs, mask
        What a graph that samples reads: float64 `[n * 5]` and int32 `[n * ceil(vocab / 32)]`, see
        :mod:`minikv.engine.sampling`; None where its variant does not read them.
    """

    requests: list[Request]
    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    new_lens: torch.Tensor
    out_slots: torch.Tensor
    sampled: list[Request]
    logits_at: torch.Tensor
    decode: bool = False
    knobs: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens in this step."""
        return self.token_ids.numel()

    @property
    def kind(self) -> str:
        """``"decode"`` or ``"extend"``, for events and pictures."""
        return "decode" if self.decode else "extend"
