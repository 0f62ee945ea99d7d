"""Notebook 04: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def alloc_extend(free, prefix_lens, seq_lens, last_loc, page_size):
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


def _extend_keeps_what_it_took(free, prefix_lens, seq_lens, last_loc, page_size):
    slots = []
    for prefix, total, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
        for position in range(prefix, total):
            if position % page_size == 0:
                if not free:
                    return None, free
                last = free.pop(0) * page_size
            else:
                last += 1
            slots.append(last)
    return slots, free


def _extend_always_new_page(free, prefix_lens, seq_lens, last_loc, page_size):
    left, slots = list(free), []
    for prefix, total in zip(prefix_lens, seq_lens, strict=True):
        need = -(-(total - prefix) // page_size)
        if need > len(left):
            return None, free
        taken, left = left[:need], left[need:]
        slots += [page * page_size + i for page in taken for i in range(page_size)][
            : total - prefix
        ]
    return slots, left


def _extend_counts_tokens(free, prefix_lens, seq_lens, last_loc, page_size):
    # Enough by tokens is not enough by pages: where it runs out the page number is made up.
    if sum(seq_lens) - sum(prefix_lens) > len(free) * page_size:
        return None, free
    more = [*free, *range(1000, 2000)]
    slots, left = alloc_extend(more, prefix_lens, seq_lens, last_loc, page_size)
    return slots, [page for page in left if page < 1000]


def _extend_from_the_back(free, prefix_lens, seq_lens, last_loc, page_size):
    slots, left = alloc_extend(free[::-1], prefix_lens, seq_lens, last_loc, page_size)
    return (None, free) if slots is None else (slots, left[::-1])


def alloc_decode(free, seq_lens, last_loc, page_size):
    need = sum((n - 1) % page_size == 0 for n in seq_lens)
    if need > len(free):
        return None, free
    left, slots = list(free), []
    for n, last in zip(seq_lens, last_loc, strict=True):
        slots.append(left.pop(0) * page_size if (n - 1) % page_size == 0 else last + 1)
    return slots, left


def _decode_off_by_one(free, seq_lens, last_loc, page_size):
    if sum(n % page_size == 0 for n in seq_lens) > len(free):
        return None, free
    left, slots = list(free), []
    for n, last in zip(seq_lens, last_loc, strict=True):
        slots.append(left.pop(0) * page_size if n % page_size == 0 else last + 1)
    return slots, left


def _decode_never_opens(free, seq_lens, last_loc, page_size):
    return [last + 1 for last in last_loc], free


def _decode_takes_before_counting(free, seq_lens, last_loc, page_size):
    slots = []
    for n, last in zip(seq_lens, last_loc, strict=True):
        if (n - 1) % page_size:
            slots.append(last + 1)
        elif free:
            slots.append(free.pop(0) * page_size)
        else:
            return None, free
    return slots, free


def slots_of(pages, length, page_size):
    return [pages[t // page_size] * page_size + t % page_size for t in range(length)]


def _slots_in_one_run(pages, length, page_size):
    return [pages[0] * page_size + t for t in range(length)]


def _slots_are_pages(pages, length, page_size):
    return [pages[t // page_size] + t % page_size for t in range(length)]


def _slots_whole_pages(pages, length, page_size):
    used = -(-length // page_size)
    return [page * page_size + i for page in pages[:used] for i in range(page_size)]


def position_of(pages, length, slot, page_size):
    page, offset = divmod(slot, page_size)
    if page not in pages:
        return None
    position = pages.index(page) * page_size + offset
    return position if position < length else None


def _position_without_length(pages, length, slot, page_size):
    page, offset = divmod(slot, page_size)
    return pages.index(page) * page_size + offset if page in pages else None


def _position_is_offset(pages, length, slot, page_size):
    page, offset = divmod(slot, page_size)
    return offset if page in pages and offset < length else None


def _position_from_first_page(pages, length, slot, page_size):
    position = slot - pages[0] * page_size if pages else -1
    return position if 0 <= position < length else None


def _cost(lengths, size, token_bytes, entry_bytes):
    pages = sum(-(-n // size) for n in lengths)
    return (pages * size - sum(lengths)) * token_bytes + pages * entry_bytes


def choose_page_size(lengths, sizes, token_bytes, entry_bytes):
    return min(sizes, key=lambda size: (_cost(lengths, size, token_bytes, entry_bytes), size))


def _choose_over_the_sum(lengths, sizes, token_bytes, entry_bytes):
    return min(
        sizes, key=lambda size: (_cost([sum(lengths)], size, token_bytes, entry_bytes), size)
    )


def _choose_waste_only(lengths, sizes, token_bytes, entry_bytes):
    return min(sizes, key=lambda size: (_cost(lengths, size, token_bytes, 0), size))


def _choose_largest_on_ties(lengths, sizes, token_bytes, entry_bytes):
    return min(sizes, key=lambda size: (_cost(lengths, size, token_bytes, entry_bytes), -size))


SOLUTIONS = {
    "04-alloc-extend": alloc_extend,
    "04-alloc-decode": alloc_decode,
    "04-slots-of": slots_of,
    "04-position-of": position_of,
    "04-choose-page-size": choose_page_size,
}
MISTAKES = {
    "04-alloc-extend": [
        Mistake(
            "pages taken before the list ran out are lost; on None nothing may be taken",
            _extend_keeps_what_it_took,
        ),
        Mistake(
            "the rest of the last prefix page is never used; its free slots come first",
            _extend_always_new_page,
        ),
        Mistake(
            "room is counted in tokens, but pages are handed out whole to each request",
            _extend_counts_tokens,
        ),
        Mistake(
            "pages are taken from the back of the free list, not the front", _extend_from_the_back
        ),
    ],
    "04-alloc-decode": [
        Mistake(
            "a page opens one token too early; seq_lens already counts the new token",
            _decode_off_by_one,
        ),
        Mistake(
            "no page is ever opened, so tokens run into the neighbouring page", _decode_never_opens
        ),
        Mistake(
            "pages are taken before they are counted; on None nothing may be taken",
            _decode_takes_before_counting,
        ),
    ],
    "04-slots-of": [
        Mistake("pages are not neighbours; look up the page of every token", _slots_in_one_run),
        Mistake("a page number is not a slot; multiply it by the page size", _slots_are_pages),
        Mistake("the empty slots of the last page hold no tokens yet", _slots_whole_pages),
    ],
    "04-position-of": [
        Mistake(
            "slots of the last page past the request's length hold no token",
            _position_without_length,
        ),
        Mistake(
            "that is the offset inside the page, not the position in the request",
            _position_is_offset,
        ),
        Mistake(
            "pages are not neighbours; find the place of the slot's page in the row",
            _position_from_first_page,
        ),
    ],
    "04-choose-page-size": [
        Mistake(
            "each request rounds up by itself; the sum of lengths does not", _choose_over_the_sum
        ),
        Mistake("the page table's entries cost bytes too", _choose_waste_only),
        Mistake("on a tie the smallest size is asked for", _choose_largest_on_ties),
    ],
}
