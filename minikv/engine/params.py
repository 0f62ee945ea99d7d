"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.engine.grammar import check_schema
from minikv.errors import ArgumentError

LARGEST = 1e9  # far above any logit, and far below what fp32 holds, however often it is added
INTEGERS = {
    "max_tokens": (0, "must be an integer, 0 or more"), "top_k": (-1, "must be an integer, -1 or more"),
    "logprobs": (0, "must be None or an integer, 0 or more"), "seed": (-math.inf, "must be an integer or None"),
    "priority": (-math.inf, "must be an integer; higher stays longer"),
}  # fmt: skip
BOUNDS = {
    "temperature": (0, LARGEST), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-LARGEST, LARGEST), "frequency_penalty": (-LARGEST, LARGEST),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Sampling, stopping and caching choices of one request; checked when built.

    Numbers may be NumPy's or PyTorch's scalars, and `stop` and `stop_token_ids` any iterables; kept
    are Python's numbers, and tuples.

    Parameters
    ----------
    max_tokens
        Most tokens to generate; 0 generates none.
    temperature
        0 takes the first maximum; smaller values sharpen the distribution.
    top_k, top_p, min_p
        Keep the k likeliest tokens (-1 or 0: all); then the likeliest tokens while the probability
        before them is below `top_p` (at least one); then those at least `min_p` times as likely as
        the best. Applied in this order, each to the renormalised distribution that the one before
        left.
    seed
        Any integer; the draw for token i depends on (seed, i) and the logits only. None: the engine
        picks one.
    stop, stop_token_ids, keep_stop, ignore_eos
        Strings and token ids that end the text; `keep_stop` leaves the matched one in it;
        `ignore_eos` runs past eos.
    logprobs
        None: none. n >= 0: the chosen token's log probability and those of the n likeliest, of the
        raw logits.
    logit_bias
        Token id -> number added to its logit.
    presence_penalty, frequency_penalty, repetition_penalty
        Subtracted once, or per occurrence, from tokens of the output; divides (multiplies, when
        negative) the logits of tokens of prompt and output.
    json_schema
        A JSON schema, as a dict or as JSON text: the output is JSON that fits it, written as
        ``json.dumps`` does, and ends with it. (Cut short by `max_tokens`, it is a beginning of such
        JSON.) Needs the package llguidance.
    priority, cache, namespace
        Priority of what this request caches, for an engine with ``eviction="priority"``; whether it
        shares KV through the prefix cache at all; and with whom: equal tokens under different
        namespaces (any hashable) never share.

    Raises
    ------
    ArgumentError
        For a value outside its range, naming it.

    Examples
    --------
    >>> SamplingParams(max_tokens=8, temperature=0).stop
    ()
    >>> SamplingParams(stop="END").stop
    ('END',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ...
    minikv.errors.ArgumentError: top_p=1.5: must be a number between 0 and 1
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    keep_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Any = None
    priority: int = 0
    cache: bool = True
    namespace: Hashable = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        texts = _each(stop, lambda s: s if isinstance(s, str) and s else None)
        self._keep("stop", texts, "use a text or a list of non-empty texts")
        self._keep("stop_token_ids", _each(self.stop_token_ids, integer), "use a list of token ids")
        for name, (least, remedy) in INTEGERS.items():
            value = integer(getattr(self, name))
            if getattr(self, name) is not None or name not in ("logprobs", "seed"):
                self._keep(name, None if value is None or value < least else value, remedy)
        for name, (least, most) in BOUNDS.items():
            value = number(getattr(self, name))
            ok = value is not None and least <= value <= most
            self._keep(
                name, value if ok else None, f"must be a number between {least:g} and {most:g}"
            )
        if self.logit_bias is not None:
            given = (
                self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else [(None, None)]
            )
            bias = {integer(k): number(v) for k, v in given}
            ok = all(
                k is not None and k >= 0 and v is not None and abs(v) <= LARGEST
                for k, v in bias.items()
            )
            remedy = "use a mapping from token id to a number between -1e9 and 1e9"
            self._keep("logit_bias", bias if ok else None, remedy)
        try:
            hash(self.namespace)
        except TypeError:
            raise ArgumentError(
                "namespace", self.namespace, "must be hashable: text, number or tuple"
            ) from None
        if self.json_schema is not None:
            check_schema(self.json_schema)

    def _keep(self, name: str, value: Any, remedy: str) -> None:
        """Replace what was given by what is kept of it; None: it is refused."""
        if value is None:
            raise ArgumentError(name, getattr(self, name), remedy)
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether every token is the first maximum of the (biased, penalised) logits."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits of the next one."""
        spent = self.presence_penalty != 0 or self.frequency_penalty != 0
        return spent or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen from them."""
        return bool(self.logit_bias) or self.penalises


def integer(value: Any) -> int | None:
    """What ``operator.index`` takes, as an int; None for a bool and for what is no integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:  # arrays and tensors refuse in ways of their own
        return None


def number(value: Any) -> float | None:
    """A finite number as a float; None for a bool and for what is no finite number."""
    try:
        return float(value) if not isinstance(value, bool) and math.isfinite(value) else None
    except Exception:
        return None


def _each(values: Any, convert: Callable[[Any], Any]) -> tuple | None:
    """All of an iterable, which may be one that is used up by it; None where it is none, or one of
    them is refused."""
    try:
        items = iter(values)
    except TypeError:
        return None
    made = tuple(map(convert, items))
    return None if None in made else made
