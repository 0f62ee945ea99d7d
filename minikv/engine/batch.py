"""What one step runs, and the one rule for its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minikv.engine.request import Request, State
from minikv.errors import StateError

Span = tuple[Request, int, int]  # a request, and from where to where its tokens are computed


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
    continues
        How many steps ago `out_slots` were those of the batch: where it only continues the step
        before, in the pages that its requests have, each slot is one more than in that step, and
        the step that runs it notes the slots in the request table.
    metadata
        What ``AttentionBackend.prepare`` found for it; None where a graph brings its own.
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
    continues: int = 0
    metadata: Any = None

    @property
    def num_tokens(self) -> int:
        """New tokens in this step."""
        return self.token_ids.numel()


def make_batch(
    spans: Sequence[Span],
    allocator: Any,
    table: Any,
    last: Batch | None = None,
    moves_on: bool = False,
) -> Batch:
    """A step over the tokens of each span: their slots are taken and written to the table.

    Parameters
    ----------
    spans
        One for each request, none empty. There is room for them.
    allocator, table
        Page allocator and request table.
    last
        A step that ran before. Where it ran the same requests, up to where these spans start, their
        rows and last slots are known from it.
    moves_on
        Whether a decode step of the same requests that opens no page may leave the slots to the
        step that runs it (:attr:`Batch.continues`).
    """
    requests = [r for r, _, _ in spans]
    if last is not None and last.requests == requests:
        rows, prefix_lens, last_slots = last.rows, last.seq_lens, last.out_slots
        if moves_on and last.decode and (prefix_lens.numpy() % allocator.page_size).all():
            return continued(last, table)
        if last.continues:
            last_slots = last_slots + last.continues
    else:
        rows = torch.tensor([r.row for r in requests])
        prefix_lens = torch.tensor([start for _, start, _ in spans])
        last_slots = table.last_slots(rows, prefix_lens)
    token_ids = np.concatenate([r.tokens[start:end] for r, start, end in spans])
    if token_ids.size == len(spans):
        new_lens = torch.ones_like(prefix_lens)
        seq_lens, positions = prefix_lens + 1, prefix_lens
        slots = allocator.alloc_decode(seq_lens, last_slots)
    else:
        seq_lens = torch.tensor([end for _, _, end in spans])
        new_lens = seq_lens - prefix_lens
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots = allocator.alloc_extend(prefix_lens, seq_lens, last_slots, token_ids.size)
    if slots is None:
        raise StateError(
            "the allocator refused pages it counted as free; llm.cache.check() names the holder"
        )
    table.write(rows, prefix_lens, seq_lens, slots)
    decode = token_ids.size == len(spans) and all(r.state is State.RUNNING for r in requests)
    sampled = requests
    logits_at = range(len(spans))
    behind = 0
    if not decode:
        sampled, logits_at = [], []
        for r, start, end in spans:
            behind += end - start
            if end >= r.length:
                sampled.append(r)
                logits_at += range(behind - 1 - end + r.length, behind)
    return Batch(
        requests=requests,
        token_ids=torch.from_numpy(token_ids),
        positions=positions,
        rows=rows,
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        new_lens=new_lens,
        out_slots=slots,
        sampled=sampled,
        logits_at=torch.tensor(logits_at, dtype=torch.int64),
        decode=decode,
    )


def continued(last: Batch, table: Any) -> Batch:
    """The decode step of the same requests one token further, in the pages that they have."""
    lens = last.seq_lens + 1
    table.note(last.rows, lens)
    new: dict[str, Any] = {
        "token_ids": torch.full_like(last.rows, -1),
        "positions": last.seq_lens,
        "prefix_lens": last.seq_lens,
        "seq_lens": lens,
        "continues": last.continues + 1,
        "metadata": None,
    }
    return Batch(**vars(last) | new)


def settle(batch: Batch, table: Any) -> None:
    """Give a batch that continues another its own slots, and note them in the request table."""
    batch.out_slots = batch.out_slots + batch.continues
    batch.continues = 0
    table.write(batch.rows, batch.prefix_lens, batch.seq_lens, batch.out_slots)
