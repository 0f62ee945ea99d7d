"""Text to token ids and back: tokenizers of GGUF files and Hugging Face folders, and a byte
tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import jinja2
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from minikv.errors import ArgumentError
from minikv.models.files.chat import Message, check_messages, compile_template
from minikv.models.files.reading import read_json

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
_SAME_CUTS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_CONTROL, _DEFINED_BY_USER = 3, 4  # types of a GGUF file's tokens
_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


# What folders call their special tokens, in the order in which transformers adds them.
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


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
            ids += [self.roles[message["role"]], *self.encode(message.get("content", "")), 256]
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
        backend.no_truncation()  # what a file says of these two was for training
        backend.no_padding()
        self.backend, self.eos_ids = backend, frozenset(eos_ids)
        self.names, self.template, self.add_bos = names, template, add_bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = backend.token_to_id(names.get("bos_token", ""))
        added = backend.get_added_tokens_decoder()
        self.specials = {i: token.content for i, token in added.items() if token.special}
        steps = b"" if backend.decoder is None else backend.decoder.__getstate__()
        # Added tokens are no bytes, but a byte-level decoder takes letters such as đ for some.
        self._written: dict[int, str] = {}
        if b'"ByteLevel"' in steps:
            texts = {i: token.content for i, token in added.items()}
            self._written = {i: text for i, text in texts.items() if backend.decode([i]) != text}
        # Ids of the tokens <0x00> .. <0xFF>, which stand for single bytes, where there are any.
        found = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        falls_back = b'"ByteFallback"' in steps and None not in found
        self._byte_ids = [i for i in found if i is not None] if falls_back else []
        self._bytes = {i: byte for byte, i in enumerate(self._byte_ids)}

    def encode(self, text: str) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=self.add_bos is not False).ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        shown = [i for i in ids if i not in self.specials]
        text = ""
        for written, run in groupby(shown, self._written.__contains__):
            if written:
                text += "".join(self._written[i] for i in run)
            else:
                text += self.backend.decode(self._whole_characters(run))
        return text

    def _whole_characters(self, ids: Iterable[int]) -> list[int]:
        """The same ids, but what is no UTF-8 in a run of byte tokens is replaced by U+FFFD: the
        library would give up the whole run for one byte of it."""
        whole: list[int] = []
        for is_byte, run in groupby(ids, self._bytes.__contains__):
            if is_byte:
                text = bytes(self._bytes[i] for i in run).decode(errors="replace")
                run = (self._byte_ids[byte] for byte in text.encode())
            whole += run
        return whole

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
        return compile_template(self.template or "")

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any], eos_ids: Iterable[int]) -> FileTokenizer:
        """Build from GGUF metadata (byte-level BPE; other kinds raise :class:`ArgumentError`)."""
        given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        model, named = given.get("model"), given.get("pre", "default")
        rule = _SAME_CUTS.get(named, named)
        if model != "gpt2" or rule not in _CUTS:
            raise ArgumentError(
                f"tokenizer.ggml.{'pre' if model == 'gpt2' else 'model'}",
                f"{model}/{named}",
                f"gpt2 with {', '.join(_CUTS)} is known; use an HF folder",
            )
        tokens = given["tokens"]
        vocab = {token: i for i, token in enumerate(tokens)}
        merges: Any = [tuple(pair.split(" ", 1)) for pair in given.get("merges", [])]
        try:
            bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe")
        except Exception as e:  # of the library, for pairs that are none or not in the vocabulary
            raise ArgumentError("tokenizer.ggml.merges", str(e), "fetch the file again") from e
        backend: Any = Backend(bpe)
        pieces = ByteLevel(add_prefix_space=False, use_regex=rule not in ("llama-bpe", "qwen2"))
        backend.pre_tokenizer = Sequence([*_CUTS[rule], pieces])
        backend.decoder = decoders.ByteLevel()
        if rule == "qwen2":
            backend.normalizer = normalizers.NFC()
        added = [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, given["token_type"], strict=True)
            if kind in (_CONTROL, _DEFINED_BY_USER)
        ]
        backend.add_tokens(added)
        ids = {name: given.get(f"{key}_token_id") for name, key in _GGUF_NAMES.items()}
        names = {name: tokens[i] for name, i in ids.items() if i is not None}
        template = metadata.get("tokenizer.chat_template")
        add_bos = given.get("add_bos_token", rule == "llama-bpe")  # as llama.cpp decides
        return cls(backend, eos_ids, names, template, add_bos)

    @classmethod
    def from_folder(cls, folder: str | Path, eos_ids: Iterable[int]) -> FileTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a
        Hugging Face folder, and what older versions wrote besides; the start token comes where
        ``tokenizer.json`` puts it, as in transformers 5.

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
        own = read_json(folder / "tokenizer_config.json")
        settings, listed = dict(own), own.get("added_tokens_decoder")
        if listed is None:  # then two files of older versions count
            settings |= read_json(folder / "special_tokens_map.json")
            older = read_json(folder / "added_tokens.json")
            have = {token.content for token in backend.get_added_tokens_decoder().values()}
            listed = {i: {"content": text} for text, i in older.items() if text not in have}
        if backend.padding is not None:
            settings.setdefault("pad_token", backend.padding["pad_token"])
        order = [*_NAMES, *(name for name in settings if name.endswith("_token"))]
        given = {name: settings[name] for name in order if settings.get(name)}
        tokens = {name: token for name, token in given.items() if isinstance(token, (str, dict))}
        keys = ("extra_special_tokens", "additional_special_tokens")
        lists = [source[key] for source in (own, settings) for key in keys if source.get(key)]
        extra = lists[0] if lists else []
        if isinstance(extra, dict):
            tokens |= extra
            extra = []
        names = {name: _flags(token)["content"] for name, token in tokens.items()}
        _add_tokens(backend, listed, [*tokens.values(), *extra])
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        stops = {*eos_ids, backend.token_to_id(names.get("eos_token", ""))} - {None}
        return cls(backend, stops, names, template, None)


def _add_tokens(
    backend: Any, listed: dict[Any, dict[str, Any]], specials: list[str | dict[str, Any]]
) -> None:
    """Add what a folder says of tokens outside of its ``tokenizer.json``, in transformers' order.

    Parameters
    ----------
    listed
        Flags of added tokens by id; they count more than those of ``tokenizer.json``.
    specials
        Special tokens, by text or flags; added where nothing else has them.
    """
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    known = {_flags(token)["content"] for token in specials}
    every = [*(listed[i] for i in sorted(listed, key=int)), *specials]
    added: dict[str, AddedToken] = {}
    for number, token in enumerate(every):
        flags = _flags(token)
        text = flags["content"]
        flags["special"] = flags.get("special", False) or text in known
        if text not in added and (number < len(listed) or text not in have):
            added[text] = AddedToken(**flags)
    backend.add_tokens(list(added.values()))


def _flags(token: str | dict[str, Any]) -> dict[str, Any]:
    """The text of a token and how it is matched, without the name of a Python class."""
    if isinstance(token, str):
        return {"content": token}
    return {key: value for key, value in token.items() if key != "__type"}
