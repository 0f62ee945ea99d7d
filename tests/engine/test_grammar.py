"""Output that keeps to a JSON schema: it always parses, ends with the grammar, and leaves other
requests alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds import give_graphs

from minikv import LLM, SamplingParams, models
from minikv.engine import grammar
from minikv.errors import ArgumentError, StateError
from minikv.models.files.download import model_path

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"enum": ["yes", "no", 7, None]},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,4}$"}]},
]
FREE = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)


def ruled(schema, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80, "temperature": 0, "json_schema": schema, **options})


def check(out, schema) -> None:
    assert (out.finish_reason, out.error) == ("stop", None)
    value = json.loads(out.text)
    jsonschema.validate(value, schema)
    assert out.text == json.dumps(value, ensure_ascii=False) or "\\" in out.text, (
        "spaced as json.dumps does"
    )


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", device="cpu", kv_tokens=1024, page_size=4, max_requests=8)


@pytest.fixture(scope="module")
def smollm2(model_file) -> LLM:
    return LLM(
        "smollm2-135m",
        device="cpu",
        dtype="float32",
        kv_tokens=2048,
        max_requests=8,
        progress=False,
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_smollm2_writes_json_that_fits_the_schema(smollm2, temperature) -> None:
    prompts = [
        [{"role": "user", "content": "Describe a person as JSON."}],
        "Are there clouds today? JSON:",
        [{"role": "user", "content": "Yes or no?"}],
        "A two-digit number:",
        "def f(x):\n    return {",
    ]
    params = [ruled(s, temperature=temperature, seed=i) for i, s in enumerate(SCHEMAS)]
    for prompt, out, schema in zip(
        prompts, smollm2.generate(prompts, params), SCHEMAS, strict=True
    ):
        print(repr(prompt), "->", out.text)
        check(out, schema)
    smollm2.cache.check(owned=())


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_random_weights_write_json_too(tiny, temperature) -> None:
    for seed in range(3):
        params = [ruled(s, temperature=temperature, seed=seed) for s in SCHEMAS]
        for out, schema in zip(
            tiny.generate(["a", "b", "c", "d", "e"], params), SCHEMAS, strict=True
        ):
            check(out, schema)


def test_other_requests_of_the_batch_are_left_alone(tiny) -> None:
    params = [
        FREE,
        ruled(PERSON, seed=1, temperature=1),
        SamplingParams(max_tokens=20, temperature=0, logprobs=1),
    ]
    prompts = ["abc", "def", "ghi"]
    want = [tiny.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    got = tiny.generate(prompts, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    check(got[1], PERSON)


def test_a_schema_goes_with_biases_penalties_and_logprobs(tiny) -> None:
    seven = dict.fromkeys(tiny.tokenizer.encode("7"), 50.0)
    [out] = tiny.generate(
        "x", ruled({"type": "integer", "minimum": 0, "maximum": 999}, logit_bias=seven)
    )
    assert out.text == "777"
    [out] = tiny.generate("x", ruled(PERSON, temperature=1, frequency_penalty=0.5, logprobs=2))
    check(out, PERSON)
    assert [t.token_id for t in out.logprobs] == out.token_ids
    assert all(len(t.top) == 2 for t in out.logprobs)


def test_it_streams_and_survives_retraction() -> None:
    small = LLM("tiny", device="cpu", kv_tokens=80, page_size=4, max_requests=4)
    assert (
        "".join(d.text for d in small.stream("q", ruled(PERSON)))
        == small.generate("q", ruled(PERSON))[0].text
    )
    params = [ruled(PERSON, seed=i, temperature=1) for i in range(4)]
    want = [small.generate(f"{i}", p)[0].text for i, p in enumerate(params)]
    outs = small.generate([f"{i}" for i in range(4)], params)
    assert small.stats().retractions > 0
    assert [o.text for o in outs] == want
    for out in outs:
        check(out, PERSON)


def test_where_the_output_may_end_a_stop_token_ends_it(tiny) -> None:
    number = {"type": "integer", "minimum": 1}
    stop = dict.fromkeys(tiny.tokenizer.eos_ids, 100.0)
    for ignore_eos in (False, True):
        [out] = tiny.generate("x", ruled(number, logit_bias=stop, ignore_eos=ignore_eos))
        assert out.finish_reason == "stop"
        assert len(out.token_ids) == 2, "a digit, since nothing is no number, and the stop token"
        assert out.text in "123456789"
    [out] = tiny.generate("x", ruled(PERSON, max_tokens=5))
    assert (out.finish_reason, out.text) == ("length", '{"nam'), "cut short"


def test_schemas_as_text_and_as_dict_are_the_same(tiny) -> None:
    a, b = tiny.generate(["x", "x"], [ruled(PERSON), ruled(json.dumps(PERSON))])
    assert a.text == b.text
    assert len(tiny.grammars._fresh) <= 64
    for n in range(70):
        tiny.grammars.start({"const": n})
    assert len(tiny.grammars._fresh) <= 64


BAD = [{"type": "foo"}, {"type": "integer", "minimum": 5, "maximum": 3}, {"$ref": "#/nowhere"}]


@pytest.mark.parametrize("schema", BAD, ids=str)
def test_a_schema_that_nothing_can_fit_is_an_error_of_its_request(tiny, schema) -> None:
    good, bad = tiny.generate(["a", "b"], [FREE, ruled(schema)])
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert bad.error.startswith("json_schema=")
    with pytest.raises(ArgumentError, match="json_schema"):
        tiny.add("b", ruled(schema))


REFUSED = [
    {"minimum": float("nan")},
    {"type": "integer", "minimum": float("inf")},
    {"type": "string", "pattern": "("},
    {"$ref": "#/nowhere"},
    {"type": "string", "const": "\ud800"},
    '{"type": "string", "minLength": -1}',
    '{"type": "\ud800"}',
]


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_a_schema_that_the_library_refuses_is_an_error_of_its_request(tiny, schema) -> None:
    good, bad = tiny.generate(["a", "b"], [FREE, SamplingParams(json_schema=schema)])
    assert (good.finish_reason, len(good.token_ids)) == ("length", 20)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "json_schema" in bad.error
    for take in (tiny.add, tiny.stream):
        with pytest.raises(ArgumentError, match="json_schema"):
            take("b", SamplingParams(json_schema=schema))
    assert not tiny.has_work


def test_a_panic_of_the_library_is_an_error_of_its_request(tiny, monkeypatch) -> None:
    class Panic(BaseException):  # as Rust code raises it
        pass

    def panic(*args, **options):
        raise Panic

    monkeypatch.setattr("llguidance.LLMatcher.grammar_from_json_schema", panic)
    good, bad = tiny.generate(["a", "b"], [FREE, ruled({"maxLength": 77})])
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert "Panic" in bad.error


def test_a_parser_that_gives_up_ends_its_request_only(tiny, monkeypatch) -> None:
    start = tiny.grammars.start

    def limited(schema):
        made = start(schema)
        made._parser.consume_token(0)  # no JSON begins so
        return made

    monkeypatch.setattr(tiny.grammars, "start", limited)
    good, bad = tiny.generate(["a", "b"], [FREE, ruled(PERSON)])
    assert good.finish_reason == "length"
    assert bad.finish_reason == "error"
    assert "json_schema" in bad.error
    tiny.cache.check(owned=())


def test_masks_allow_known_tokens_only() -> None:
    tokenizer = models.load("tiny", device="cpu", progress=False).tokenizer
    vocab = tokenizer.vocab_size + 50  # a model may have more logits than its tokenizer has tokens
    made = grammar.Grammars(tokenizer, vocab).start({"type": "string", "maxLength": 3})
    mask = np.empty(made.words, np.int32)
    made.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits.nonzero()[0].tolist() == [ord('"')]
    assert not made.accept(ord('"'))
    made.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[ord("a")] == 1
    assert not bits[tokenizer.vocab_size :].any()
    assert not bits[[256, 257, 258, 259, ord("\n")]].any()
    for letter in b"abc":
        assert not made.accept(letter)
    assert made.accept(ord('"'))
    assert made.error is None


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_keep_to_the_schema(device, temperature) -> None:
    name = "tiny"
    if device == "cuda":
        try:
            model_path(progress=False)
            name = "smollm2-135m"
        except StateError:
            pass
    options = {
        "device": device,
        "dtype": "float32",
        "kv_tokens": 2048,
        "max_requests": 8,
        "progress": False,
    }
    eager, graphed = (LLM(name, graphs=False, **options) for _ in range(2))
    runner = give_graphs(graphed, [1, 2, 4, 8], device)
    params = [ruled(s, temperature=temperature, seed=i) for i, s in enumerate(SCHEMAS)]
    prompts = ["A person:", "Are there clouds?", "Yes or no?", "A number:", "return"]
    want, got = (
        [*llm.generate(prompts, params), *llm.generate("free", FREE)] for llm in (eager, graphed)
    )
    for out, schema in zip(got, SCHEMAS, strict=False):
        print(out.text)
        check(out, schema)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert runner.stats.eager == 0
    assert {v for v, _ in runner.graphs} == {"greedy", "sampled", "grammar"}
