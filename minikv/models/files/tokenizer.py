"""Text to token ids and back: tokenizers of GGUF files and Hugging Face folders, a byte tokenizer,
chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from minikv.errors import ArgumentError
from minikv.models.files.reading import read_json

Message = dict[str, Any]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What cuts a text before byte-pair merging, by the GGUF name of the rule; the first three cut as
# GPT-2 does then.
_CUTS: dict[str, list[Any]] = {
    "gpt-2": [],
    "default": [],
    "smollm": [Digits(individual_digits=True)],
    "llama-bpe": [Split(Regex(_WORDS % "{1,3}"), "isolated")],
    "qwen2": [Split(Regex(_WORDS % ""), "isolated")],
}
_CONTROL, _DEFINED_BY_USER = 3, 4  # types of a GGUF file's tokens
_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_ids: frozenset[int]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; begins with a start token only where the model's own settings say
        so."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        ...

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation in the model's own format, up to where the assistant
        speaks."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte, four specials, and a printable character for every further id; needs
    no file.

    Ids 0..255 are bytes, 256 ends a turn, 257..259 begin one by the user, the assistant or the
    system; an id from 260 on decodes to the character with that code point, so the output of random
    weights can be looked at.

    Examples
    --------
    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hé")
    [104, 195, 169]
    >>> tokenizer.decode([104, 195, 169, 256, 300])
    'héĬ'
    >>> tokenizer.chat([{"role": "user", "content": "hi"}])
    [257, 104, 105, 256, 258]
    """

    def __init__(self, vocab_size: int = 512, eos_ids: Iterable[int] = (256,)) -> None:
        self.vocab_size, self.eos_ids = vocab_size, frozenset(eos_ids)
        self.roles = {"user": 257, "assistant": 258, "system": 259}
        self.specials = {256: "end", **{i: role for role, i in self.roles.items()}}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        out = bytearray()
        for i in ids:
            if i < 256:
                out.append(i)
            elif i >= 260:
                out += (chr(i) if i < 0xD800 else "\ufffd").encode()
        return out.decode(errors="replace")

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        ids: list[int] = []
        for message in check_messages(messages):
            if message["role"] not in self.roles:
                raise ArgumentError(
                    "role", message["role"], f"the byte tokenizer knows {', '.join(self.roles)}"
                )
            ids += [self.roles[message["role"]], *self.encode(str(message.get("content", ""))), 256]
        return [*ids, self.roles["assistant"]]


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library with a model's stop tokens and chat template.

    Parameters
    ----------
    backend
        The tokenizer itself.
    eos_ids
        Ids that end a text.
    names
        What the template may call its special tokens: ``{"bos_token": "<s>", ...}``.
    template
        Jinja source of the chat template, or None.
    add_bos
        True puts the start token in front of every encoded text, False never; None leaves it to the
        tokenizer's file.

    Attributes
    ----------
    specials
        Names of the special tokens by id; they decode to nothing.
    """

    def __init__(
        self,
        backend: Backend,
        eos_ids: Iterable[int],
        names: dict[str, str],
        template: str | None,
        add_bos: bool | None,
    ) -> None:
        self.backend, self.eos_ids = backend, frozenset(eos_ids)
        self.names, self.template, self.add_bos = names, template, add_bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = backend.token_to_id(names.get("bos_token", ""))
        self.specials = {
            i: token.content
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, text: str) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=self.add_bos is not False).ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return self.backend.encode(self.render(messages, tools), add_special_tokens=False).ids

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The conversation as the text that :meth:`chat` encodes, with the opening of the
        assistant's turn.

        Raises
        ------
        ArgumentError
            For messages without a role, a model without a template, or what the template itself
            refuses.
        """
        messages = check_messages(messages)
        if self.template is None:
            raise ArgumentError(
                "messages", messages, "this model has no chat template; pass a text prompt"
            )
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self.names,
            )
        except jinja2.TemplateError as e:
            raise ArgumentError(
                "messages", messages, f"the model's chat template refuses them: {e}"
            ) from e

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The template in a sandbox, with the helpers that the hub's templates expect to find."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        env.filters["tojson"] = _tojson
        env.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        return env.from_string(self.template or "")

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any], eos_ids: Iterable[int]) -> FileTokenizer:
        """Build from GGUF metadata (byte-level BPE; other kinds raise :class:`ArgumentError`)."""
        given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        rule, tokens = given.get("pre", "default"), given.get("tokens", [])
        if given.get("model") != "gpt2" or rule not in _CUTS:
            raise ArgumentError(
                "tokenizer.ggml.pre",
                f"{given.get('model')}/{rule}",
                f"gpt2 with {', '.join(_CUTS)} is known; use an HF folder",
            )
        vocab = {token: i for i, token in enumerate(tokens)}
        merges = [tuple(pair.split(" ", 1)) for pair in given.get("merges", [])]
        backend: Any = Backend(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe")
        )
        pieces = ByteLevel(add_prefix_space=False, use_regex=rule not in ("llama-bpe", "qwen2"))
        backend.pre_tokenizer = Sequence([*_CUTS[rule], pieces])
        backend.decoder = decoders.ByteLevel()
        if rule == "qwen2":
            backend.normalizer = normalizers.NFC()
        added = [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, given.get("token_type", []), strict=False)
            if kind in (_CONTROL, _DEFINED_BY_USER)
        ]
        backend.add_tokens(added)
        ids = {name: given.get(f"{key}_token_id") for name, key in _GGUF_NAMES.items()}
        names = {name: tokens[i] for name, i in ids.items() if i is not None}
        template = metadata.get("tokenizer.chat_template")
        return cls(backend, eos_ids, names, template, bool(given.get("add_bos_token", False)))

    @classmethod
    def from_folder(cls, folder: str | Path, eos_ids: Iterable[int]) -> FileTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a
        Hugging Face folder.

        Parameters
        ----------
        folder
            Where the files lie; all but the first may be missing.
        eos_ids
            Ids that end a text, besides the folder's own end token.

        Raises
        ------
        ArgumentError
            For a ``tokenizer_config.json`` that is damaged.
        """
        folder = Path(folder)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        settings = read_json(folder / "tokenizer_config.json")
        given = {name: settings[name] for name in _GGUF_NAMES if settings.get(name)}
        names = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in given.items()
        }
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        stops = {*eos_ids, backend.token_to_id(names.get("eos_token", ""))} - {None}
        return cls(backend, stops, names, template, settings.get("add_bos_token"))


def check_messages(messages: list[Message]) -> list[Message]:
    """The messages, fields that are None dropped; raises for anything that is not a list of dicts
    with a role."""
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        raise ArgumentError(
            "messages", messages, 'pass a list of {"role": "user", "content": "..."}'
        )
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is simply
    rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
):
    """Plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
