"""The free list of pages and one state byte per page, kept where the slots live.

The list is a stack in a fixed buffer: free pages are ``stack[head:]``, front first. Handing out
moves `head` forward, freeing writes in front of it, and undoing an allocation only moves it back,
since what was handed out is still there. The buffer never moves, so a kernel gets one pointer and
one number.

On the CPU the state bytes check every free before it is done. On CUDA the slots of a free are on
the device and are not read back, so there the bytes are on the device too: :meth:`push_filtered`
lets a page back on the list only if it is held, and counts the others in `lost`. The host, which
expected them back, then counts too many free pages until that number has arrived (by a copy that
nothing waits for); kernels add ``lost - seen`` to the host's `head`, so the
list itself is exact at every moment: a page is never on it twice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from minikv.kernels.launch import pointer

# PENDING: freed inside a free group; RESERVED: page 0, for padding
FREE, HELD, PENDING, RESERVED = range(4)


@dataclass(eq=False)
class AllocatorState:
    """What :meth:`.PagedAllocator.backup` remembers; opaque to callers."""

    owner: object
    number: int
    head: int
    seen: int
    frees: int


class FreeList:
    """Pages ``1..num_pages`` of a fresh pool, all free.

    Attributes
    ----------
    head
        Pages handed out, as the host counts them; ``num_pages - head`` are free.
    stack
        int64 ``[num_pages + 1]``; the last entry receives what is thrown away.
    state
        uint8 ``[num_pages + 2]``: FREE, HELD, PENDING or RESERVED for each page; the last entry is
        never read.
    addresses
        The three tensors `stack`, `state` and `lost`, as kernels take them.
    lost, seen
        Pages that frees named although they were not held: the device's count (int64 ``[1]``), and
        the host's.
    """

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.head = self.seen = 0
        self.stack = torch.arange(1, num_pages + 2, device=device)
        self.state = torch.zeros(num_pages + 2, dtype=torch.uint8, device=device)
        self.state[0].fill_(RESERVED)
        self.lost = torch.zeros(1, dtype=torch.int64, device=device)
        self.addresses = tuple(map(pointer, (self.stack, self.state, self.lost)))
        self.device_index = self.stack.device.index
        self.exact = device.type == "cpu"  # every free is checked, so the host's count is right
        self._told = torch.zeros(1, dtype=torch.int64, pin_memory=not self.exact)
        self._told_host = self._told.numpy()

    def poll(self) -> None:
        """Correct the host's count by what the device has reported so far; never waits."""
        late = int(self._told_host[0]) - self.seen
        if late == 0:
            return
        self.head += late
        self.seen += late
        warnings.warn(
            "pages were freed that were not held (freed twice, page 0, or out of range); they were "
            "ignored. PagedAllocator(..., debug=True) raises where it happens",
            RuntimeWarning,
            stacklevel=4,
        )

    @property
    def available(self) -> int:
        """Free pages, as the host counts them."""
        return min(max(self.num_pages - self.head, 0), self.num_pages)

    def pages(self) -> torch.Tensor:
        """The free pages, front first (int64, a copy); waits for the device."""
        front = self.head + int(self.lost) - self.seen
        return self.stack[front : self.num_pages].clone()

    def page_at(self, index: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Pages at positions `index` of the list as the host counts them: 0 past the end, any where
        not `wanted`."""
        if self.exact:  # index_select is several times faster than stack[...]
            return self.stack.index_select(0, torch.where(wanted, index, 0))
        index = index + (self.lost - self.seen)
        inside = wanted & (index < self.num_pages)
        return torch.where(inside, self.stack[torch.where(inside, index, 0)], 0)

    def mark(self, first: int, count: int, value: int) -> None:
        """Set the state of the pages at `count` positions of the list from `first` on."""
        if self.exact:
            self.state[self.stack[first : first + count]] = value
            return
        index = torch.arange(first, first + count, device=self.stack.device)
        page = self.page_at(index, index >= first)
        self.state.scatter_(0, torch.where(page > 0, page, self.num_pages + 1), value)

    def push(self, pages: torch.Tensor) -> None:
        """Return checked pages, ascending, to the front of a list in host memory."""
        count = pages.numel()
        self.stack[self.head - count : self.head] = pages
        self.state[pages] = FREE
        self.head -= count

    def push_filtered(self, pages: torch.Tensor) -> None:
        """Return those of `pages` (int64 ``[n]`` on the device, any order) that are held; nothing
        is read back."""
        pages = pages.sort().values
        named = torch.where((pages >= 1) & (pages <= self.num_pages), pages, 0)
        good = self.state[named] == HELD
        good[1:] &= pages[1:] != pages[:-1]
        rank = good.cumsum(0)
        front = self.head + (self.lost - self.seen)
        # Allocations that the host granted past the true end got padding's page, and nothing left
        # the list for them.
        past_end = (front - self.num_pages).clamp_min(0)
        front = front - past_end - rank[-1:]
        self.stack.scatter_(0, torch.where(good, front + rank - 1, self.num_pages), pages)
        self.state.scatter_(0, torch.where(good, named, self.num_pages + 1), FREE)
        self.lost += pages.numel() - rank[-1:] - past_end
        self.head -= pages.numel()
        self._told.copy_(self.lost, non_blocking=True)
