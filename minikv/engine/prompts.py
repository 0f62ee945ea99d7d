"""What callers may pass as prompts, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from minikv.errors import ArgumentError, Error
from minikv.numbers import is_id

if TYPE_CHECKING:
    from minikv.models import Tokenizer

REMEDY = "use a text, a list of token ids, or a list of chat messages (dicts with role and content)"
BYTES = (bytes, bytearray, memoryview)  # neither a text nor ids: which of the two is meant?


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


def prompt_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
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
