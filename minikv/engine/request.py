"""What travels through the engine: a request inside, deltas and an output outside."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from minikv.engine.params import SamplingParams
from minikv.engine.text import TextStream
from minikv.errors import ArgumentError

BROKEN = "the model's logits hold no finite maximum (NaN or infinity)"


class State(Enum):
    """What a request needs next. Stored, never worked out from token counts: a retracted request
    has output tokens and yet must be prefilled again."""

    WAITING = "waiting"  # holds nothing; next: be admitted, its tokens matched and prefilled
    PREFILL = (
        "prefill"  # holds a row and `computed` tokens of K/V; next: compute some of the others
    )
    RUNNING = "running"  # all but its last token have K/V; next: decode that one
    FINISHED = "finished"  # holds nothing


@dataclass
class Moments:
    """Moments of one request, in seconds of a monotonic clock; None until they happen."""

    queued: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from `add` to the first admission."""
        return None if self.admitted is None else self.admitted - self.queued

    @property
    def ttft(self) -> float | None:
        """Seconds from `add` to the first token."""
        return None if self.first_token is None else self.first_token - self.queued

    def per_token(self, tokens: int) -> float | None:
        """Mean seconds between `tokens` tokens; None with fewer than two."""
        if tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)


@dataclass
class Timing(Moments):
    """The moments of a request that the engine itself ran, and how many tokens it got."""

    queued: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
        return self.per_token(self.tokens)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a chosen token, and of the likeliest ones (best first), under the raw
    logits."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class Output:
    """What `generate` returns for one prompt."""

    id: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Delta:
    """News of one request: text and tokens since its last delta. The last has a `finish_reason` and
    the `output`."""

    id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: Output | None = None


class Request:
    """One prompt on its way to an output.

    The tokens of prompt and output lie in `tokens`, one int64 array that is allocated once; drafts
    follow them, then -1. `token_ids` is a view of its known part. `computed` tokens have K/V in
    the pool, through table line `row`; the first `protected_len` of them are owned by the prefix
    tree, whose node `node` is locked for this request.

    Parameters
    ----------
    id
        A number that no other live request has.
    prompt
        Token ids, at least one.
    params
        Sampling and stopping.
    stop_ids
        Token ids that end the text: eos and `params.stop_token_ids`.
    max_length
        Most tokens of prompt and output together (context length + 1: the last token needs no K/V).
    grammar, text
        The rules that the output keeps, and the stream that makes its text; None: neither rules,
        nor texts that end it.
    """

    def __init__(
        self,
        id: int,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams,
        stop_ids: frozenset[int] = frozenset(),
        max_length: int = 1 << 31,
        grammar: Any = None,
        text: TextStream | None = None,
    ) -> None:
        if len(prompt) == 0:
            raise ArgumentError("prompt", [], "is empty; give at least one token")
        self.id, self.params, self.stop_ids = id, params, stop_ids
        self.prompt_len = self.length = len(prompt)
        self.capacity = max(self.length, min(self.length + params.max_tokens, max_length))
        self.tokens = np.full(self.capacity, -1, np.int64)
        self.tokens[: self.length] = prompt
        self.drafts = 0  # tokens after the last one that are guesses, to be verified by a step
        self.state = State.WAITING
        self.computed, self.row, self.node, self.protected_len = 0, 0, None, 0
        self.namespace: Hashable = params.namespace
        self.cache, self.priority = params.cache, params.priority
        self.probe: tuple | None = None  # what the scheduler last found of it in the prefix cache
        self.arrival = self.admission = -1  # order numbers given by the scheduler
        self.cached_tokens: int | None = None  # found in the prefix cache at the first admission
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.timing = Timing()
        self.seed = 0 if params.seed is None else params.seed
        self.grammar = grammar
        self.penalised = params.penalises
        self.level: int | None = None  # the first of the sampler's variants that serves it
        self.sink: deque[Delta] | None = (
            None  # where its deltas go; None: only the output is wanted
        )
        self._text = text or TextStream(None)
        self._read = self._told = 0  # output tokens that have become text, and that deltas brought
        self._shown = 0  # characters that deltas brought

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and output so far, int64 `[length]`; a view."""
        return self.tokens[: self.length]

    @property
    def output_ids(self) -> np.ndarray:
        """Output so far, int64; a view."""
        return self.tokens[self.prompt_len : self.length]

    @property
    def last_token(self) -> int:
        """The newest token, which has no K/V yet while the request is running."""
        return int(self.tokens[self.length - 1])

    def draft(self, tokens: Sequence[int]) -> None:
        """Guess the tokens after the last one; the next step computes them all. Those that could
        not be kept anyway are left out."""
        self.drafts = max(0, min(len(tokens), self.capacity - self.length - 1))
        self.tokens[self.length : self.length + self.drafts] = tokens[: self.drafts]

    def drop_drafts(self) -> None:
        """Forget the guesses that were not verified."""
        self.tokens[self.length : self.length + self.drafts] = -1
        self.drafts = 0

    def extend(self, tokens: Iterable[int]) -> str | None:
        """Add the tokens that a step chose, up to the first that ends the output.

        Parameters
        ----------
        tokens
            Token ids in order; -1 stands for logits that hold no finite maximum, and ends them.

        Returns
        -------
        str or None
            ``"stop"``, ``"length"`` or ``"error"`` (`error` says which) when the output ended.
        """
        if self.drafts:
            self.drop_drafts()
        timing, now = self.timing, time.perf_counter()
        reason = None
        for token in tokens:
            if token < 0:
                self.cache = False  # K/V behind broken logits must not be shared
                reason, self.error = "error", BROKEN
                break
            self.tokens[self.length] = token
            self.length += 1
            timing.tokens += 1
            timing.first_token = timing.first_token or now
            timing.last_token = now
            if self.grammar is not None and self.grammar.accept(token):
                self.error = self.grammar.error
                reason = "stop" if self.error is None else "error"
            elif token in self.stop_ids:
                reason = "stop"
            elif self.length == self.capacity:
                reason = "length"
            if self.params.stop or self.sink is not None:
                self._read_text(reason)
                if self._text.stopped:
                    reason = "stop"
            if reason is not None:
                break
        self.computed = min(self.computed, self.length - 1)  # the last token has no K/V
        return reason

    def _read_text(self, reason: str | None) -> None:
        """Make text of the tokens that have none; `reason` says how the output ended, if it did."""
        new = self.output_ids[self._read :].tolist()
        self._read += len(new)
        if new and reason == "stop" and new[-1] in self.stop_ids and not self.params.keep_stop:
            new.pop()  # eos or a stop token is part of the tokens, not of the text
        self._text.push(new, final=reason is not None)

    def delta(self) -> Delta:
        """Text and tokens since the last one; the last of all brings the output."""
        output = None
        if self.finish_reason is not None:
            output = self.output()
        new, text = self.output_ids[self._told :].tolist(), self._text.text[self._shown :]
        self._told += len(new)
        self._shown += len(text)
        return Delta(self.id, text, new, self.finish_reason, output)

    def output(self) -> Output:
        """The result of a request that has ended, as the caller sees it."""
        try:
            self._read_text(self.finish_reason)
        except Exception as e:  # the tokenizer failed
            self.finish_reason, self.error = "error", f"{type(e).__name__}: {e}"
        return Output(
            id=self.id,
            prompt_token_ids=self.tokens[: self.prompt_len].tolist(),
            text=self._text.text,
            token_ids=self.output_ids.tolist(),
            cached_tokens=self.cached_tokens or 0,
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=self.logprobs,
            timing=self.timing,
        )

    def __repr__(self) -> str:
        tokens = f"{self.length} tokens, {self.computed} computed"
        return f"Request({self.id}, {self.state.value}, {tokens})"
