"""What users found in folders, tokenizers and chat templates, each under its number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import INDEX, tensors, write_json
from safetensors.torch import save_file
from small_folder import CONFIG, engine, logits, read, their_logits, write
from tokenizer_kinds import size_of, special_tokens, tokenizer_json

from minikv import SamplingParams
from minikv.engine import TextStream
from minikv.errors import ArgumentError
from minikv.models.files.tokenizer import ByteTokenizer, FileTokenizer
from minikv.viz.live import Texts

pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CHAT = [{"role": "user", "content": "hello"}]


def test_n01_truncation_and_padding_of_a_tokenizer_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    before = FileTokenizer.from_folder(tmp_path, [])
    text = "page " * 65
    whole = before.encode(text)
    assert len(whole) == 132
    made = tokenizer_json("llama3")
    made["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    made["padding"] = {
        "strategy": {"Fixed": 200},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end_of_text|>",
    }
    write_json(tmp_path / "tokenizer.json", made)
    after = FileTokenizer.from_folder(tmp_path, [])
    assert after.encode(text) == whole
    long = [{"role": "user", "content": text}]
    assert after.chat(long) == before.chat(long)


@pytest.mark.parametrize("kind", ["fallback", "metaspace", "llama3"])
@pytest.mark.parametrize("text", ["漢字", "👍🏽", "❤️"])
def test_n02_characters_of_several_byte_tokens_are_streamed(
    kind: str, text: str, tmp_path: Path
) -> None:
    tokenizer = FileTokenizer.from_folder(write(tmp_path, kind), [])
    ids = tokenizer.encode(text)
    assert len(ids) >= len(text.encode())
    for options in ({}, {"stop": ["no such text"]}):
        for cut in range(1, len(ids) + 1):
            stream = TextStream(tokenizer, **options)
            out = "".join(stream.push([i], final=n == cut - 1) for n, i in enumerate(ids[:cut]))
            assert out == stream.text == tokenizer.decode(ids[:cut])
            assert text.startswith(out.rstrip("\ufffd"))
            assert out.count("\ufffd") <= 1
        assert out == text


@pytest.mark.parametrize("kind", ["fallback", "metaspace", "llama3"])
def test_n02_streamed_text_is_generated_text_wherever_it_ends(kind: str, tmp_path: Path) -> None:
    tokenizer = FileTokenizer.from_folder(write(tmp_path, kind), [])
    llm = engine(tmp_path)
    # So that whole characters are drawn, and texts that end inside one.
    bias = dict.fromkeys(tokenizer.encode("漢x")[-4:], 30.0)
    for seed in range(12):
        for stop in ((), ("no such text",)):
            params = SamplingParams(
                max_tokens=10 + seed % 5, seed=seed, logit_bias=bias, stop=stop, ignore_eos=True
            )
            [out] = llm.generate([5, 6, 7], params)
            assert out.text == tokenizer.decode(out.token_ids)
            assert "".join(d.text for d in llm.stream([5, 6, 7], params)) == out.text


def test_n04_special_tokens_of_the_settings_alone(tmp_path: Path) -> None:
    write(tmp_path)
    made = tokenizer_json("llama3", specials=False)
    write_json(tmp_path / "tokenizer.json", made)
    base = size_of("llama3")
    listed = {
        str(base + i): {"content": text, "special": True, "normalized": False}
        for i, text in enumerate(special_tokens("llama3"))
    }
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    settings = names | {"added_tokens_decoder": listed, "tokenizer_class": "LlamaTokenizerFast"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    tokenizer = read(tmp_path).tokenizer
    assert tokenizer.encode("<|eot_id|>") == [base + 2]
    assert tokenizer.decode([base + 2]) == ""
    assert tokenizer.eos_ids == {2, base + 2}


def test_n05_names_of_the_special_tokens_map_alone(tmp_path: Path) -> None:
    write(tmp_path, settings={"chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    for names in (
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": {"content": "<|eot_id|>"}},
    ):
        write_json(tmp_path / "special_tokens_map.json", names)
        tokenizer = read(tmp_path).tokenizer
        assert isinstance(tokenizer, FileTokenizer)
        assert tokenizer.render(CHAT) == "<|begin_of_text|>hello"
        assert tokenizer.eos_ids == {2, size_of("llama3") + 2}


def test_n06_scaling_beside_parameters_of_positions_is_applied(tmp_path: Path) -> None:
    new = {"rope_type": "default", "rope_theta": 10_000.0}
    old = {**YARN, "original_max_position_embeddings": 16}
    write(tmp_path, rope_parameters=new, rope_scaling=old)
    want = their_logits(tmp_path)
    assert float((logits(read(tmp_path)) - want).abs().max()) <= 1e-4
    write(tmp_path, rope_parameters=new)
    assert float((logits(read(tmp_path)) - want).abs().max()) > 0.1


def test_n07_null_in_the_generation_config_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path, settings={}, eos_token_id=[2, 5])
    for generation in ({"eos_token_id": None}, {}):
        write_json(tmp_path / "generation_config.json", generation)
        assert read(tmp_path).config.eos_ids == {2, 5}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 7})
    assert read(tmp_path).config.eos_ids == {7}


def test_n09_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    write(tmp_path)
    want = their_logits(tmp_path)
    weights, names = tensors(CONFIG, 0), ["a.safetensors", "b.safetensors"]
    overlay = {"model.norm.weight": weights["model.norm.weight"]}
    old = weights | {name: weight + 1 for name, weight in overlay.items()}
    for order in (names, names[::-1]):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        save_file(old, tmp_path / order[0], metadata={"format": "pt"})
        save_file(overlay, tmp_path / order[1], metadata={"format": "pt"})
        places = dict.fromkeys(weights, order[0]) | dict.fromkeys(overlay, order[1])
        write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": places})
        torch.testing.assert_close(logits(read(tmp_path)), want, rtol=0, atol=1e-4)
    for outside in ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors"):
        write_json(tmp_path / INDEX, {"weight_map": places | {"lm_head.weight": outside}})
        with pytest.raises(ArgumentError, match=f"{re.escape(outside)}.*outside of the folder"):
            read(tmp_path)


def test_n10_parts_of_a_message_are_joined_or_refused(tmp_path: Path) -> None:
    tokenizer = FileTokenizer.from_folder(write(tmp_path), [])
    for made in (tokenizer, ByteTokenizer()):
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": "hel"},
            {"type": "text", "text": "lo"},
        ]
        assert made.chat([{"role": "user", "content": parts}]) == made.chat(CHAT)
        assert made.chat([{"role": "user", "content": parts[:1]}]) != made.chat(CHAT)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500}}
        bad: Any
        for bad in ([*parts, image], [image], ["hello"], [{"text": "hello"}], 5, {"a": 1}):
            with pytest.raises(ArgumentError, match=r'content=.*"type": "text"'):
                made.chat([{"role": "user", "content": bad}])
        with pytest.raises(ArgumentError, match="content='image_url'"):
            made.chat([{"role": "user", "content": [image]}])


@pytest.mark.parametrize(
    "change",
    [
        {"rotary_dim": 4},
        {"rotary_pct": 0.25},
        {"rope_pct": 0.5},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ],
)
def test_n11_rotation_of_part_of_a_head_is_refused_by_name(change: dict, tmp_path: Path) -> None:
    name = next(iter(change))
    if "partial_rotary_factor" in str(change):
        name = "partial_rotary_factor"
    with pytest.raises(ArgumentError, match=f"{name}=.*minikv (rotates|turns)"):
        read(write(tmp_path, **change))


def test_n11_the_whole_head_under_these_names_is_taken(tmp_path: Path) -> None:
    whole = {"rotary_dim": 8, "rotary_pct": 1.0, "partial_rotary_factor": 1.0}
    write(tmp_path)
    want = logits(read(tmp_path))
    write(tmp_path, **whole)
    assert torch.equal(logits(read(tmp_path)), want)


def test_n12_a_head_of_its_own_beside_a_tie_is_named(tmp_path: Path) -> None:
    write(tmp_path, tie_word_embeddings=True)
    tied = logits(read(tmp_path))
    weights = tensors(CONFIG, 0)
    copy = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(copy, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(read(tmp_path)), tied)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"lm_head\.weight.*tie_word_embeddings"):
        model = read(tmp_path)
    torch.testing.assert_close(logits(model), their_logits(tmp_path), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("spelling", "longest"),
    [
        ({"rope_scaling": YARN}, 256),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 128),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 8}}, 64),
        ({}, 64),
    ],
)
def test_n13_the_scaled_length_is_allowed(spelling: dict, longest: int, tmp_path: Path) -> None:
    write(tmp_path, **spelling)
    llm = engine(tmp_path, max_context=longest)
    [out] = llm.generate(list(range(3, 53)), SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(out.token_ids) == min(20, longest - 49)
    with pytest.raises(ArgumentError, match=f"at most {longest} tokens"):
        engine(tmp_path, max_context=longest + 1)


@pytest.mark.parametrize("text", ["đem", "Ġx", "ĊĊ", "Ķā"])
def test_n15_added_tokens_are_shown_as_they_are_written(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    made = tokenizer_json("llama3")
    last = made["added_tokens"][-1]
    number = last["id"] + 1
    made["added_tokens"].append(last | {"id": number, "content": text, "special": False})
    write_json(tmp_path / "tokenizer.json", made)
    tokenizer = FileTokenizer.from_folder(tmp_path, [])
    assert tokenizer.encode(text) == [number]
    assert tokenizer.decode([number]) == Texts(tokenizer)(number) == text
    sentence = f"hello {text}漢字{text}"
    ids = tokenizer.encode(sentence)
    assert tokenizer.decode(ids) == sentence
    stream = TextStream(tokenizer)
    assert "".join(stream.push([i]) for i in ids) == sentence


@pytest.mark.parametrize("keep", [False, True])
def test_n18_a_stop_text_that_is_a_special_token_stops_there(keep: bool, tmp_path: Path) -> None:
    write(tmp_path, "smollm", settings={"eos_token": "<|im_end|>"})
    end = size_of("smollm") + 2
    tokenizer = FileTokenizer.from_folder(tmp_path, [])
    hello = tokenizer.encode("hello")
    stream = TextStream(tokenizer, ["<|im_end|>", "zz"], keep)
    assert stream.push([*hello, end, *hello]) == "hello" + "<|im_end|>" * keep
    assert stream.stopped
    late = TextStream(tokenizer, ["hello<|im_end|>", "<|im_end|> "])  # more than one token
    assert late.push([*hello, end, *hello], final=True) == "hellohello"
    llm = engine(tmp_path)
    params = {"max_tokens": 8, "ignore_eos": True, "logit_bias": {end: 50.0}, "temperature": 0}
    [out] = llm.generate([5, 6], SamplingParams(**params))
    assert out.token_ids == [end] * 8
    stopped = SamplingParams(**params, stop=["<|im_end|>"], keep_stop=keep)
    [out] = llm.generate([5, 6], stopped)
    assert (out.token_ids, out.finish_reason) == ([end], "stop")
    assert out.text == "<|im_end|>" * keep
    assert "".join(d.text for d in llm.stream([5, 6], stopped)) == out.text
    names = TextStream(ByteTokenizer(), ["end"])  # what a picture calls a token is not its text
    assert names.push([104, 256, 105], final=True) == "hi"
