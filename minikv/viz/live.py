"""Reads live objects (requests, tables, token decoders) into plain lists that the pictures draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from minikv.errors import ArgumentError
from minikv.viz import style


def ints(values: Any) -> list[int]:
    """A tensor, array or sequence of integers as a list of int; None is empty."""
    if values is None:
        return []
    return [int(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


class Texts:
    """Token texts: call it with one id, or ask for the text of several ids together.

    Parameters
    ----------
    decode
        A tokenizer (its ``decode`` takes a list of ids), a function that takes a list of ids, a
        list or dict of texts by id, or None for the numbers themselves. Special tokens, which
        decode to nothing, are shown by the names in a tokenizer's ``specials`` (a dict by id).

    Examples
    --------
    >>> Texts(["<s>", "You", " are"])(2), Texts()(2), Texts().joined([1, 2])
    (' are', '2', '1 2')
    """

    def __init__(self, decode: Any = None) -> None:
        named = getattr(decode, "specials", None) or {}
        self.specials = {int(i): f"⟨{str(name).strip('<|>')}⟩" for i, name in named.items()}
        self.known: dict[int, str] = dict(self.specials)
        self.call: Callable[[list[int]], str] | None = None
        if isinstance(decode, Mapping):
            self.known = {int(k): str(v) for k, v in decode.items()}
        elif isinstance(decode, Sequence):
            self.known = dict(enumerate(map(str, decode)))
        elif decode is not None:
            self.call = getattr(decode, "decode", decode)
            if not callable(self.call):
                raise ArgumentError(
                    "decode",
                    decode,
                    "pass a tokenizer, a function of a list of ids, or texts by id",
                )

    def __call__(self, token: int) -> str:
        if token not in self.known:
            self.known[token] = str(self.call([token])) if self.call else str(token)
        return self.known[token]

    def joined(self, tokens: Any) -> str:
        """The text of consecutive tokens."""
        ids = ints(tokens)
        if not self.call:
            return " ".join(map(self, ids))
        runs = groupby(ids, self.specials.__contains__)
        return "".join(
            "".join(map(self, run)) if special else str(self.call(list(run)))
            for special, run in runs
        )


@dataclass(frozen=True)
class Holder:
    """One request as the pictures see it: its slots in logical order, its tokens, and how many of
    them it reused."""

    look: style.Request
    slots: list[int]
    tokens: list[int]
    reused: int
    row: int | None = None

    @property
    def letter(self) -> str:
        return self.look.letter


def holders(requests: Any, table: Any = None) -> list[Holder]:
    """Requests, given as a list (letters follow the order) or as a dict by letter.

    Each is an object with ``token_ids``, ``computed`` and ``row`` (its slots are read from
    `table`), or simply its list of slots. ``cached_tokens`` or ``reused``, where it has one, tells
    how many tokens it found in the cache.
    """
    if requests is None:
        return []
    pairs = requests.items() if isinstance(requests, Mapping) else enumerate(requests)
    found = []
    for who, item in pairs:
        look = style.request(who)
        if hasattr(item, "token_ids"):
            tokens, row = ints(item.token_ids), getattr(item, "row", None)
            reused = getattr(item, "reused", None) or getattr(item, "cached_tokens", None) or 0
            if row is not None and row and table is not None:
                slots = ints(table.table[row, : item.computed])
            else:
                slots = ints(getattr(item, "slots", None))
            found.append(Holder(look, slots, tokens, int(reused), row))
        else:
            found.append(Holder(look, ints(item), [], 0))
    return found
