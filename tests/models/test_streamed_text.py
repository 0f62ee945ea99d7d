"""Text that is streamed token by token equals the text of all tokens, for every tokenizer kind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import CUTS, KINDS, LINES, tokenizer_json

from minikv.engine import TextStream
from minikv.models.files.tokenizer import FileTokenizer

SEQUENCES = 3000
SAMPLES = ["漢字", "👍🏽", "❤️", "e\u0301", "  a\tb ", "<s>", "สวัสดี", *LINES]


def tokenizer(kind: str, folder: Path) -> FileTokenizer:
    """A tokenizer of this kind with special tokens and one added token that is none."""
    made = tokenizer_json(kind)
    last = made["added_tokens"][-1]
    more = {"id": last["id"] + 1, "content": "<think>", "special": False}
    made["added_tokens"].append(last | more)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return FileTokenizer.from_folder(folder, [])


def pieces(kind: str, made: FileTokenizer) -> dict[int, bytes]:
    """The bytes of every token by itself, worked out here from the vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    backend: Any = made.backend
    byte_of = {ByteLevel(False).pre_tokenize_str(chr(i))[0][0]: i for i in range(128)}
    letters = sorted(set(ByteLevel.alphabet()) - set(byte_of), key=ord)
    # The alphabet: printable bytes are themselves, the others follow from U+0100 on, in order.
    byte_of |= {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = [i for i in range(256) if i not in byte_of.values()]
    high = [letter for letter in letters if ord(letter) >= 256 and letter not in byte_of]
    byte_of |= dict(zip(high, others, strict=True))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    found = {}
    for text, i in backend.get_vocab().items():
        if i in made.specials:
            found[i] = b""
        elif i in added:
            found[i] = text.encode()
        elif kind in CUTS:
            found[i] = bytes(byte_of[letter] for letter in text)
        elif text.startswith("<0x") and kind in ("fallback", "metaspace"):
            found[i] = bytes([int(text[3:5], 16)])
        else:
            found[i] = text.replace("▁", " ").encode()
    return found


def sequences(made: FileTokenizer, table: dict[int, bytes]) -> Any:
    """Random ids: any token, bytes only, special tokens often, or a text cut where it happens."""
    rng = random.Random(0)
    single = [i for i, piece in table.items() if len(piece) == 1]
    for number in range(SEQUENCES):
        count = rng.randrange(1, 60)
        if number % 4 == 0:
            yield rng.choices(list(table), k=count)
        elif number % 4 == 1:
            yield rng.choices(single, k=count)
        elif number % 4 == 2:
            yield rng.choices([*made.specials, *rng.sample(list(table), 8)], k=count)
        else:
            ids = made.encode("".join(rng.choices(SAMPLES, k=4)))
            start = rng.randrange(len(ids))
            yield ids[start : start + count]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_streamed_one_by_one_give_the_text_of_all(kind: str, tmp_path: Path) -> None:
    made = tokenizer(kind, tmp_path)
    table = pieces(kind, made)
    for ids in sequences(made, table):
        whole = b"".join(table[i] for i in ids).decode(errors="replace")
        shown = [table[i] for i in ids if table[i]]
        if kind not in CUTS and shown and shown[0].startswith(b" "):
            whole = whole[1:]  # the space that these kinds put in front of a text
        assert made.decode(ids) == whole, ids
        stream = TextStream(made)
        parts = [stream.push([i], final=n == len(ids) - 1) for n, i in enumerate(ids)]
        assert "".join(parts) == stream.text == whole, ids
        at_once = TextStream(made, stop=["no such text"])
        assert at_once.push(ids, final=True) == whole


@pytest.mark.parametrize("kind", ["llama3", "fallback", "metaspace"])
def test_characters_arrive_with_their_last_token(kind: str, tmp_path: Path) -> None:
    made = tokenizer(kind, tmp_path)
    for text in ("漢字", "👍🏽", "❤️", "สวัสดี"):
        stream, done = TextStream(made), b""
        for i in made.encode(text):
            done += pieces(kind, made)[i]
            stream.push([i])
            ready = done.removeprefix(b" ").decode(errors="ignore")
            assert stream.text == ready
        assert stream.text == text
