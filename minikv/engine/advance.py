"""From the inputs of one decode step to those of the next, where they lie: the device holds
everything that it takes.

If the same requests run again, each has one token more, and everything moves on by one:

    token_ids[i] = max(tokens[i], 0)    positions[i] + 1    seq_lens[i] + 1    kv_indptr[j] + min(j, n)
    out_slots[i] = the next slot of its page, or the first of a new one    table[rows[i], old length] = out_slots[i]

Rows from n on are padding and stay what they are. Rewriting these few numbers in one launch spares
the host from building a batch, staging it and copying it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.kernels.launch import compiled, pointer
from minikv.kernels.triton import tl, triton

BLOCK = 256
NAMES = ("token_ids", "positions", "rows", "seq_lens", "kv_indptr", "out_slots")
Inputs = Mapping[str, Tensor]


def advance(inputs: Inputs, tokens: Tensor, table: Tensor, n: int, slots: Tensor | None) -> None:
    """Turn the inputs of a decode step into those of the step after it; nothing waits for the
    device.

    Parameters
    ----------
    inputs
        The buffers of ``decode_buffers`` as a step of some size sees them: int64 `[size]`,
        ``kv_indptr`` `[size + 1]`.
    tokens
        int64 `[n or more]`, what the step chose; -1 (broken logits, whose request ends) becomes
        token 0.
    table
        int32 `[requests + 1, max_context]`, the request table; every new length fits in its row.
    n
        Requests; the other rows are padding.
    slots
        int64 `[n]`, a slot for each new token where some begin a page, as ``alloc_decode`` gives
        them; None: each continues its page.
    """
    (advance_triton if table.is_cuda else advance_torch)(inputs, tokens, table, n, slots)


def advance_triton(
    inputs: Inputs, tokens: Tensor, table: Tensor, n: int, slots: Tensor | None
) -> None:
    """:func:`advance` in one launch."""
    new, step = (inputs["out_slots"], 1) if slots is None else (slots, 0)
    size = inputs["rows"].shape[0]
    args = (*(inputs[name] for name in NAMES), tokens, new, table, step, n, size, table.stride(0))
    binary = compiled(advance_kernel, table.device, lambda: args, BLOCK=BLOCK)
    binary((size // BLOCK + 1,), *map(pointer, args))


# Nothing about an argument is compiled in: not the value 1, not divisibility by 16, not a pointer's
# alignment.
@triton.jit(do_not_specialize=[*range(13)], do_not_specialize_on_alignment=[*range(13)])
def advance_kernel(
    token_ids, positions, rows, seq_lens, kv_indptr, out_slots, tokens, new_slots, table,
    step, n, size, stride_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p moves rows ``p * BLOCK ..`` on, and as many entries of kv_indptr."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, pointing = i < n, i <= size
    length = tl.load(seq_lens + i, mask=live, other=0)
    slot = tl.load(new_slots + i, mask=live, other=0) + step
    line = table + tl.load(rows + i, mask=live, other=0) * stride_row
    tl.store(line + length, slot.to(tl.int32), mask=live)
    tl.store(out_slots + i, slot, mask=live)
    tl.store(positions + i, length, mask=live)
    tl.store(seq_lens + i, length + 1, mask=live)
    tl.store(token_ids + i, tl.maximum(tl.load(tokens + i, mask=live, other=0), 0), mask=live)
    tl.store(
        kv_indptr + i,
        tl.load(kv_indptr + i, mask=pointing, other=0) + tl.minimum(i, n),
        mask=pointing,
    )


def advance_torch(
    inputs: Inputs, tokens: Tensor, table: Tensor, n: int, slots: Tensor | None
) -> None:
    """:func:`advance` by PyTorch operations on any device."""
    inputs["kv_indptr"].add_(
        torch.arange(inputs["kv_indptr"].shape[0], device=table.device).clamp_max_(n)
    )
    token_ids, positions, rows, seq_lens, out_slots = (
        inputs[name][:n] for name in NAMES if name != "kv_indptr"
    )
    torch.clamp_min(tokens[:n], 0, out=token_ids)
    positions.copy_(seq_lens)
    out_slots.copy_(out_slots + 1 if slots is None else slots)
    table[rows, positions] = out_slots.to(table.dtype)
    seq_lens += 1
