"""Tokens to segments, and segments to subtitles."""

import pytest
from audio_clips import ZERO, position
from hypothesis import given
from hypothesis import strategies as st

from meshlm.frontend.speech import answers as texts
from meshlm.frontend.speech.answers import Segment, segments_of

END = 2
Tokens = list[tuple[int, str]]


def at(seconds: float) -> tuple[int, str]:
    """A time's token, which is shown."""
    return ZERO + round(seconds * 50), f"<|{seconds:.2f}|>"


def found(tokens: Tokens, begin_s: float = 0.0, length_s: float = 30.0) -> list[Segment]:
    positions = [position(token, len(text)) for token, text in tokens]
    return segments_of(positions, "".join(text for _, text in tokens), ZERO, (END,), begin_s, length_s)


A, B = (5, " Hello"), (6, " you")


@pytest.mark.parametrize(
    ("tokens", "segments"),
    [
        ([at(0), A, at(2), at(2.5), B, at(4), (END, "")], [(0, 2, " Hello"), (2.5, 4, " you")]),
        ([at(1), A, B, at(3)], [(1, 3, " Hello you")]),
        ([at(0), A, at(2), B, at(3)], [(0, 2, " Hello"), (2, 3, " you")]),  # one time for an end and a beginning
        ([A, B, (END, "")], [(0, 10, " Hello you")]),
        ([at(0), A], [(0, 10, " Hello")]),
        ([A, at(2)], [(0, 2, " Hello")]),
        ([at(8), A, at(3), at(1), B, at(20)], [(8, 8, " Hello"), (8, 10, " you")]),  # times that go back, or too far
        ([at(0), at(2), (5, " "), at(3)], []),
        ([(END, "")], []),
        ([], []),
    ],
)
def test_times_are_where_their_tokens_are(tokens: Tokens, segments: list[tuple[float, float, str]]) -> None:
    assert [one[:3] for one in found(tokens, length_s=10)] == segments


def test_a_chunk_has_its_place_in_the_sound() -> None:
    (one,) = found([at(0.5), A, at(1)], begin_s=29.5)
    assert (one.begin_s, one.end_s, one.seek_s, one.token_ids, one.avg_logprob) == (30.0, 30.5, 29.5, (5,), -0.5)
    assert 0 < one.compression_ratio < 1


def test_times_that_are_special_tokens_are_not_in_the_text() -> None:
    assert found([(ZERO, ""), A, (ZERO + 50, "")])[0][:3] == (0, 1, " Hello")


def test_a_logprob_without_an_end() -> None:
    positions = [position(5, 2, float("-inf"))]
    assert segments_of(positions, " a", ZERO, (), 0, 1)[0].avg_logprob == -9999.0


SEGMENTS = [Segment(0.0, 1.25, " Hello\n\nyou", (5,), -1.0, 0.0), Segment(3661.5, 3662.0, " a --> b ", (6,), -1.0, 0.0)]


def test_srt() -> None:
    assert texts.srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello you\n\n2\n01:01:01,500 --> 01:01:02,000\na -> b\n\n"
    )


def test_vtt() -> None:
    assert texts.vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello you\n\n01:01:01.500 --> 01:01:02.000\na -> b\n\n"
    )
    assert texts.vtt([]) == "WEBVTT\n\n"


def joined(parts: list[list[str]], between: str = " ") -> str:
    joiner = texts.Joiner(between)
    return "".join(joiner.push(place, text) for place, chunk in enumerate(parts) for text in chunk)


@given(st.lists(st.lists(st.text("a \n", max_size=3), max_size=4), max_size=4))
def test_parts_make_the_text_that_whole_chunks_make(parts: list[list[str]]) -> None:
    assert joined(parts) == joined([["".join(chunk)] for chunk in parts])
    assert joined(parts) == " ".join(text for chunk in parts if (text := "".join(chunk).strip()))


def test_times_and_separators() -> None:
    assert joined([[" Hello", "<|1.00|>", " you "], [" ", " there"]]) == "Hello you there"
    assert joined([["あ"], ["い"]], texts.separator("ja")) == "あい"
    assert texts.separator("de") == " "
