"""Stop texts in a text that arrives in pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dms_train.inference.texts import StopFilter
from tests.support.matrix import FULL_MATRIX

EXAMPLES = 1000 if FULL_MATRIX else 200
PIECES = st.lists(st.text("ab ", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3).map(tuple)


def first_end(text: str, stops: tuple[str, ...]) -> str:
    """Find the first stop text by trying every index."""
    for at in range(len(text)):
        if any(text[at : at + len(stop)] == stop for stop in stops):
            return text[:at]
    return text


@given(pieces=PIECES, stops=STOPS)
@settings(max_examples=EXAMPLES)
def test_what_is_sent_ends_before_the_first_stop_text(pieces, stops):
    stream = StopFilter(stops)
    sent = [stream.add(piece) for piece in pieces]
    text = "".join(pieces)
    assert "".join([*sent, stream.finish()]) == first_by_arrival(pieces, stops)
    assert stream.stopped == any(stop in text for stop in stops)


def first_by_arrival(pieces: list[str], stops: tuple[str, ...]) -> str:
    """Return the text up to the stop text that a piece completes first."""
    text = ""
    for piece in pieces:
        text += piece
        if any(stop in text for stop in stops):
            break
    return first_end(text, stops)


@given(pieces=PIECES, stops=STOPS)
@settings(max_examples=EXAMPLES)
def test_nothing_is_held_back_that_no_stop_text_can_begin_with(pieces, stops):
    stream, sent, text = StopFilter(stops), "", ""
    for piece in pieces:
        text += piece
        sent += stream.add(piece)
        if stream.stopped:
            return
        held = text[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_longest_possible_beginning_is_held():
    stream = StopFilter(("aab",))
    assert [stream.add(piece) for piece in ("xa", "a", "a", "b", "c")] == ["x", "", "a", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
