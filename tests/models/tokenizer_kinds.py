"""The tokenizer kinds of the supported families, trained here on a few lines, and chat templates in
the manner of each family.

A kind is a ``tokenizer.json`` as a dictionary: tests change parts of it before they write it.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split
from tokenizers.processors import TemplateProcessing

LINES = [
    "The cache holds pages and the tree shares prefixes; a page holds sixteen tokens of a request.",
    "hello world hello tokens, it's 2024 and I'll say we've seen 12345 of them.\n\nNew line\ttab",
    "für Größe élève naïve señor, Привет мир, 你好 世界, こんにちは 世界, مرحبا",
]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS: dict[str, list[Any]] = {
    "llama3": [Split(Regex(_WORDS % "{1,3}"), "isolated"), ByteLevel(False, use_regex=False)],
    "qwen2": [Split(Regex(_WORDS % ""), "isolated"), ByteLevel(False, use_regex=False)],
    "smollm": [Digits(individual_digits=True), ByteLevel(False)],
    "gpt2": [ByteLevel(False)],
    "deepseek": [
        Split(Regex(r"[\r\n]"), "isolated"),
        Split(Regex(r"\s?\p{L}+"), "isolated"),
        Split(Regex(r"\s?\p{P}+"), "isolated"),
        Digits(individual_digits=True),
        ByteLevel(False, use_regex=False),
    ],
}
SENTENCE_PIECES = ("fallback", "metaspace", "metaspace-first", "unigram")
KINDS = (*CUTS, *SENTENCE_PIECES)

# Special tokens by family: start, end of document, end of a turn, and others.
SPECIALS: dict[str, list[str]] = {
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"],
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"],
    "gpt2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
    "deepseek": [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ],
}
PIECE_SPECIALS = ["<s>", "</s>", "[INST]", "[/INST]"]

TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}\n"
        "    {{- m['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant' }}{%- endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
        "{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
        "{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    "every-name": (
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|"
        "{{ messages | tojson }}{{ tools is none }}{{ documents is none }}"
    ),
    "loop": (
        "{%- set first = messages[0] if messages[0].role == 'system' else none -%}\n"
        "{% for m in messages if m.role != 'system' %}\n  {% if loop.index > 3 %}{% break %}"
        "{% endif %}\n[{{ m.role | upper }}] {{ (first.content ~ ' ') if first }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n{% endfor %}"
    ),
}


@cache
def _trained(kind: str) -> str:
    """The ``tokenizer.json`` of a kind without special tokens (but those of sentence pieces)."""
    tokenizer: Any
    if kind in CUTS:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
        tokenizer.pre_tokenizer = Sequence(CUTS[kind])
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(LINES, trainer)
        return tokenizer.to_str()
    scheme = "first" if kind == "metaspace-first" else "always"
    specials = ["<unk>", "<s>", "</s>"]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    else:
        specials += [f"<0x{byte:02X}>" for byte in range(256)] * (kind != "metaspace-first")
        fallback = kind != "metaspace-first"
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
        trainer = trainers.BpeTrainer(
            vocab_size=len(specials) + 120, special_tokens=specials, show_progress=False
        )
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "fallback":  # Llama 2 as transformers 4 wrote it
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    elif kind == "metaspace":  # Mistral, and Llama 2 as transformers 5 writes it
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    lines = ["the cache holds pages", *LINES[:2]] * 3
    tokenizer.train_from_iterator(lines, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]  # bytes are no added tokens
    return json.dumps(made)


def tokenizer_json(kind: str, specials: bool = True, start: bool = False) -> dict[str, Any]:
    """A ``tokenizer.json``, its special tokens at the end of the vocabulary.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    specials
        Whether the special tokens of the kind are among the ``added_tokens``.
    start
        Whether the start token is put in front of every text.
    """
    made = copy.deepcopy(json.loads(_trained(kind)))
    if specials:
        made["added_tokens"] += added_tokens(kind)
    if start:
        first = special_tokens(kind)[0]
        number = size_of(kind) + special_tokens(kind).index(first)
        if kind in SENTENCE_PIECES:
            number = 1
        post = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, number)])
        made["post_processor"] = json.loads(post.__getstate__())
    return made


def special_tokens(kind: str) -> list[str]:
    """Texts of the special tokens, the start token first, then the end token."""
    return SPECIALS.get(kind, PIECE_SPECIALS)


def size_of(kind: str) -> int:
    """Tokens of a kind without the special ones that are added at the end."""
    return len(json.loads(_trained(kind))["model"]["vocab"])


def added_tokens(kind: str) -> list[dict[str, Any]]:
    """Entries for ``added_tokens``: the specials of the kind that its vocabulary lacks."""
    base = size_of(kind)
    names = special_tokens(kind)[2 if kind in SENTENCE_PIECES else 0 :]
    return [
        {
            "id": base + i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, name in enumerate(names)
    ]


def backend(kind: str, **options: Any) -> Tokenizer:
    """The tokenizer itself."""
    return Tokenizer.from_str(json.dumps(tokenizer_json(kind, **options)))
