"""Where long audio is cut."""

import numpy as np
import pytest
from audio_clips import tone
from hypothesis import given
from hypothesis import strategies as st

from meshlm.frontend.speech import audio_files as chunks
from meshlm.protocol.audio import SAMPLE_RATE


@pytest.mark.parametrize("num_samples", [1, SAMPLE_RATE, 2 * SAMPLE_RATE])
def test_what_the_encoder_takes_is_one_chunk(num_samples: int) -> None:
    assert list(chunks.ranges(np.ones(num_samples, np.float32), 2)) == [(0, num_samples)]


def test_it_is_cut_where_it_is_quiet() -> None:
    audio = tone(5.0)
    for second in (2.4, 4.9):
        audio[round(second * SAMPLE_RATE) :][: SAMPLE_RATE // 5] = 0
    found = list(chunks.ranges(audio, 3))
    assert [begin for begin, _ in found] == [0, found[0][1]]
    assert 2.4 * SAMPLE_RATE < found[0][1] < 2.6 * SAMPLE_RATE


def test_without_a_quiet_place_chunks_are_long() -> None:
    found = list(chunks.ranges(np.zeros(10 * SAMPLE_RATE, np.float32), 3))
    assert all(2.9 * SAMPLE_RATE < end - begin <= 3 * SAMPLE_RATE for begin, end in found[:-1])


@given(st.integers(1, 20 * SAMPLE_RATE), st.integers(1, 5), st.integers(0, 99))
def test_chunks_are_all_of_the_sound_and_none_is_too_long(num_samples: int, seconds: int, seed: int) -> None:
    audio = np.random.default_rng(seed).normal(size=num_samples).astype("f4")
    found = list(chunks.ranges(audio, seconds))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == num_samples
    assert all(0 < end - begin <= seconds * SAMPLE_RATE for begin, end in found)
