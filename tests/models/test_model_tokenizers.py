"""Tokenizers of Hugging Face folders, chat templates as transformers renders them, and the byte
tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv.errors import ArgumentError
from minikv.models.files.tokenizer import ByteTokenizer, FileTokenizer

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
EACH = "{% for m in messages %}"
TEMPLATES = {
    "plain": CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "bos-and-strip": "{{ bos_token }}{%- for m in messages %}\n"
    "  {{- m.content | trim }}{{ eos_token }}\n{%- endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{{ messages | tojson }}{{ documents is none }}",
    "namespace": "{% set ns = namespace(n=0) %}"
    + EACH
    + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "break": EACH + "{{ m.role }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "missing-content": EACH + "{{ m.content is defined }}{% endfor %}",
}
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  hé 你好  "},
    {"role": "assistant", "content": None},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]


def train(**settings):
    """A small byte-level BPE tokenizer, wrapped by transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = ["hello world, the cache holds pages and the tree shares prefixes", "你好 hé"]
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(words, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", **settings
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = train(chat_template=TEMPLATES[name])
    theirs.save_pretrained(tmp_path)
    ours = FileTokenizer.from_folder(tmp_path, [])
    options = {"tools": TOOLS, "add_generation_prompt": True}
    assert ours.render(CHAT, TOOLS) == theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.chat(CHAT, TOOLS) == theirs.apply_chat_template(CHAT, return_dict=False, **options)


def test_ids_of_a_folder_equal_transformers(tmp_path: Path) -> None:
    theirs = train()
    theirs.save_pretrained(tmp_path)
    ours = FileTokenizer.from_folder(tmp_path, [7])
    for text in ("hello pages", "<s>hello</s> <|im_end|>x", "", "日本 🙂"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text).input_ids, skip_special_tokens=True
        )
    assert ours.eos_ids == {7, theirs.eos_token_id}
    assert ours.vocab_size == len(theirs)
    assert {"<s>", "</s>", "<|im_end|>"} <= set(ours.specials.values())
    assert not any(ours.decode([i]) for i in ours.specials)


def test_a_start_token_comes_only_where_the_model_says_so(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    theirs = train()
    bos = theirs.bos_token_id
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    theirs.save_pretrained(tmp_path / "processor")
    with_bos = FileTokenizer.from_folder(tmp_path / "processor", [])
    assert with_bos.encode("hello") == theirs("hello").input_ids
    assert with_bos.encode("hello")[0] == bos
    without = FileTokenizer(with_bos.backend, [], with_bos.names, None, add_bos=False)
    assert without.encode("hello") == with_bos.encode("hello")[1:]
    plain = train()
    added = FileTokenizer(plain.backend_tokenizer, [], {"bos_token": "<s>"}, None, add_bos=True)
    assert added.encode("hello") == [bos, *plain("hello").input_ids]
    assert added.encode("<s>hello") == added.encode("hello")


def test_bad_chats_name_the_remedy(tmp_path: Path) -> None:
    train(chat_template="{{ raise_exception('roles must alternate') }}").save_pretrained(tmp_path)
    refusing = FileTokenizer.from_folder(tmp_path, [])
    with pytest.raises(ArgumentError, match="roles must alternate"):
        refusing.chat(CHAT)
    for bad in ([], "hello", [{"content": "no role"}], [["user", "hi"]]):
        with pytest.raises(ArgumentError, match=r'pass a list of \{"role"'):
            refusing.chat(bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no chat template; pass a text prompt"):
        FileTokenizer(refusing.backend, [], {}, None, None).chat(CHAT)
    with pytest.raises(ArgumentError, match=r"role='tool'.*user, assistant, system"):
        ByteTokenizer().chat([{"role": "tool", "content": "x"}])


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    train(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}").save_pretrained(
        tmp_path
    )
    with pytest.raises(ArgumentError, match="template refuses"):
        FileTokenizer.from_folder(tmp_path, []).render(CHAT)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_id_of_the_byte_tokenizer_decodes() -> None:
    assert ByteTokenizer().decode(range(256, 260)) == ""
    assert len(ByteTokenizer(300_000).decode(range(260, 300_000))) == 300_000 - 260
    assert ByteTokenizer().decode([0xE4, 0xBD, 0xA0, 0xE4]) == "你\ufffd"
