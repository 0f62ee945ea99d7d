"""Exercises of notebook 04: pages, the free list and the page table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minikv.lessons.compare import judge_pair, judge_walk
from minikv.lessons.engine import Case, Exercise
from minikv.lessons.states import alloc_state, page_state
from minikv.viz.style import Drawing

# ------------------------------------------------------------------------- oracles, token by token


def _extend_oracle(
    free: list[int],
    prefix_lens: list[int],
    seq_lens: list[int],
    last_loc: list[int],
    page_size: int,
) -> Any:
    """Place every new token by itself: into the page under the last token while it has room, else
    into a new page."""
    left, slots = list(free), []
    for prefix, total, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
        for position in range(prefix, total):
            if position % page_size == 0:
                if not left:
                    return None, free
                last = left.pop(0) * page_size
            else:
                last += 1
            slots.append(last)
    return slots, left


def _decode_walk_oracle(
    free: list[int], lengths: list[int], last_loc: list[int], page_size: int, steps: int
) -> list[Any]:
    results, left, lengths, last = [], list(free), list(lengths), list(last_loc)
    for _ in range(steps):
        slots, rest = _extend_oracle(left, lengths, [n + 1 for n in lengths], last, page_size)
        results.append([slots, rest])
        if slots is None:
            break
        left, last, lengths = rest, slots, [n + 1 for n in lengths]
    return results


def _decode_walk(
    function: Any,
    free: list[int],
    lengths: list[int],
    last_loc: list[int],
    page_size: int,
    steps: int,
) -> Any:
    """Call the learner's alloc_decode once per step, each time with what it returned the step
    before."""
    results, left, lengths, last = [], list(free), list(lengths), list(last_loc)
    for _ in range(steps):
        lengths = [n + 1 for n in lengths]
        slots, rest = function(list(left), list(lengths), list(last), page_size)
        results.append([slots, rest])
        if slots is None:
            break
        left, last = rest, slots
    return results


# ------------------------------------------------------------------------------------ alloc_extend


def _request(prefix: int, page: int, page_size: int) -> int:
    """Slot of the last prefix token when it lies in `page`."""
    return -1 if prefix == 0 else page * page_size + (prefix - 1) % page_size


def _extend_grid() -> Iterator[Case]:
    for p in (1, 4):
        for prefix, total, why in (
            (0, 0, "nothing to extend"),
            (0, 1, "the first token opens a page"),
            (0, p - 1, "one token fewer than a page"),
            (0, p, "exactly one page"),
            (0, p + 1, "one token more than a page"),
            (p - 1, p, "the new token fills the page's last slot"),
            (p, p + 1, "the prefix ends at a page's end, so a new page opens"),
            (p + 1, 2 * p + 1, "rest of a page, then a page begun"),
            (p + 1, 3 * p + 1, "rest of a page, a whole page, a page begun"),
        ):
            if 0 <= prefix <= total:
                yield Case(
                    ([3, 5, 6, 8], [prefix], [total], [_request(prefix, 2, p)], p),
                    f"page size {p}: {why}",
                )
    yield Case(
        ([3, 5, 6], [3, 0], [4, 2], [2 * 4 + 2, -1], 4),
        "two requests: only the second opens a page",
    )
    yield Case(
        ([3, 5, 6], [0, 0], [5, 5], [-1, -1], 4),
        "too few pages for both: None, and the free list as it was",
    )
    yield Case(([3], [2, 4], [4, 8], [2 * 4 + 1, 1 * 4 + 3], 4), "the last free page")
    yield Case(([], [], [], [], 4), "an empty batch")


def _extend_random(rng: np.random.Generator) -> Case:
    p = int(rng.choice([1, 2, 4, 16]))
    n = int(rng.integers(1, 6))
    pages = (rng.permutation(60) + 1).tolist()
    prefix = rng.integers(0, 3 * p + 1, n).tolist()
    total = [a + int(rng.integers(0, 3 * p + 2)) for a in prefix]
    last = [_request(a, pages.pop(), p) for a in prefix]
    return Case((sorted(pages[: int(rng.integers(0, 24))]), prefix, total, last, p))


def _first_wrong(expected: Any, got: Any) -> int:
    """Number of the first new slot that is not as expected; 0 when that cannot be said."""
    pairs = zip(expected, got, strict=False) if isinstance(got, list | tuple) and expected else ()
    return next((i for i, (a, b) in enumerate(pairs) if type(b) is not int or a != b), 0)


def _extend_picture(case: Case, expected: Any, got: Any) -> Drawing:
    free, prefix, total, last, page_size = case.args
    wrong = _first_wrong(expected[0], got[0] if isinstance(got, list | tuple) and got else None)
    counts = [b - a for a, b in zip(prefix, total, strict=True)]
    return alloc_state(free, prefix, last, counts, expected, page_size, wrong)


ALLOC_EXTEND = Exercise(
    id="04-alloc-extend",
    title="alloc_extend: slots for a prompt",
    statement=(
        "A batch of requests needs slots. Request `i` has slots for its first `prefix_lens[i]` tokens, the last of them "
        "`last_loc[i]` (-1 if there are none), and must end with `seq_lens[i]` (equal: nothing to do). `free` is a list of page "
        "numbers; slot = page * page_size + offset. For each request in order, first use the rest of the page of its last token "
        "(none if that page is full), then pages from the front of `free`. Return `(slots, left)`: one flat list of new slots, "
        "and the pages left. Do not change `free`. If the pages do not suffice for the whole batch, return `(None, free)`.\n\n"
        "`alloc_extend([3, 5], [6], [9], [9], 4)` gives `([10, 11, 12], [5])`: the last token lies in slot 9 (page 2, offset 1), "
        "slots 10 and 11 finish page 2, slot 12 opens page 3."
    ),
    signature="def alloc_extend(free: list[int], prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], page_size: int) -> tuple[list[int] | None, list[int]]",
    worked=Case(([3, 5], [6], [9], [9], 4), "the worked case"),
    grid=_extend_grid,
    random=_extend_random,
    oracle=_extend_oracle,
    judge=judge_pair,
    picture=_extend_picture,
    parts=[("slots", "free pages left")],
    hints=(
        "Write it for one token at a time first: when does a token open a new page?",
        "A token at position t opens a page exactly when t % page_size == 0; else its slot is the last slot + 1.",
        "Loop over requests, then over positions prefix..seq-1; keep `last`, pop pages from a copy of `free`, "
        "and return (None, free) with the original list as soon as the copy is empty and a page is needed.",
    ),
)

# ------------------------------------------------------------------------------------ alloc_decode


def _decode_grid() -> Iterator[Case]:
    for p in (1, 4):
        yield Case(
            ([3, 5, 6], [p], [_request(p, 2, p)], p, 1),
            f"page size {p}: the last page is full, a new one opens",
        )
        yield Case(
            ([3, 5, 6], [p + 1], [_request(p + 1, 2, p)], p, 2 * p + 1),
            f"page size {p}: a walk over page ends",
        )
    yield Case(([], [3], [2 * 4 + 2], 4, 1), "no free page, and none is needed")
    yield Case(([], [4], [2 * 4 + 3], 4, 1), "no free page, and one is needed: None")
    yield Case(
        ([7], [4, 8], [4 + 3, 8 + 3], 4, 1),
        "two requests need pages, one is free: None, nothing taken",
    )
    yield Case(
        ([7, 9], [4, 6, 8], [4 + 3, 8 + 1, 12 + 3], 4, 3), "pages go to the requests in batch order"
    )


def _decode_random(rng: np.random.Generator) -> Case:
    p = int(rng.choice([1, 2, 4, 16]))
    n = int(rng.integers(1, 6))
    pages = (rng.permutation(60) + 1).tolist()
    lengths = rng.integers(1, 3 * p + 1, n).tolist()
    last = [_request(length, pages.pop(), p) for length in lengths]
    return Case(
        (sorted(pages[: int(rng.integers(0, 30))]), lengths, last, p, int(rng.integers(1, 12))),
        "a random walk",
    )


def _decode_picture(case: Case, expected: Any, got: Any) -> Drawing:
    """The step of the walk that goes wrong first."""
    free, lengths, last, page_size, _ = case.args
    steps = got if isinstance(got, list) else []
    at = next((i for i, (a, b) in enumerate(zip(expected, steps, strict=False)) if a != b), 0)
    if at:
        last, free = expected[at - 1]
    wrong = _first_wrong(expected[at][0], steps[at][0] if steps else None)
    return alloc_state(
        free, [n + at for n in lengths], last, [1] * len(lengths), expected[at], page_size, wrong
    )


ALLOC_DECODE = Exercise(
    id="04-alloc-decode",
    title="alloc_decode: one more token for everybody",
    statement=(
        "Every request gets one token. `seq_lens` counts it already; `last_loc` are the slots of the tokens before it. "
        "A token that opens a page takes the first free page, in batch order; any other gets the slot after the last. "
        "Return `(slots, free pages left)`, or `(None, free)` with nothing taken when pages are too few. "
        "The check walks: it feeds what you return into the next call.\n\n"
        "Page size 4, `free = [3]`, `seq_lens = [5, 7]`, `last_loc = [7, 9]`: the first request's fifth token opens page 3 "
        "(slot 12), the second goes on in slot 10: `([12, 10], [])`."
    ),
    signature="def alloc_decode(free: list[int], seq_lens: list[int], last_loc: list[int], page_size: int) -> tuple[list[int] | None, list[int]]",
    worked=Case(([3], [4, 6], [7, 9], 4, 1), "the worked case"),
    grid=_decode_grid,
    random=_decode_random,
    oracle=_decode_walk_oracle,
    run=_decode_walk,
    judge=judge_walk,
    picture=_decode_picture,
    parts=[[f"step {i}:" for i in range(1, 12)], ("slots", "free pages left")],
    hints=(
        "`seq_lens` already counts the new token. At which position does it lie?",
        "Its position is seq_len - 1, so it opens a page when (seq_len - 1) % page_size == 0.",
        "Count the pages needed before taking any; if there are too few return (None, free).",
    ),
)

# ---------------------------------------------------------------------------------- slots and back


def _slots_oracle(pages: list[int], length: int, page_size: int) -> list[int]:
    every = [page * page_size + offset for page in pages for offset in range(page_size)]
    return every[:length]


def _slots_grid() -> Iterator[Case]:
    for p in (1, 4, 16):
        for length, why in (
            (0, "no tokens"),
            (1, "one token"),
            (p, "one full page"),
            (p + 1, "one token in the second page"),
        ):
            yield Case(([5, 2, 9], length, p), f"page size {p}: {why}")
    yield Case(([2, 3, 4], 12, 4), "neighbouring pages, all full")


SLOTS_OF = Exercise(
    id="04-slots-of",
    title="From the page table to slots",
    statement=(
        "A request's page table row is the list of its pages, in order. Return the slots of its first `length` tokens. "
        "With pages `[5, 2]` of 4 slots and 6 tokens: `[20, 21, 22, 23, 8, 9]`. Logical neighbours may lie far apart."
    ),
    signature="def slots_of(pages: list[int], length: int, page_size: int) -> list[int]",
    worked=Case(([5, 2], 6, 4), "the worked case"),
    grid=_slots_grid,
    random=lambda rng: Case(
        (
            (rng.permutation(40) + 1)[:8].tolist(),
            int(rng.integers(0, 8 * (p := int(rng.choice([1, 2, 4, 16]))) + 1)),
            p,
        )
    ),
    oracle=_slots_oracle,
    picture=lambda case, expected, got: page_state(
        [], case.args[2], [(expected, 0)], 0, "The page table of this request"
    ),
    hints=(
        "Which page holds token t, and which place in it?",
        "Token t lies in pages[t // page_size] at offset t % page_size.",
        "slot = pages[t // page_size] * page_size + t % page_size for t in range(length).",
    ),
)


def _position_oracle(pages: list[int], length: int, slot: int, page_size: int) -> int | None:
    slots = _slots_oracle(pages, length, page_size)
    return slots.index(slot) if slot in slots else None


def _position_grid() -> Iterator[Case]:
    yield Case(([5, 2], 6, 20, 4), "the first token")
    yield Case(([5, 2], 6, 8, 4), "the first token of the second page")
    yield Case(([5, 2], 6, 10, 4), "a slot of its page that holds no token yet")
    yield Case(([5, 2], 6, 12, 4), "a slot of another request's page")
    yield Case(([5, 2], 6, 0, 4), "slot 0 belongs to nobody")
    yield Case(([7], 1, 7, 1), "page size 1")
    yield Case(([], 0, 4, 4), "a request without pages")


POSITION_OF = Exercise(
    id="04-position-of",
    title="And back: whose slot is this?",
    statement=(
        "The other way round: which position of the request does `slot` hold? None when the slot is not one of its first "
        "`length` tokens. With pages `[5, 2]` of 4 slots and 6 tokens, slot 9 is position 5, and slot 10 is None."
    ),
    signature="def position_of(pages: list[int], length: int, slot: int, page_size: int) -> int | None",
    worked=Case(([5, 2], 6, 9, 4), "the worked case"),
    grid=_position_grid,
    random=lambda rng: Case(
        (
            (rng.permutation(12) + 1)[:6].tolist(),
            int(rng.integers(0, 6 * (p := int(rng.choice([1, 2, 4])) + 1))),
            int(rng.integers(0, 13 * p)),
            p,
        )
    ),
    oracle=_position_oracle,
    picture=lambda case, expected, got: page_state(
        [],
        case.args[3],
        [(_slots_oracle(case.args[0], case.args[1], case.args[3]), 0)],
        0,
        f"Who looks for slot {case.args[2]}: page {case.args[2] // case.args[3]}, offset {case.args[2] % case.args[3]}",
    ),
    hints=(
        "Undo slot = page * page_size + offset.",
        "page, offset = divmod(slot, page_size); then find the page's place in the row.",
        "position = pages.index(page) * page_size + offset, and None when the page is absent or position >= length.",
    ),
)

# ------------------------------------------------------------------------------ choose a page size


def _choose_oracle(lengths: list[int], sizes: list[int], token_bytes: int, entry_bytes: int) -> int:
    costs = []
    for size in sizes:
        pages = sum(len(range(0, n, size)) for n in lengths)
        empty = pages * size - sum(lengths)
        costs.append((empty * token_bytes + pages * entry_bytes, size))
    return min(costs)[1]


def _choose_grid() -> Iterator[Case]:
    yield Case(([1, 1, 1], [1, 4, 16], 100, 8), "short requests: large pages stand mostly empty")
    yield Case(
        ([4096], [1, 4, 16], 100, 8), "one long request: small pages need many table entries"
    )
    yield Case(([16, 32], [1, 4, 16], 1, 1), "lengths that fill their pages exactly")
    yield Case(
        ([0, 0], [4, 1, 16], 100, 8), "no tokens: every size costs nothing, the smallest wins"
    )
    yield Case(([5, 6, 7], [8, 4, 2], 8, 64), "sizes in any order")


def _choose_random(rng: np.random.Generator) -> Case:
    lengths = rng.integers(0, 400, int(rng.integers(1, 12))).tolist()
    return Case(
        (
            lengths,
            [1, 2, 4, 8, 16, 32, 64, 128, 256],
            int(rng.choice([1, 8, 64, 512])),
            int(rng.choice([4, 8, 64, 256])),
        )
    )


CHOOSE_PAGE_SIZE = Exercise(
    id="04-choose-page-size",
    title="Choose a page size",
    statement=(
        "Large pages waste the empty slots of each request's last page (`token_bytes` each); small pages need more page "
        "table entries (`entry_bytes` per page). Return the size of `sizes` with the lowest total, the smallest such size "
        "on a tie. For lengths `[5, 3]`, sizes `[1, 4]`, 10 bytes a token and 8 an entry: size 1 costs 8 entries = 64, "
        "size 4 costs 4 empty slots + 3 entries = 64, so the answer is 1."
    ),
    signature="def choose_page_size(lengths: list[int], sizes: list[int], token_bytes: int, entry_bytes: int) -> int",
    worked=Case(([5, 3], [1, 4], 10, 8), "the worked case"),
    grid=_choose_grid,
    random=_choose_random,
    oracle=_choose_oracle,
    hints=(
        "Write the cost of one size first, then take the smallest.",
        "Each request rounds up by itself: pages = ceil(n / size), not ceil(sum / size).",
        "cost = (pages * size - tokens) * token_bytes + pages * entry_bytes, summed over requests; min over (cost, size).",
    ),
)

EXERCISES = [ALLOC_EXTEND, ALLOC_DECODE, SLOTS_OF, POSITION_OF, CHOOSE_PAGE_SIZE]
