"""Where repetition ends an answer: the definition, and the search that is made after each token."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.sampling import RepetitionDetection


def defined(tokens: list[int], wanted: RepetitionDetection) -> bool:
    """Some pattern of an allowed length stands so often at the end."""
    return any(
        len(tokens) >= size * wanted.min_count
        and tokens[-size * wanted.min_count :] == tokens[-size:] * wanted.min_count
        for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1)
    )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 4), st.integers(0, 5), st.integers(2, 4))
def test_the_search_finds_what_is_defined(tokens: list[int], smallest: int, more: int, count: int) -> None:
    wanted = RepetitionDetection(smallest + more, smallest, count)
    assert wanted.ends(array("i", tokens), 0) == defined(tokens, wanted)


def test_the_prompt_does_not_count() -> None:
    wanted = RepetitionDetection(max_pattern_size=2, min_count=3)
    assert wanted.ends(array("i", [1, 2, 1, 2, 1, 2]), 0)
    assert not wanted.ends(array("i", [1, 2, 1, 2, 1, 2]), 1)
