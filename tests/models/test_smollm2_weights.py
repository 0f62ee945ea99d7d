"""The real model: SmolLM2-135M from its GGUF file, against transformers reading the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_standins import DenseAttention, full_logits

from minikv.models import Model, load

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three prime numbers.",
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  spaces\tand\n\n\nnewlines \n  kept  ",
    "1234567890 in 2024, 3.14159 and 0x1F",
    "héllo wörld, 你好世界, こんにちは, 🙂👩‍👩‍👧, e\u0301",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x <repo_name>",
    "def f(x):\n    return x ** 2  # it's isn't WE'LL\n",
    "",
]


@pytest.fixture(scope="module")
def ours(model_file: Path) -> Model:
    return load("smollm2-135m", device="cpu", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def theirs(model_file: Path):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    return transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)


@pytest.fixture(scope="module")
def their_tokenizer(model_file: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)


def test_the_weights_are_the_same_bits(ours: Model, theirs) -> None:
    state = theirs.state_dict()
    for name, view in ours.decoder.checkpoint_views().items():
        assert torch.equal(view, state[name]), name


def test_logits_equal_transformers(ours: Model, theirs) -> None:
    for prompt in PROMPTS:
        ids = ours.tokenizer.chat([{"role": "user", "content": prompt}])
        with torch.inference_mode():
            want = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(full_logits(ours.decoder, ids), want, rtol=0, atol=1e-4)


def test_greedy_text_equals_transformers(ours: Model, theirs) -> None:
    ids = ours.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}])
    with torch.inference_mode():
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[
            0, len(ids) :
        ].tolist()
    attention, got, new = DenseAttention(), [], torch.tensor(ids)
    for _ in want:
        at = len(ids) + len(got) - len(new) if got else 0
        given = attention.begin((0, len(new))), ours.decoder.attention_layers
        logits = ours.decoder(new, torch.arange(at, at + len(new)), *given)
        new = logits[-1:].argmax(-1)
        got.append(int(new))
    assert got == want
    assert "Paris" in ours.tokenizer.decode(got)


def test_ids_equal_transformers(ours: Model, their_tokenizer) -> None:
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == their_tokenizer(text).input_ids, text
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == their_tokenizer.decode(
            their_tokenizer(text).input_ids, skip_special_tokens=True
        )
    assert ours.tokenizer.eos_ids == ours.config.eos_ids == {2}
    assert ours.tokenizer.vocab_size == 49152


def test_digits_are_cut_off_first_as_the_model_was_trained(ours: Model, their_tokenizer) -> None:
    """The file asks for the rule "smollm": single digits before all else. transformers reads it as
    GPT-2's rule, which differs where several spaces or line ends stand before a digit; with the
    rule put right it agrees everywhere."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = their_tokenizer.backend_tokenizer
    plain = backend.pre_tokenizer
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    try:
        for text in [*TEXTS, "a list:\n\n1. one\n\n2. two   33"]:
            assert ours.tokenizer.encode(text) == backend.encode(text).ids, text
    finally:
        backend.pre_tokenizer = plain


def test_chats_equal_transformers(ours: Model, their_tokenizer) -> None:
    system = {"role": "system", "content": "Answer in one word."}
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    for chat in (turn[:1], [system, *turn, turn[0]], [*turn, turn[0]]):
        want = their_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert ours.tokenizer.chat(chat) == want
