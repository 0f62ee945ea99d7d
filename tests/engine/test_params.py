"""SamplingParams: what is accepted, and what is refused by name."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch

from minikv import Error
from minikv.engine import SamplingParams, grammar
from minikv.engine.text import prompt_ids, split_prompts
from minikv.errors import ArgumentError


def test_defaults_are_the_documented_ones():
    p = SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (
        16,
        1.0,
        -1,
        1.0,
        0.0,
        None,
    )
    assert (p.stop, p.stop_token_ids, p.keep_stop, p.ignore_eos, p.logprobs) == (
        (),
        (),
        False,
        False,
        None,
    )
    assert (p.repetition_penalty, p.priority, p.cache, p.namespace) == (1.0, 0, True, None)


BAD = {
    "max_tokens": [-1, 1.5, None],
    "temperature": [-0.1, math.nan, "hot"],
    "top_k": [-2, 0.5],
    "top_p": [-0.1, 1.1],
    "min_p": [2],
    "seed": [1.5],
    "stop": [("",), (1,), 3],
    "stop_token_ids": [("a",), 7],
    "logprobs": [-1],
    "logit_bias": [{"a": 1.0}, {1: math.inf}, [1]],
    "presence_penalty": [math.inf, -1e39, 1e10, "a", None],
    "frequency_penalty": [-3e38, math.nan],
    "repetition_penalty": [0],
    "namespace": [[]],
    "json_schema": [3, [], "{", "[]", {"a": {1, 2}}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, Error)


NUMBERS = ("max_tokens", "top_k", "logprobs", "seed", "priority", "temperature", "top_p", "min_p")
NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_numpys_and_pytorchs_scalars_but_no_arrays(name):
    plain = type(getattr(SamplingParams(logprobs=0, seed=0), name))
    for one in (1, np.int8(1), np.array(1), torch.tensor(1)):
        kept = getattr(SamplingParams(**{name: one}), name)
        assert (kept, type(kept)) == (1, plain)
    if plain is float:
        assert getattr(SamplingParams(**{name: np.float32(0.5)}), name) == 0.5
    for bad in (
        True,
        "1",
        1j,
        np.array([1, 2]),
        *map(torch.tensor, ([1, 2], [1.0, 2.0], math.nan)),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}="):
            SamplingParams(**{name: bad})


def test_stops_may_be_any_iterables():
    for ids in (
        iter([3, 4]),
        (i for i in (3, 4)),
        {3: 0, 4: 0},
        range(3, 5),
        np.array([3, 4]),
        torch.tensor([3, 4]),
    ):
        kept = SamplingParams(stop_token_ids=ids).stop_token_ids
        assert (kept, {type(i) for i in kept}) == ((3, 4), {int})
    assert SamplingParams(stop=(s for s in ["a", "b"])).stop == ("a", "b")
    assert SamplingParams(stop=iter([])).stop == ()
    for name, bad in (
        ("stop", iter(["a", ""])),
        ("stop_token_ids", iter([1, 1.5])),
        ("stop_token_ids", [True]),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}="):
            SamplingParams(**{name: bad})


def test_a_bias_is_copied_as_plain_numbers():
    given = UserDict({np.int64(3): np.float32(0.5), torch.tensor(4): -1})
    kept = SamplingParams(logit_bias=given).logit_bias
    given.clear()
    assert kept == {3: 0.5, 4: -1.0}
    assert {(type(k), type(v)) for k, v in kept.items()} == {(int, float)}
    for bad in (np.array([1, 2]), [], 0, {-1: 0.0}, {True: 0.0}, {1: torch.tensor([1.0, 2.0])}):
        with pytest.raises(ArgumentError, match=r"^logit_bias="):
            SamplingParams(logit_bias=bad)


def test_prompt_forms():
    chat = [{"role": "user", "content": "hi"}]
    assert split_prompts("a") == ["a"]
    assert split_prompts([3, 4]) == [[3, 4]]
    assert split_prompts(chat) == [chat]
    assert split_prompts([[3], "a", chat, []]) == [[3], "a", chat, []]
    assert split_prompts([]) == []
    assert split_prompts([[]]) == [[]]
    assert split_prompts(None) == [None]
    for raw in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert split_prompts(raw) == [raw], (
            "one prompt, which is refused: it is neither text nor ids"
        )


class Fake:
    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        return [len(m["content"]) for m in messages]


BAD_PROMPTS = [
    None,
    3,
    [1.5],
    [1, "a"],
    [True],
    [-1],
    [512],
    [10**30],
    [[1]],
    [{"role": "user"}],
    b"x",
]
BAD_PROMPTS += [bytearray(b"x"), memoryview(b"x"), [b"x"]]


@pytest.mark.parametrize("bad", BAD_PROMPTS)
def test_bad_prompts_raise_one_kind_of_error(bad):
    with pytest.raises(ValueError, match="prompt"):
        prompt_ids(bad, Fake(), 512)


def test_numpy_seeds_and_odd_priorities() -> None:
    assert type(SamplingParams(seed=np.int64(3)).seed) is int
    for bad in (None, "a", 1.5):
        with pytest.raises(Error, match="priority"):
            SamplingParams(priority=bad)
    with pytest.raises(Error, match="logit_bias"):
        SamplingParams(logit_bias={1: 1e39})
    with pytest.raises(Error, match="temperature"):
        SamplingParams(temperature=10**400)


def test_without_llguidance_the_install_command_is_named(monkeypatch) -> None:
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    with pytest.raises(Error, match=r"json_schema.*llguidance.*pip install .*\[grammar\]"):
        SamplingParams(json_schema={"type": "object"})
    assert SamplingParams(temperature=1).json_schema is None
