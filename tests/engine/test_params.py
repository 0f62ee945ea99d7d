"""SamplingParams: what is accepted, and what is refused by name."""

from __future__ import annotations

import math

import pytest

from minikv import Error
from minikv.engine import SamplingParams, grammar
from minikv.engine.prompts import prompt_ids, split_prompts


def test_defaults_are_the_documented_ones():
    p = SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (16, 1.0, -1, 1.0, 0.0, None)
    assert (p.stop, p.stop_token_ids, p.keep_stop, p.ignore_eos, p.logprobs) == ((), (), False, False, None)
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


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, Error)


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
        assert split_prompts(raw) == [raw], "one prompt, which is refused: it is neither text nor ids"


class Fake:
    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        return [len(m["content"]) for m in messages]


BAD_PROMPTS = [None, 3, [1.5], [1, "a"], [True], [-1], [512], [10**30], [[1]], [{"role": "user"}], b"x"]
BAD_PROMPTS += [bytearray(b"x"), memoryview(b"x"), [b"x"]]


@pytest.mark.parametrize("bad", BAD_PROMPTS)
def test_bad_prompts_raise_one_kind_of_error(bad):
    with pytest.raises(ValueError, match="prompt"):
        prompt_ids(bad, Fake(), 512)


def test_numpy_seeds_and_odd_priorities() -> None:
    import numpy as np

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
