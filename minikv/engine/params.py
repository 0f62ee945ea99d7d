"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.engine.grammar import check_schema
from minikv.errors import ArgumentError

LARGEST = 1e9  # far above any logit, and far below what fp32 holds, however often it is added
BOUNDS = {
    "temperature": (0, LARGEST), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-LARGEST, LARGEST), "frequency_penalty": (-LARGEST, LARGEST),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Sampling, stopping and caching choices of one request; checked when built.

    Parameters
    ----------
    max_tokens
        Most tokens to generate; 0 generates none.
    temperature
        0 takes the first maximum; smaller values sharpen the distribution.
    top_k, top_p, min_p
        Keep the k likeliest tokens (-1 or 0: all); then the likeliest tokens while the probability before them is below
        `top_p` (at least one); then those at least `min_p` times as likely as the best. Applied in this order, each
        to the renormalised distribution that the one before left.
    seed
        Any integer; the draw for token i depends on (seed, i) and the logits only. None: the engine picks one.
    stop, stop_token_ids, keep_stop, ignore_eos
        Strings and token ids that end the text; `keep_stop` leaves the matched one in it; `ignore_eos` runs past eos.
    logprobs
        None: none. n >= 0: the chosen token's log probability and those of the n likeliest, of the raw logits.
    logit_bias
        Token id -> number added to its logit.
    presence_penalty, frequency_penalty, repetition_penalty
        Subtracted once, or per occurrence, from tokens of the output; divides (multiplies, when negative) the logits of
        tokens of prompt and output.
    json_schema
        A JSON schema, as a dict or as JSON text: the output is JSON that fits it, written as ``json.dumps`` does, and
        ends with it. (Cut short by `max_tokens`, it is a beginning of such JSON.) Needs the package llguidance.
    priority, cache, namespace
        Eviction priority of what this request caches; whether it shares KV through the prefix cache at all; and with
        whom: equal tokens under different namespaces (any hashable) never share.

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
    minikv.errors.ArgumentError: top_p=1.5: must lie between 0 and 1
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
        good = _all(stop, lambda s: isinstance(s, str) and s != "")
        _check("stop", stop, good, "use a text or a list of non-empty texts")
        ids = self.stop_token_ids
        _check("stop_token_ids", ids, _all(ids, _is_int), "use a list of token ids")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
        for name, least in (("max_tokens", 0), ("top_k", -1), ("logprobs", 0)):
            value = getattr(self, name)
            ok = (name == "logprobs" and value is None) or (_is_int(value) and int(value) >= least)
            _check(name, value, ok, f"must be an integer, {least} or more")
        _check("seed", self.seed, self.seed is None or _is_int(self.seed), "must be an integer or None")
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))
        _check("priority", self.priority, _is_int(self.priority), "must be an integer; higher stays longer")
        object.__setattr__(self, "priority", int(self.priority))
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            ok = _is_finite(value) and least <= value <= most
            _check(name, value, ok, f"must lie between {least:g} and {most:g}")
        bias = self.logit_bias or {}
        ok = isinstance(bias, Mapping) and all(
            _is_int(k) and k >= 0 and _is_finite(v) and abs(v) <= LARGEST for k, v in bias.items()
        )
        _check("logit_bias", bias, ok, "use a mapping from token id to a number between -1e9 and 1e9")
        try:
            hash(self.namespace)
        except TypeError:
            raise ArgumentError("namespace", self.namespace, "must be hashable: text, number or tuple") from None
        if self.json_schema is not None:
            check_schema(self.json_schema)

    @property
    def greedy(self) -> bool:
        """Whether every token is the first maximum of the (biased, penalised) logits."""
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen from them."""
        return bool(
            self.logit_bias or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _all(values: Any, good: Any) -> bool:
    try:
        return all(good(v) for v in values)
    except TypeError:
        return False


def _check(name: str, value: object, ok: bool, remedy: str) -> None:
    if not ok:
        raise ArgumentError(name, value, remedy)
