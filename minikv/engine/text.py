"""Text to tokens, and tokens to text, piece by piece.

No half character and no stop string comes out, and nothing is held back for ever.

A token may hold part of a UTF-8 character, so token texts cannot simply be joined. A short window
of recent tokens is decoded at each step; what an unfinished character shows at its end (U+FFFD, at
most three of them) is held back, and only characters past those already sent are sent, even when
the decoded text shrinks in between. The window is cut back to its last few tokens when it gets
long: UTF-8 finds its character borders again, so the work per step is bounded whatever the bytes
are. Windowed decoding is how text-generation-inference and vLLM do it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minikv.errors import ArgumentError, Error
from minikv.numbers import is_id

REMEDY = "use a text, a list of token ids, or a list of chat messages (dicts with role and content)"
BYTES = (bytes, bytearray, memoryview)  # neither a text nor ids: which of the two is meant?
UNFINISHED = "\ufffd"
MAX_HELD = 3  # a UTF-8 character has at most three bytes before its last one
KEEP, WINDOW = 8, 24  # tokens kept when the window is cut, and its longest length


def split_prompts(prompts: Any) -> list[Any]:
    """One entry per prompt: a text, a list of ids or a chat (a list of messages) is one prompt, a
    list of those many.

    Examples
    --------
    >>> split_prompts("hi"), split_prompts([1, 2]), split_prompts([[1], "hi", []])
    (['hi'], [[1, 2]], [[1], 'hi', []])
    >>> split_prompts([{"role": "user", "content": "hi"}])
    [[{'role': 'user', 'content': 'hi'}]]
    """
    if isinstance(prompts, (str, Mapping, *BYTES)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    if hasattr(prompts, "ndim"):  # an array or tensor: ids of one prompt, or one row each
        return [prompts] if prompts.ndim < 2 else list(prompts)
    prompts = list(prompts)
    if prompts and (isinstance(prompts[0], Mapping) or is_id(prompts[0])):
        return [prompts]
    return prompts


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Token ids of one prompt, int64 `[n]`; n may be 0.

    Raises
    ------
    ArgumentError
        For anything that is no prompt, and for ids outside the vocabulary.
    """
    try:
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            ids = tokenizer.chat(list(prompt))
        else:
            as_list = getattr(prompt, "tolist", None)  # arrays and tensors
            if as_list is None and not hasattr(prompt, "__iter__"):
                raise ArgumentError("prompt", prompt, REMEDY)
            ids = list(prompt) if as_list is None else as_list()
            if isinstance(prompt, (Mapping, *BYTES)) or not all(map(is_id, ids)):
                raise ArgumentError("prompt", prompt, REMEDY)
        array = np.array(ids, dtype=np.int64)
    except Error:
        raise
    except Exception as e:  # a tokenizer or a chat template failed
        why = f"could not be turned into tokens: {type(e).__name__}: {e}"
        raise ArgumentError("prompt", prompt, why) from e
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        remedy = f"is outside the vocabulary; ids are 0..{vocab_size - 1}"
        raise ArgumentError("prompt", int(outside[0]), remedy)
    return array


class TextStream:
    """The text of one request.

    Parameters
    ----------
    tokenizer
        Anything with ``decode(ids) -> str``; None makes no text.
    stop
        Texts that end the output. The one that is complete first wins (of two complete at the same
        character, the longer), so the result does not depend on how the text is cut into tokens.
        A special token has no text; a stop text that is one ends the output at that token.
    keep_stop
        Leave the stop text in.

    Attributes
    ----------
    text
        Everything given out so far.
    stopped
        Whether a stop text ended the output.

    Examples
    --------
    >>> class Letters:
    ...     def decode(self, ids): return bytes(ids).decode("utf-8", "replace")
    >>> s = TextStream(Letters(), stop=["END"])
    >>> s.push(list(b"aE")), s.push(list(b"NDx")), s.stopped
    ('a', '', True)
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), keep_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._longest = max(map(len, self._stop), default=0)
        self._specials: Mapping[int, str] = getattr(tokenizer, "specials", {})
        ids = {name: i for i, name in self._specials.items() if name in self._stop}
        self._ends = {i for name, i in ids.items() if i in tokenizer.encode(name)}
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that have left it
        self._held = ""  # whole characters that may be the beginning of a stop text
        self.text, self.stopped = "", False

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """Take new tokens, give out the text that is certain. `final` flushes what is held back."""
        if self.stopped or self._tokenizer is None:
            return ""
        ids = list(ids)
        end = next((i for i in ids if i in self._ends), None)
        if end is not None:
            ids, final = ids[: ids.index(end)], True
        out = self._characters(ids, final)
        if self._stop:
            out = self._until_stop(out, final)
        if end is not None and not self.stopped:
            self.stopped = True
            out += self._specials[end] if self._keep_stop else ""
        self.text += out
        return out

    def _characters(self, ids: list[int], final: bool) -> str:
        self._window += [i for i in ids if i not in self._specials]  # the window holds what shows
        text = self._tokenizer.decode(self._window)
        end = len(text)
        while not final and len(text) - end < MAX_HELD and text.endswith(UNFINISHED, 0, end):
            end -= 1
        fresh = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._window) > WINDOW:
            unsent = max(0, len(text) - self._sent)
            self._window = self._window[-KEEP:]
            self._sent = max(0, len(self._tokenizer.decode(self._window)) - unsent)
        return fresh

    def _until_stop(self, fresh: str, final: bool) -> str:
        # Only `_held` can begin a stop text that ends in `fresh`: anything longer would have been
        # found before.
        text = self._held + fresh
        hits = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if hits:
            end, start = min(hits)
            self.stopped, self._held = True, ""
            return text[: end if self._keep_stop else start]
        whole = len(text)  # characters that begin no stop text
        if not final:
            whole = max(0, whole - self._longest + 1)
            while whole < len(text) and not any(s.startswith(text[whole:]) for s in self._stop):
                whole += 1
        self._held = text[whole:]
        return text[:whole]
