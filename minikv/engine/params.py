"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.engine.grammar import check_schema
from minikv.errors import ArgumentError
from minikv.numbers import real, whole

TEXTS = "use a text or a list of non-empty texts"
IDS = "use a list of token ids"
BIAS = "use a mapping from token id to a number between -1e9 and 1e9"
LARGEST = 1e9  # far above any logit, and far below what fp32 holds, however often it is added
INTEGERS: dict[str, tuple[int | None, str]] = {
    "max_tokens": (0, "must be an integer, 0 or more"),
    "top_k": (-1, "must be an integer, -1 or more"),
    "logprobs": (0, "must be None or an integer, 0 or more"),
    "seed": (None, "must be an integer or None"),
    "priority": (None, "must be an integer; higher stays longer"),
}
BOUNDS = {
    "temperature": (0, LARGEST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-LARGEST, LARGEST),
    "frequency_penalty": (-LARGEST, LARGEST),
}


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
        kept: dict[str, Any] = {}  # Python's numbers and tuples in place of what was given
        texts = (self.stop,) if isinstance(self.stop, str) else _all("stop", self.stop, TEXTS)
        if not all(isinstance(text, str) and text for text in texts):
            raise ArgumentError("stop", self.stop, TEXTS)
        ids = _all("stop_token_ids", self.stop_token_ids, IDS)
        kept["stop"] = texts
        kept["stop_token_ids"] = tuple(whole("stop_token_ids", i, remedy=IDS) for i in ids)
        for name, (least, remedy) in INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in ("logprobs", "seed"):
                kept[name] = whole(name, value, least, remedy=remedy)
        for name, (least, most) in BOUNDS.items():
            remedy = f"must be a number between {least:g} and {most:g}"
            kept[name] = real(name, getattr(self, name), least, most, remedy)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ArgumentError("logit_bias", self.logit_bias, BIAS)
            kept["logit_bias"] = {
                whole("logit_bias", token, 0, remedy=BIAS): real(
                    "logit_bias", added, -LARGEST, LARGEST, BIAS
                )
                for token, added in self.logit_bias.items()
            }
        try:
            hash(self.namespace)
        except TypeError:
            raise ArgumentError(
                "namespace", self.namespace, "must be hashable: text, number or tuple"
            ) from None
        if self.json_schema is not None:
            check_schema(self.json_schema)
        for name, value in kept.items():
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


def _all(name: str, values: Any, remedy: str) -> tuple:
    """All of an iterable, which may be one that is used up by it."""
    try:
        return tuple(values)
    except TypeError:
        raise ArgumentError(name, values, remedy) from None
