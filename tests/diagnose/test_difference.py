"""Where prompts part: the true place, whole characters, and the text that stands there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.diagnose.difference import Difference, Excerpt, Reader, difference, shared
from anaphora.diagnose.prompts import TEMPLATE, Remembered
from tests.diagnose.support import FILLER, SYSTEM, VOCAB, message, remembered, text_of

TEXTS = st.text(
    st.one_of(st.sampled_from("ab1: \n"), st.characters(exclude_categories=["Cs"])), max_size=80
)


def parted(one: str, other: str) -> tuple[Remembered, Remembered, Difference]:
    earlier, now = remembered([(SYSTEM, one)], "earlier"), remembered([(SYSTEM, other)])
    position = shared(earlier.tokens, now.tokens)
    change = Reader(VOCAB).change(earlier.tokens, now.tokens, position)
    return earlier, now, difference(earlier, now, position, change)


def whole(excerpt: Excerpt) -> str:
    return excerpt.before + excerpt.marked + excerpt.after


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_the_first_difference_is_the_true_one(start: str, one: str, other: str, end: str) -> None:
    texts = [start + middle + end for middle in (one, other)]
    earlier, now, found = parted(*texts)
    pairs = zip(earlier.tokens, now.tokens, strict=False)
    naive = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(earlier.tokens), len(now.tokens))
    )
    assert found.position == naive
    if texts[0] == texts[1]:
        return
    written = [text_of(prompt) for prompt in (earlier, now)]
    differs = next(i for i, (a, b) in enumerate(zip(*written, strict=False)) if a != b)
    for text, excerpt in zip(written, (found.earlier, found.now), strict=True):
        assert whole(excerpt) in text, "it stands so in the prompt, no character cut in halves"
        place = text.index(whole(excerpt)) + len(excerpt.before)
        # The same words can stand there several times: then one of the places is the true one.
        places = [i for i in range(len(text)) if text.startswith(whole(excerpt), i)]
        assert place - len(excerpt.before) in places
        assert any(
            i + len(excerpt.before) <= differs <= i + len(excerpt.before) + len(excerpt.marked)
            for i in places
        )
    assert found.earlier.before == found.now.before
    assert found.earlier.marked != found.now.marked


@given(TEXTS, TEXTS)
def test_what_is_shown_is_bounded(one: str, other: str) -> None:
    _, _, found = parted(FILLER + one * 50 + FILLER, FILLER + other * 50 + FILLER)
    for excerpt in (found.earlier, found.now):
        assert len(excerpt.before) <= 60
        assert len(excerpt.marked) <= 160
        assert len(excerpt.after) <= 60


def test_whole_words_are_marked() -> None:
    _, _, found = parted(FILLER + "It is 12:34:56. " + FILLER, FILLER + "It is 12:34:57. " + FILLER)
    assert (found.earlier.marked, found.now.marked) == ("12:34:56", "12:34:57")
    assert found.now.before.endswith("window. It is ")
    assert found.now.after.startswith(". The handbook")


def test_something_more_is_marked_on_one_side_only() -> None:
    _, _, found = parted("Be kind. Be brief.", "Be kind. Always. Be brief.")
    assert found.earlier.marked == ""
    assert found.now.marked in ("Always. ", " Always.")


def test_characters_of_several_tokens_stay_whole() -> None:
    for one, other in (("漢", "字"), ("🏳️‍🌈", "🏳️‍🌉"), ("é", "è"), ("ä", "ö")):
        _, _, found = parted(f"{one * 150} x", f"{one * 149}{other} x")
        for excerpt in (found.earlier, found.now):
            assert "\ufffd" not in whole(excerpt)
        assert (found.earlier.marked[-1], found.now.marked[-1]) == (one[-1], other[-1])


def test_the_place_is_the_part_of_the_request_it_lies_in() -> None:
    parts = [(SYSTEM, "Be kind."), (message(1), "Hi"), (None, "|"), (message(2, "assistant"), "Ho")]
    earlier = remembered(parts, "earlier")
    for number, (place, _) in enumerate(parts):
        changed = list(parts)
        changed[number] = (place, "Something else")
        now = remembered(changed)
        position = shared(earlier.tokens, now.tokens)
        change = Reader(VOCAB).change(earlier.tokens, now.tokens, position)
        assert difference(earlier, now, position, change).place == (place or TEMPLATE)


def test_places_are_named_as_people_count() -> None:
    assert str(message(3, "user", 2)) == "message 3 (user), part 2"
    assert str(message(1, "")) == "message 1"
    assert str(SYSTEM) == "system block 1"
    assert str(TEMPLATE) == "the chat template's own text"
