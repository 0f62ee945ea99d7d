"""A server's memory before paging: each request gets one piece, taken when it is admitted.

How long a request will get is not known then, so a rule guesses. The rules are those that Kwon et
al. (2023, the PagedAttention paper) compare for Orca: the longest length allowed, the next power of
two, and the true length, which no real server knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Chat:
    """One request: its name, the tokens of its prompt, and its true length, prompt and answer,
    which time will tell."""

    name: str
    prompt: int
    length: int


@dataclass
class Piece:
    """Slots ``start .. start + size`` of one running request; `used` of them are written."""

    chat: Chat
    start: int
    size: int
    used: int


class Contiguous:
    """Memory of `size` slots in a row; a request has one piece of it, the leftmost that is large
    enough.

    Examples
    --------
    >>> memory = Contiguous(48)
    >>> memory.admit(Chat("A", prompt=13, length=15), 16), memory.admit(Chat("B", 13, 16), 40)
    (True, False)
    >>> memory.levels(need=40)
    {'used': 13, 'reserved': 2, 'internal': 1, 'external': 0}
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.pieces: list[Piece] = []  # by address

    def holes(self) -> list[tuple[int, int]]:
        """(start, size) of every free run of slots."""
        ends = [0, *(piece.start + piece.size for piece in self.pieces)]
        starts = [*(piece.start for piece in self.pieces), self.size]
        return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]

    def admit(self, chat: Chat, reserve: int) -> bool:
        """Give `chat` a piece of `reserve` slots and write its prompt; False, and nothing happens,
        without a place."""
        for start, free in self.holes():
            if free >= reserve:
                self.pieces.append(Piece(chat, start, reserve, chat.prompt))
                self.pieces.sort(key=lambda piece: piece.start)
                return True
        return False

    def step(self) -> list[str]:
        """Every request writes one token; those that are done leave. Their names."""
        for piece in self.pieces:
            piece.used += 1
        done = [piece.chat.name for piece in self.pieces if piece.used >= piece.chat.length]
        self.pieces = [piece for piece in self.pieces if piece.used < piece.chat.length]
        return done

    def levels(self, need: int = 0) -> dict[str, int]:
        """Slots by fate.

        Parameters
        ----------
        need
            What the next request would reserve; 0 when none waits.

        Returns
        -------
        dict
            ``used``: written. ``reserved``: this request will write it later. ``internal``: held
            and never written. ``external``: free, and as much as the next request needs, but in
            holes that are all too small for it.
        """
        holes = [free for _, free in self.holes()]
        stuck = bool(need) and sum(holes) >= need > max(holes, default=0)
        return {
            "used": sum(piece.used for piece in self.pieces),
            "reserved": sum(piece.chat.length - piece.used for piece in self.pieces),
            "internal": sum(piece.size - piece.chat.length for piece in self.pieces),
            "external": sum(holes) if stuck else 0,
        }

    def segments(self) -> list[dict[str, Any]]:
        """The pieces as ``viz.memory_over_time.strip`` draws them."""
        return [
            {"who": p.chat.name, "start": p.start, "used": p.used, "reserved": p.size}
            for p in self.pieces
        ]


@dataclass
class Moment:
    """The state after one step's admissions: levels, pieces, how many run, and who waits for how
    much."""

    levels: dict[str, int]
    segments: list[dict[str, Any]]
    running: int
    refused: dict[str, Any] | None
    ended: list[str]


def serve(chats: Iterable[Chat], size: int, reserve: Callable[[Chat], int]) -> list[Moment]:
    """Serve chats first come, first served: admit while the next one fits, write a token each, and
    so on to the end.

    Parameters
    ----------
    chats
        All wait from the beginning.
    size
        Slots of memory; a chat that needs more is refused for good and dropped.
    reserve
        How many slots a chat is given, at least its length.

    Returns
    -------
    list of Moment
        One per step.
    """
    memory, waiting = Contiguous(size), deque(chat for chat in chats if reserve(chat) <= size)
    moments, ended = [], []
    while waiting or memory.pieces:
        while waiting and memory.admit(waiting[0], reserve(waiting[0])):
            waiting.popleft()
        need = reserve(waiting[0]) if waiting else 0
        refused = {"who": waiting[0].name, "need": need} if waiting else None
        moments.append(
            Moment(memory.levels(need), memory.segments(), len(memory.pieces), refused, ended)
        )
        ended = memory.step()
    return moments


def rules(longest: int) -> dict[str, Callable[[Chat], int]]:
    """Reservation rules by name, for requests of at most `longest` tokens.

    Examples
    --------
    >>> {name: rule(Chat("A", prompt=10, length=35)) for name, rule in rules(256).items()}
    {'longest allowed': 256, 'power of two': 42, 'true length': 35}
    """

    def power(chat: Chat) -> int:
        answer = max(chat.length - chat.prompt, 1)
        return min(chat.prompt + (1 << (answer - 1).bit_length()), longest)

    return {
        "longest allowed": lambda _: longest,
        "power of two": power,
        "true length": lambda chat: chat.length,
    }


def chat_trace(
    count: int, longest: int, *, seed: int = 0, prompt: int = 160, answer: int = 220
) -> list[Chat]:
    """Chats whose prompts and answers have log-normal lengths: many short ones, few long ones.

    Parameters
    ----------
    prompt, answer
        Medians, in tokens.
    """
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(prompt), 0.8, count), 4, longest // 2).astype(int)
    answers = np.clip(rng.lognormal(np.log(answer), 0.8, count), 1, longest // 2).astype(int)
    return [
        Chat(f"{i}", int(p), int(p + a))
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]


def shares(moments: Sequence[Moment], size: int) -> dict[str, float]:
    """Mean share of memory by fate, and ``running``: requests at a time, over the steps at which
    some request waits.

    The steps at the end, when nobody waits, say nothing about memory and are left out.
    """
    busy = [m for m in moments if m.refused is not None] or list(moments)
    mean = {part: sum(m.levels[part] for m in busy) / len(busy) / size for part in busy[0].levels}
    return {
        **mean,
        "free": 1 - sum(mean.values()),
        "running": sum(m.running for m in busy) / len(busy),
    }
