from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anaphora.engine.text import TextStream


def streamed(pieces: list[bytes], stop: list[str]) -> tuple[list[str], str | None]:
    stream = TextStream(stop)
    texts = [stream.feed(piece) for piece in pieces]
    return [*texts, stream.finish()], stream.stopped


def without_cut_character(data: bytes) -> bytes:
    """``data`` without a last character that only lacks bytes at its end."""
    for missing in range(1, 4):
        for filler in (b"\x80", b"\x90", b"\xbf", b"\x9f", b"\x8f"):
            completed = data + filler * missing
            for start in range(max(0, len(data) - 3), len(data)):
                try:
                    if len(completed[start:].decode("utf-8", "surrogatepass")) == 1:
                        return data[:start]
                except UnicodeDecodeError:
                    pass
    return data


def plain(data: bytes, stop: list[str]) -> tuple[str, str | None]:
    """The same by looking at ever longer beginnings of the whole text."""
    text = without_cut_character(data).decode("utf-8", "replace")
    for end in range(len(text) + 1):
        found = [s for s in stop if s and text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


mostly_text = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "ab", "é", "€", "😀", "👩‍👩‍👧", "\n", " "]).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from([b"\xf0\x9f", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x80", b"\xff"]),
    ),
    max_size=12,
).map(b"".join)
cuts = st.lists(st.integers(0, 100), max_size=12)
stops = st.lists(
    st.one_of(st.text("ab", max_size=5), st.sampled_from(["€", "😀", "�", "\n ", "aé"])),
    max_size=4,
)


@given(mostly_text, cuts, stops)
@example(b"aab", [1, 2], ["aab", "ab", "b"])
@example(b"aaab", [1, 2, 3], ["aab"])
@example("😀".encode()[:3], [1, 2], [])
@example(b"ab\xe2\x82", [2, 3], ["abc"])
def test_every_split_gives_the_text_of_the_whole(
    data: bytes, cuts: list[int], stop: list[str]
) -> None:
    texts, stopped = streamed(split(data, cuts), stop)
    assert ("".join(texts), stopped) == plain(data, stop)


@given(mostly_text, cuts)
def test_without_stop_texts_nothing_but_a_cut_character_is_held_back(
    data: bytes, cuts: list[int]
) -> None:
    stream, fed, text = TextStream(), b"", ""
    for piece in split(data, cuts):
        fed += piece
        text += stream.feed(piece)
        assert text == without_cut_character(fed).decode("utf-8", "replace")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
def test_no_more_is_held_back_than_could_become_a_stop_text(text: str, stop: list[str]) -> None:
    stream, given_out = TextStream(stop), ""
    for end in range(1, len(text) + 1):
        given_out += stream.feed(text[end - 1].encode())
        if stream.stopped is not None:
            return
        held = text[len(given_out) : end]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream()
    euro = "€".encode()
    assert [stream.feed(euro[:1]), stream.feed(euro[1:2]), stream.feed(euro[2:])] == ["", "", "€"]


def test_a_character_cut_off_by_the_end_is_dropped() -> None:
    assert streamed([b"a", "😀".encode()[:3]], []) == (["a", "", ""], None)


def test_invalid_bytes_become_replacement_characters() -> None:
    assert streamed([b"a\xff", b"b\xe2\x82", b"c"], []) == (["a�", "b", "�c", ""], None)


def test_text_before_a_stop_text_is_given_out_and_the_rest_ignored() -> None:
    stream = TextStream(["STOP"])
    assert [stream.feed(b"go ST"), stream.feed(b"OP now"), stream.feed(b"more")] == ["go ", "", ""]
    assert stream.stopped == "STOP"
    assert stream.finish() == ""


def test_text_that_turns_out_to_be_no_stop_text_is_given_out() -> None:
    stream = TextStream(["STOP"])
    assert [stream.feed(b"ST"), stream.feed(b"ART"), stream.feed(b"S")] == ["", "START", ""]
    assert stream.finish() == "S"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["abcd", "bc"], ("a", "bc")),  # complete first, though the other began earlier
        (["bc", "abc"], ("", "abc")),  # complete together: the longest
        (["", "c"], ("ab", "c")),  # an empty one never matches
    ],
)
@pytest.mark.parametrize("pieces", [[b"abcd"], [b"a", b"b", b"c", b"d"]])
def test_which_of_several_stop_texts_wins(
    stop: list[str], expected: tuple[str, str], pieces: list[bytes]
) -> None:
    texts, stopped = streamed(pieces, stop)
    assert ("".join(texts), stopped) == expected


def test_a_token_costs_microseconds() -> None:
    pieces = [b" the", b" cat", b".", b"\n", b" 12"] * 400
    best = min(_seconds_to_stream(pieces) for _ in range(5))
    assert best / len(pieces) < 20e-6


def _seconds_to_stream(pieces: list[bytes]) -> float:
    stream = TextStream(["\n\nHuman:", "</s>", "User:", "STOP"])
    start = time.perf_counter()
    for piece in pieces:
        stream.feed(piece)
    return time.perf_counter() - start
