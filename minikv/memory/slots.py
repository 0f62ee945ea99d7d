"""New slots for a batch of requests, computed on the device: as Triton kernels and as vectorised
PyTorch.

A request of prefix length ``p`` that grows by ``e`` tokens with page size ``P`` gets, in order, the
rest of its last page and then pages from the front of the free list. With ``fill = -p mod P`` its
token ``t`` lands in slot

    last_loc + 1 + t                                     if t < fill
    free[front + pages_before + (t - fill) // P] * P + (t - fill) % P   otherwise

``front``, the tokens before each request and the pages before it are known on the host, so every
token is independent: no scan over the batch on the device, and an extend of any length is a loop
over blocks of tokens. (SGLang's kernels, whose semantics these follow, sum over all earlier
requests in every program instead.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minikv.kernels.launch import compiled, pointer
from minikv.kernels.triton import INTERPRETED, tl, triton
from minikv.memory.free_list import HELD, FreeList

EXTEND_BLOCK, DECODE_BLOCK, MOST_PROGRAMS = 512, 256, 2048


def _launch(
    kernel: Any, block: int, grid: tuple[int, int], page_size: int, free: FreeList,
    out: torch.Tensor, inputs: tuple[Any, ...], scalars: tuple[int, ...],
) -> None:  # fmt: skip
    """Launch the one binary that this device and page size have for all traffic."""

    def example() -> tuple[Any, ...]:  # inputs may be bare addresses, so tensors stand in for them
        stand_ins = (free.stack, free.lost.view(torch.int32))[-len(inputs) :]
        return out, free.stack, free.state, free.lost, *stand_ins, *scalars

    binary = compiled(kernel, free.device_index, example, PAGE=page_size, BLOCK=block)
    binary(grid, pointer(out), *free.addresses, *inputs, *scalars)


def extend_triton(
    free: FreeList,
    page_size: int,
    first: int,
    new_pages: int,
    total: int,
    last_loc: torch.Tensor,
    staged: tuple[np.ndarray, Any],
    new: np.ndarray,
) -> torch.Tensor:
    """Slots of an extend in one launch.

    Parameters
    ----------
    free
        Free list and page states on the device.
    first, new_pages
        Position in the free list of the first new page, and how many pages are taken.
    total
        New tokens in all.
    last_loc
        int32 or int64 ``[n]``: slot of each request's last prefix token, -1 without a prefix.
    staged
        int64 ``[n + 1, 2]``, flat, as ``Staging`` gives it: tokens, and new pages, of all requests
        before each one; the last row is the sum.
    new
        New tokens of each request.

    Returns
    -------
    Tensor
        int64 ``[total]``.
    """
    n = last_loc.numel()
    out = free.stack.new_empty(total)
    words, stride = _int32_words(last_loc)
    longest = int(np.maximum.reduce(new))
    blocks = min(-(-longest // EXTEND_BLOCK), max(1, MOST_PROGRAMS // n))
    inputs = pointer(staged[1]), words
    scalars = (first, free.seen, free.num_pages, n, total, stride)
    _launch(extend_kernel, EXTEND_BLOCK, (n, blocks), page_size, free, out, inputs, scalars)
    return out


def decode_triton(
    free: FreeList, page_size: int, first: int, new_pages: int, n: int, last_loc: torch.Tensor
) -> torch.Tensor:
    """Slots of one more token for each of `n` requests in one launch: nothing but `last_loc` is
    read per request."""
    out = free.stack.new_empty(n)
    words, stride = _int32_words(last_loc)
    scalars = (first, free.seen, free.num_pages, new_pages, n, stride)
    grid = (-(-n // DECODE_BLOCK), 1)
    _launch(decode_kernel, DECODE_BLOCK, grid, page_size, free, out, (words,), scalars)
    return out


def _int32_words(last_loc: torch.Tensor) -> tuple[Any, int]:
    """`last_loc` as int32 words and the distance between entries: one binary serves int32 and int64
    (low words)."""
    if not last_loc.is_contiguous():
        last_loc = last_loc.contiguous()
    if last_loc.dtype == torch.int32:
        return pointer(last_loc), 1
    # One entry counts as contiguous whatever its stride, but a view as other words wants stride 1.
    if INTERPRETED:
        last_loc = last_loc.as_strided((last_loc.numel(),), (1,)).view(torch.int32)
    return pointer(last_loc), 2


# Nothing about an argument is compiled in: neither the value 1, nor divisibility by 16, nor a
# pointer's alignment.
@triton.jit(do_not_specialize=[*range(12)], do_not_specialize_on_alignment=[*range(12)])
def extend_kernel(
    out_ptr, free_ptr, state_ptr, lost_ptr, before_ptr, last_loc_ptr,
    first, seen, num_pages, n, total, last_loc_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j) writes the slots of request i's token blocks j, j + J, j + 2J, … of BLOCK
    tokens each."""
    request = tl.program_id(0)
    start = 0
    length = total
    pages_before = 0
    if n > 1:  # one read of this row and the next; it goes to host memory
        four = tl.arange(0, 4)
        rows = tl.load(before_ptr + 2 * request + four).to(tl.int32)
        start = tl.sum(tl.where(four == 0, rows, 0), 0)
        pages_before = tl.sum(tl.where(four == 1, rows, 0), 0)
        length = tl.sum(tl.where(four == 2, rows, 0), 0) - start
    last = tl.load(last_loc_ptr + request * last_loc_stride).to(tl.int64)
    # Pages that frees asked to return but that were not held shift the front; the host learns of
    # them later.
    front = first + (tl.load(lost_ptr).to(tl.int32) - seen)
    fill = ((PAGE - (last + 1) % PAGE) % PAGE).to(tl.int32)
    for block in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        t = block + tl.arange(0, BLOCK)
        live = t < length
        u = t - fill  # token number counted from the first new page
        fresh = live & (u >= 0)
        u = tl.where(fresh, u, 0)
        index = front + pages_before + u // PAGE
        page = tl.load(free_ptr + index, mask=fresh & (index < num_pages), other=0)
        slot = tl.where(fresh, page * PAGE + u % PAGE, last + 1 + t)
        tl.store(out_ptr + start + t, slot, mask=live)
        tl.store(
            state_ptr + page,
            tl.full([BLOCK], 1, tl.uint8),
            mask=fresh & (u % PAGE == 0) & (page > 0),
        )


@triton.jit(do_not_specialize=[*range(11)], do_not_specialize_on_alignment=[*range(11)])
def decode_kernel(
    out_ptr, free_ptr, state_ptr, lost_ptr, last_loc_ptr,
    first, seen, num_pages, new_pages, n, last_loc_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i gives BLOCK requests their next slot; a page is opened where ``last_loc + 1`` is a
    page start."""
    lanes = tl.arange(0, BLOCK)
    mine = tl.program_id(0) * BLOCK
    rank = 0  # pages opened by requests of earlier programs
    for start in range(0, mine, BLOCK):
        earlier = tl.load(last_loc_ptr + (start + lanes) * last_loc_stride)
        rank += tl.sum(((earlier + 1) % PAGE == 0).to(tl.int32), axis=0)
    row = mine + lanes
    live = row < n
    last = tl.load(last_loc_ptr + row * last_loc_stride, mask=live, other=0)
    front = first + (tl.load(lost_ptr).to(tl.int32) - seen)
    opens = live & ((last + 1) % PAGE == 0)
    rank += tl.cumsum(opens.to(tl.int32), axis=0) - 1
    index = front + rank
    page = tl.load(free_ptr + index, mask=opens & (rank < new_pages) & (index < num_pages), other=0)
    tl.store(out_ptr + row, tl.where(opens, page * PAGE, last.to(tl.int64) + 1), mask=live)
    tl.store(state_ptr + page, tl.full([BLOCK], 1, tl.uint8), mask=opens & (page > 0))


def extend_torch(
    free: FreeList,
    page_size: int,
    first: int,
    new_pages: int,
    total: int,
    last_loc: torch.Tensor,
    staged: tuple[np.ndarray, Any],
    new: np.ndarray,
) -> torch.Tensor:
    """The same slots as :func:`extend_triton`, with PyTorch operations on any device."""
    before = torch.from_numpy(staged[0]).to(last_loc.device, non_blocking=True)
    tokens, pages = before.view(-1, 2).unbind(1)
    following = last_loc.long() + 1
    request = torch.repeat_interleave(tokens.diff(), output_size=total)
    # Numbered over the whole batch; the terms per request make up for it.
    t = torch.arange(total, device=tokens.device)
    u = t - (tokens[:-1] + (-following) % page_size).index_select(0, request)
    fresh, number = u >= 0, u // page_size
    page = free.page_at((first + pages[:-1]).index_select(0, request) + number, fresh)
    free.mark(first, new_pages, HELD)
    in_page = (following - tokens[:-1]).index_select(0, request) + t
    return torch.where(fresh, (page - number) * page_size + u, in_page)


def decode_torch(
    free: FreeList, page_size: int, first: int, new_pages: int, n: int, last_loc: torch.Tensor
) -> torch.Tensor:
    """The same slots as :func:`decode_triton`, with PyTorch operations on any device."""
    following = last_loc.long() + 1
    opens = following % page_size == 0
    rank = opens.cumsum(0) - 1
    page = free.page_at(first + rank, opens & (rank < new_pages))
    free.mark(first, new_pages, HELD)
    return torch.where(opens, page * page_size, following)
