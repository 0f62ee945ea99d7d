"""Pages of the KV pool: who gets which, and how they come back.

A slot holds the K and V of one token; a page is `page_size` neighbouring slots (``slot = page *
page_size + offset``). How many pages a call needs follows from lengths that the host knows, so an
allocation is decided on the host before anything is launched, and the device only fills in the
slots (`slots.py`). The semantics are those of SGLang's paged allocator; the page table
idea is vLLM's PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from minikv.device import pick_device
from minikv.errors import ArgumentError, StateError
from minikv.kernels.choice import use_triton
from minikv.kernels.staging import Staging
from minikv.memory import slots as kernels
from minikv.memory.free_list import FREE, HELD, PENDING, AllocatorState, FreeList
from minikv.numbers import INTEGERS, first_of, host_integers, whole

MAX_PAGE_SIZE = 256
MOST_TOKENS = 1 << 40  # sums over a batch stay far from the end of 64 bits
Lengths = torch.Tensor | np.ndarray | Sequence[int]


class PagedAllocator:
    """Hands out KV slots in pages and takes them back.

    Parameters
    ----------
    size
        Tokens to hand out; rounded down to whole pages. Page 0 is extra and never handed out:
        padding writes there.
    page_size
        Tokens per page, 1 to 256.
    device
        Where slots live.
    debug
        Check what device tensors say, too; this waits for the device.
    kernels
        ``"triton"``, ``"torch"``, or ``"auto"``: Triton on CUDA, PyTorch on the CPU. The results
        are the same.

    Examples
    --------
    >>> import torch
    >>> a = PagedAllocator(size=12, page_size=4)
    >>> a.alloc_extend(torch.tensor([0]), torch.tensor([6]), torch.tensor([-1]), 6)
    tensor([4, 5, 6, 7, 8, 9])
    >>> a.alloc_decode(torch.tensor([7]), torch.tensor([9]))
    tensor([10])
    >>> a.available_size()
    4
    >>> a.free(torch.tensor([8, 9, 10]))
    >>> a
    PagedAllocator(3 pages of 4 on cpu: 2 free, front first 2 3)
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
        kernels: str = "auto",
    ) -> None:
        remedy = f"must be a whole number between 1 and {MAX_PAGE_SIZE}"
        page_size = whole("page_size", page_size, 1, MAX_PAGE_SIZE, remedy)
        remedy = f"must be a whole number: at least one page of {page_size} tokens, and below 2**31"
        size = whole("size", size, page_size, 2**31 - 1, remedy)  # tables keep slots as int32
        if size % page_size:
            warnings.warn(
                f"size={size} is rounded down to whole pages of {page_size} tokens", stacklevel=2
            )
        self.page_size = page_size
        self.num_pages = size // page_size
        self.size = self.num_pages * page_size
        self.debug = debug
        self._free = FreeList(self.num_pages, pick_device(device))
        self.device = self._free.stack.device  # with its number: cuda:0, not cuda
        self._on_cpu = self.device.type == "cpu"
        self._triton = use_triton(kernels, self.device)
        # NumPy divides integers slowly; most page sizes are powers of two.
        self._page_shift = page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else None
        self._staging = Staging(self.device)
        self._frees = self._backups = self._depth = 0
        self._states = WeakSet[AllocatorState]()  # that can be restored, while callers keep them
        self._pending: list[torch.Tensor] = []  # pages on their way back

    # ---- what there is --------------------------------------------------------------------------

    def available_size(self) -> int:
        """Tokens in free pages; frees inside an open :meth:`free_group` do not count yet."""
        self._free.poll()
        return self._free.available * self.page_size

    @property
    def free_pages(self) -> torch.Tensor:
        """The free list, int64, front first (a copy; on CUDA this waits for the device)."""
        return self._free.pages()

    @property
    def page_is_held(self) -> torch.Tensor:
        """Bool ``[num_pages + 1]`` on the host: not free. Page 0 is always held (on CUDA this waits
        for the device)."""
        return self._free.state[: self.num_pages + 1].cpu() != FREE

    def is_free(self, pages: torch.Tensor | Sequence[int] | int) -> torch.Tensor:
        """Whether each of `pages` is on the free list: bool on the host, shaped like `pages`."""
        index = host_integers("pages", pages.cpu() if isinstance(pages, torch.Tensor) else pages)
        if wrong := [page for page in index.ravel().tolist() if not 0 <= page <= self.num_pages]:
            raise ArgumentError("pages", wrong[0], f"is not one of 0..{self.num_pages}")
        return ~self.page_is_held[torch.from_numpy(index)]

    # ---- handing out ----------------------------------------------------------------------------

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of ``num_tokens / page_size`` whole pages, int64 ``[num_tokens]``, or None when
        there are too few.

        Raises
        ------
        ArgumentError
            For a negative number, or one that is not a multiple of the page size.
        """
        remedy = f"must be whole pages, a multiple of {self.page_size}"
        if whole("num_tokens", num_tokens, 0, remedy=remedy) % self.page_size:
            raise ArgumentError("num_tokens", num_tokens, remedy)
        no_prefix = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        return self.alloc_extend(
            np.zeros(1, np.int64), np.array([num_tokens]), no_prefix, num_tokens
        )

    def alloc_extend(
        self,
        prefix_lens: Lengths,
        seq_lens: Lengths,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots for the new tokens of a batch of requests.

        Each request first fills the page of its last prefix token, then takes new pages, in batch
        order.

        Parameters
        ----------
        prefix_lens, seq_lens
            Integers ``[n]`` on the CPU: tokens before and after.
        last_loc
            int32 or int64 ``[n]`` on the allocator's device: slot of the last prefix token, -1
            without a prefix. ``(last_loc + 1) % page_size == prefix_lens % page_size``, in the pool
            (checked on the CPU; `debug`: held).
        extend_num_tokens
            The sum of ``seq_lens - prefix_lens``.

        Returns
        -------
        Tensor or None
            int64 ``[extend_num_tokens]``, requests laid end to end; None, and nothing changed or
            launched, when there are too few free pages.

        Raises
        ------
        ArgumentError
            For a negative extend, a wrong sum, wrong shapes or devices; nothing is changed.
        """
        prefix = host_integers("prefix_lens", prefix_lens, 1)
        seq = host_integers("seq_lens", seq_lens, 1)
        n = seq.size
        if prefix.size != n:
            raise ArgumentError(
                "prefix_lens", tuple(prefix.shape), f"must have as many entries as seq_lens, {n}"
            )
        new = seq - prefix
        # As unsigned numbers the negative ones are the largest, so one reduction finds them and the
        # too long ones.
        if n and np.maximum.reduce((new | prefix).view(np.uint64)) >= 2 * MOST_TOKENS:
            if seq.max() > MOST_TOKENS:
                remedy = f"is too long: at most {MOST_TOKENS} tokens a request"
                raise ArgumentError("seq_lens", int(seq.max()), remedy)
            i = int(np.argmax((new | prefix) < 0))
            remedy = f"of request {i} must be 0 to seq_lens, {seq[i]}"
            raise ArgumentError("prefix_lens", int(prefix[i]), remedy)
        self._check_last_loc(last_loc, prefix)
        staged = self._staging.array(2 * n + 2)
        before = staged[0]
        before[0] = before[1] = 0
        np.add.accumulate(new, out=before[2::2])
        np.add.accumulate(self._pages(seq) - self._pages(prefix), out=before[3::2])
        total, new_pages = int(before[-2]), int(before[-1])
        if total != extend_num_tokens:
            raise ArgumentError(
                "extend_num_tokens", extend_num_tokens, f"must be the sum of the extends, {total}"
            )
        fill_in = kernels.extend_triton if self._triton else kernels.extend_torch
        return self._hand_out(new_pages, total, fill_in, last_loc, staged, new)

    def alloc_decode(self, seq_lens: Lengths, last_loc: torch.Tensor) -> torch.Tensor | None:
        """One more slot for each request: the next one of its page, or the first of a new page.

        Parameters
        ----------
        seq_lens
            Integers ``[n]`` on the CPU, the new token counted.
        last_loc
            As for :meth:`alloc_extend`, with ``prefix_lens = seq_lens - 1``.

        Returns
        -------
        Tensor or None
            int64 ``[n]``; None, and nothing changed or launched, when there are too few free pages.

        Raises
        ------
        ArgumentError
            For a length below 1, wrong shapes or devices.
        """
        seq = host_integers("seq_lens", seq_lens, 1)
        n = seq.size
        if n and np.minimum.reduce(seq) < 1:
            raise ArgumentError(
                "seq_lens", int(seq.min()), "must count the new token, so be at least 1"
            )
        prefix = seq - 1
        self._check_last_loc(last_loc, prefix)
        into = (
            prefix % self.page_size if self._page_shift is None else prefix & (self.page_size - 1)
        )
        new_pages = n - int(np.count_nonzero(into))
        if not new_pages:  # every token goes on in its page
            return last_loc.long() + 1
        fill_in = kernels.decode_triton if self._triton else kernels.decode_torch
        return self._hand_out(new_pages, n, fill_in, last_loc)

    def _pages(self, lengths: np.ndarray) -> np.ndarray:
        """Pages that hold so many tokens."""
        up = lengths + (self.page_size - 1)
        return up // self.page_size if self._page_shift is None else up >> self._page_shift

    def _hand_out(
        self, new_pages: int, tokens: int, fill_in: Callable[..., torch.Tensor], *batch: Any
    ) -> torch.Tensor | None:
        """Let pages leave the free list and `fill_in` compute the slots; None when there are too
        few pages. A call that fails on its way takes none."""
        free = self._free
        free.poll()
        first = free.head
        if new_pages > free.available:
            return None
        if tokens == 0:
            return free.stack.new_empty(0)
        free.head = first + new_pages
        try:
            return fill_in(free, self.page_size, first, new_pages, tokens, *batch)
        except BaseException:
            self._put_back(first)
            raise

    def _put_back(self, head: int) -> None:
        """Undo all that was taken from position `head` of the free list on: it is still there."""
        taken, self._free.head = self._free.head - head, head
        self._free.mark(head, taken, FREE)

    def _check_last_loc(self, last_loc: torch.Tensor, prefix: np.ndarray) -> None:
        want = f"must be an int64 or int32 tensor [{prefix.size}], one slot per request"
        if not isinstance(last_loc, torch.Tensor) or last_loc.dtype not in INTEGERS:
            raise ArgumentError("last_loc", last_loc, want)
        if last_loc.shape != prefix.shape:
            raise ArgumentError("last_loc", tuple(last_loc.shape), want)
        if last_loc.device != self.device:
            remedy = f"must be on the allocator's device, {self.device}"
            raise ArgumentError("last_loc", last_loc.device, remedy)
        if not (self._on_cpu or self.debug):
            return
        slots = last_loc.cpu().numpy()
        pages = slots // self.page_size
        unheld = (slots < -1) | (pages > self.num_pages)
        if self.debug:  # the rest of a page that is not held would be given away twice
            unheld |= self._not_held(pages) & (prefix % self.page_size > 0)
        misplaced = (slots + 1 - prefix) % self.page_size != 0
        if (misplaced | unheld).any():
            i = int(np.argmax(misplaced | unheld))
            why = f"in page {pages[i]}, which nobody holds"
            if misplaced[i]:
                why = f"not where a prefix of {prefix[i]} tokens ends in a page of {self.page_size}"
            remedy = "pass the slot of the last prefix token, -1 without a prefix"
            raise ArgumentError("last_loc", int(slots[i]), f"of request {i} is {why}; {remedy}")

    # ---- taking back ----------------------------------------------------------------------------

    def free(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Return the pages that hold `slots`; freeing any slot of a page frees the page.

        Parameters
        ----------
        slots
            int32 or int64 ``[n]``. On the CPU, or with ``debug=True``: any slots. On CUDA without
            `debug`: a run of one request in order that begins at a page start; ``ceil(n /
            page_size)`` pages return, nothing is read back.

        Raises
        ------
        ArgumentError
            Naming the page that is already free, reserved or out of range, before anything is
            changed: always for CPU tensors, with ``debug=True`` for device tensors. Without it such
            a page is ignored, and a later call warns.
        """
        if not isinstance(slots, torch.Tensor):
            slots = torch.from_numpy(host_integers("slots", slots))
        slots = slots.reshape(-1)
        if slots.numel() == 0:
            return
        if slots.dtype not in INTEGERS:
            raise ArgumentError("slots", slots.dtype, "must be int64 or int32")
        if slots.device.type == "cpu" or self.debug:
            pages = self._checked_pages(slots.cpu().numpy())
        elif slots.device == self.device:
            pages = slots[:: self.page_size].long() // self.page_size
        else:
            raise ArgumentError("slots", slots.device, f"must be on the CPU or on {self.device}")
        self._frees += 1
        self._pending.append(pages)
        if self._depth == 0:
            self._apply_frees()

    @contextmanager
    def free_group(self) -> Iterator[PagedAllocator]:
        """Collect the frees of the body and apply them at the end of the outermost group as one
        ascending batch."""
        self._depth += 1
        try:
            yield self
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._apply_frees()

    def _checked_pages(self, slots: np.ndarray) -> torch.Tensor:
        """The pages of `slots`, ascending, each once and each held; on the CPU they are marked as
        on their way back."""
        pages = np.unique(slots // self.page_size).astype(np.int64)
        wrong = self._not_held(pages)
        if wrong.any():
            page = int(pages[np.argmax(wrong)])
            why = f"is not one of 1..{self.num_pages}"
            if 1 <= page <= self.num_pages:
                why = "is already free"
            slot = int(slots[slots // self.page_size == page][0])
            raise ArgumentError(
                "slots", slot, f"page {page} {why}; free each page once, and only slots handed out"
            )
        if self._on_cpu:
            self._free.state.numpy()[pages] = PENDING
        return torch.from_numpy(pages).to(self.device)

    def _not_held(self, pages: np.ndarray) -> np.ndarray:
        """Which of `pages` are free, on their way back, or no pages to hand out."""
        state = self._free.state.cpu().numpy()
        if not self._on_cpu:  # pages on their way back are not marked on the device
            for freed in self._pending:
                state[freed.cpu().numpy()] = PENDING
        outside = (pages < 1) | (pages > self.num_pages)
        return outside | (state[np.where(outside, 0, pages)] != HELD)

    def _apply_frees(self) -> None:
        if not self._pending:
            return
        pages = torch.cat(self._pending)
        self._pending = []
        self._frees += 1  # pages move now: states from before, and from inside the group, are stale
        if self._on_cpu:
            self._free.push(pages.sort().values)
        else:
            self._free.push_filtered(pages)

    # ---- undoing --------------------------------------------------------------------------------

    def backup(self) -> AllocatorState:
        """Remember this moment, for :meth:`restore`."""
        self._backups += 1
        state = AllocatorState(self, self._backups, self._free.head, self._free.seen, self._frees)
        self._states.add(state)
        return state

    def restore(self, state: AllocatorState) -> None:
        """Undo all allocations made since `state`; it stays usable, later states do not.

        Raises
        ------
        StateError
            When something was freed since, or an earlier state was restored or the allocator
            cleared; and for the state of another allocator.
        """
        if not isinstance(state, AllocatorState) or state.owner is not self:
            raise StateError(
                "restore: not a state of this allocator; pass what its own backup() returned"
            )
        if state.frees != self._frees:
            raise StateError(
                "restore: slots were freed since backup(); undo allocations before freeing anything"
            )
        if state not in self._states:
            raise StateError(
                "restore: an earlier state was restored since backup(); this one is no longer "
                "reachable"
            )
        self._put_back(state.head + self._free.seen - state.seen)
        for later in [other for other in self._states if other.number > state.number]:
            self._states.discard(later)

    def clear(self) -> None:
        """Return to the fresh state: all pages free, ascending; open groups forget what they
        collected."""
        self._free = FreeList(self.num_pages, self.device)
        self._pending = []
        self._frees += 1

    # ---- showing --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        free = self.available_size() // self.page_size
        pages = f"{self.num_pages} pages of {self.page_size}"
        text = f"PagedAllocator({pages} on {self.device}: {free} free"
        if self._on_cpu and free:
            text += f", front first {first_of(self._free.pages()[:9].tolist())}"
        return text + ")"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from minikv.viz import pages

        return pages.mimebundle(self)
