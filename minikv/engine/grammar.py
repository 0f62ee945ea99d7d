"""Output that keeps to a grammar: before each token, which ones may come next.

A parser follows the output of each request and packs what it allows into one bit per token; the
sampler forbids the rest. The parser and its index over the vocabulary are `llguidance` (Microsoft,
MIT licence), an optional package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from minikv.errors import ArgumentError

INSTALL = "pip install -c constraints.txt -e '.[grammar]'"
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As ``json.dumps`` writes; were spaces free, a model could write them for ever."""


def check_schema(schema: Any) -> str:
    """A JSON schema as text.

    Raises
    ------
    ArgumentError
        For what is no JSON schema at all, or when llguidance is not installed.

    Examples
    --------
    >>> check_schema(3)
    Traceback (most recent call last):
    ...
    minikv.errors.ArgumentError: json_schema=3: give a JSON schema, as a dict or as JSON text
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        good = isinstance(json.loads(text), Mapping)
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise ArgumentError("json_schema", schema, "give a JSON schema, as a dict or as JSON text")
    if find_spec("llguidance") is None:
        raise ArgumentError(
            "json_schema", schema, f"needs the package llguidance; install it with: {INSTALL}"
        )
    return text


class Grammars:
    """Grammars over one model's vocabulary; built when a request first brings one.

    Parameters
    ----------
    tokenizer
        The model's; its stop tokens are allowed where the output may end.
    vocab_size
        Width of the logits. Ids that the tokenizer does not know are never allowed.

    Examples
    --------
    >>> from minikv.models.files.tokenizer import ByteTokenizer
    >>> grammar = Grammars(ByteTokenizer(), 512).start({"enum": [True, None]})
    >>> mask = np.zeros(grammar.words, np.int32)
    >>> grammar.fill(mask)
    >>> [chr(i) for i in range(512) if mask[i // 32] >> (i % 32) & 1]
    ['n', 't']
    >>> [grammar.accept(i) for i in b"true"]
    [False, False, False, True]
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._vocabulary: Any = None
        self._fresh: dict[str, Any] = {}  # schema -> a parser at its start

    def start(self, schema: Any) -> Grammar:
        """A grammar at its beginning, for one request.

        Raises
        ------
        ArgumentError
            For a schema that cannot be satisfied or asks for what the parser does not know.
        """
        text = check_schema(schema)
        from llguidance import LLMatcher

        if text not in self._fresh:
            words = self._words()
            try:
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=SPACING)
                parser = LLMatcher(words, grammar, log_level=0)
                refused = parser.get_error()
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as e:  # a panic of the parser is not even an Exception
                refused = str(e) or type(e).__name__
            if refused:
                raise ArgumentError("json_schema", schema, f"is refused: {refused.splitlines()[0]}")
            if len(self._fresh) >= 64:
                self._fresh.clear()
            self._fresh[text] = parser
        return Grammar(self._fresh[text].deep_copy(), self.vocab_size)

    def _words(self) -> Any:
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            backend = getattr(self.tokenizer, "backend", None)
            if backend is None:
                source = TokenizerWrapper(_Bytes(self.tokenizer, self.vocab_size))
            else:
                source = backend.to_str()
            stops = sorted(self.tokenizer.eos_ids)
            self._vocabulary = LLTokenizer(source, n_vocab=self.vocab_size, eos_token=stops)
        return self._vocabulary


class Grammar:
    """How far one request's output is in its grammar."""

    def __init__(self, parser: Any, vocab_size: int) -> None:
        self._parser, self.words = parser, -(-vocab_size // 32)

    def fill(self, mask: np.ndarray) -> None:
        """Write what may come next into one line of a packed mask, int32 `[words]`."""
        self._parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        """Go on by a token; True when the output ends with it: it is complete, or the parser gave
        up (`error`)."""
        self._parser.consume_token(token)
        return self._parser.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the parser gave up, if it did."""
        why = self._parser.get_error()
        return f"json_schema: {why.splitlines()[0]}" if why else None


class _Bytes:
    """A tokenizer that has no file, as llguidance reads one: the text of every id."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.encode = tokenizer.encode
        self.eos_token_id = min(tokenizer.eos_ids)
        known = range(256, tokenizer.vocab_size)
        texts = [bytes([i]) for i in range(256)]
        texts += [tokenizer.decode([i]).encode() for i in known]
        texts += [b""] * (vocab_size - len(texts))
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text or f"<{i}>".encode() for i, text in enumerate(texts)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self.encode(text)
