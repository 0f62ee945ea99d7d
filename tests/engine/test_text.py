"""Streaming text: whole characters only, bounded work, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv.engine import TextStream


class Bytes:
    """Token id = byte."""

    longest = 0

    def decode(self, ids):
        self.longest = max(self.longest, len(ids))
        return bytes(ids).decode("utf-8", "replace")


class Table:
    """Token id = index of a piece of bytes."""

    def __init__(self, *pieces: bytes | str) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def run(tokenizer, ids, **options):
    stream = TextStream(tokenizer, **options)
    deltas = []
    for i, token in enumerate(ids):
        deltas.append(stream.push([token], final=i == len(ids) - 1))
        if stream.stopped:
            break
    assert "".join(deltas) == stream.text
    return deltas, stream


def test_b114_emoji_split_over_tokens():
    deltas, _ = run(Table(b"\xf0\x9f", b"\x8c\xb6"), [0, 1])
    assert deltas == ["", "\U0001f336"]
    deltas, _ = run(Table("a", b"\xf0\x9f"), [0, 1])  # a dangling piece is flushed once, at the end
    assert deltas == ["a", "\ufffd"]


def test_b116_sent_text_is_never_sent_again():
    texts = ["A 世\ufffd", "A 世a\ufffd", "A 世ab"]

    class Shrinking:
        def decode(self, ids):
            return texts[len(ids) - 1]

    deltas, _ = run(Shrinking(), [0, 1, 2])
    assert "".join(deltas) == "A 世ab"
    assert not any("\ufffd" in d for d in deltas)


def test_b117_invalid_bytes_arrive_with_bounded_work():
    tokenizer, arrived = Bytes(), []
    stream = TextStream(tokenizer)
    for _ in range(200):
        arrived.append(stream.push([0xFF]))
    assert sum(map(len, arrived)) >= 190
    assert all(arrived[5:])
    stream.push([], final=True)
    assert stream.text == "\ufffd" * 200
    assert tokenizer.longest <= 32


@pytest.mark.parametrize(("keep", "text"), [(False, "a"), (True, "aEND")])
def test_b119_stop_string_inside_and_across_tokens(keep, text):
    deltas, stream = run(Table("a", "EN", "Dx", "y"), [0, 1, 2, 3], stop=["END"], keep_stop=keep)
    assert stream.stopped
    assert stream.text == text
    assert len(deltas) == 3  # "y" was not looked at


def test_b119_of_two_stops_in_one_token_the_earliest_wins():
    for stops in (["S2", "S1"], ["S1", "S2"]):
        _, stream = run(Table("xS1yS2z"), [0], stop=stops, keep_stop=True)
        assert stream.text == "xS1"
    _, stream = run(
        Table("q", "fooEND"), [0, 1], stop=["ND", "END"]
    )  # complete at the same character: the longer
    assert stream.text == "qfoo"


def test_b120_held_back_text_is_sent_at_the_end():
    deltas, stream = run(Table("he", "llo"), [0, 1], stop=["ZZZZ"])
    assert deltas == ["he", "llo"]
    deltas, stream = run(Table("heZ", "Z"), [0, 1], stop=["ZZZZ"])
    assert deltas == ["he", "ZZ"]
    assert not stream.stopped


def test_text_that_only_looks_like_a_stop_is_let_go():
    deltas, stream = run(Table("aab", "aab", "aac"), [0, 1, 2], stop=["aabaac"])
    assert stream.stopped
    assert stream.text == "aab"
    deltas, _ = run(Table("E", "N", "x"), [0, 1, 2], stop=["END"])
    assert deltas == ["", "", "ENx"]


texts = st.text(alphabet=st.sampled_from("ab世é\U0001f336\ufffd E"), max_size=40)


@given(st.one_of(texts.map(str.encode), st.binary(max_size=60)), st.data())
def test_any_cut_into_tokens_gives_the_same_text(raw, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    _, stream = run(Table(*pieces), list(range(len(pieces))))
    assert stream.text == raw.decode("utf-8", "replace")
    _, again = run(Bytes(), list(raw))
    assert again.text == (stream.text if raw else "")


@given(
    texts,
    st.lists(st.text(alphabet="ab世E", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_stop_strings_do_not_depend_on_token_borders(text, stops, keep, data):
    # oracle: grow the text by one character at a time until some stop is complete
    want = text
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            want = text[:end] if keep else text[: end - max(map(len, complete))]
            break
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    _, stream = run(Table(*pieces), list(range(len(pieces))), stop=stops, keep_stop=keep)
    assert stream.text == want
