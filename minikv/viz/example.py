"""The running example of the notebooks: three requests that share a 10-token system prompt, in
small integers.

Examples
--------
>>> " ".join(WORDS[t] for t in REQUESTS["B"])
'You are a kind helper . Answer in one line How big ?'
"""

from __future__ import annotations

PAGE_SIZE, NUM_PAGES, KV_HEADS, HEAD_DIM = 4, 12, 2, 4
WORDS = [
    "<pad>",
    "You",
    "are",
    "a",
    "kind",
    "helper",
    ".",
    "Answer",
    "in",
    "one",
    "line",
    "Why",
    "cache",
    "?",
    "How",
    "big",
    "pages",
]
SYSTEM = list(range(1, 11))
REQUESTS = {"A": [*SYSTEM, 11, 12, 13], "B": [*SYSTEM, 14, 15, 13], "C": [*SYSTEM, 11, 16, 13]}
"""Token ids by letter; the shared prompt fills two whole pages and half of a third."""


def decode(ids: list[int]) -> str:
    """Text of token ids: a word each."""
    return " ".join(WORDS[i] if 0 <= i < len(WORDS) else str(i) for i in ids)
