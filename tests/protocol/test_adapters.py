"""Where an activated adapter (aLoRA) begins in a prompt, and which blocks of KV are the base's."""

from array import array

import pytest

from meshlm.protocol.adapters import NEVER, Adapter
from meshlm.protocol.wire.columns import pack_i32

PLAIN = Adapter("a", "/a", b"d" * 32)
CALLED = Adapter("a", "/a", b"d" * 32, pack_i32([1, 2]))


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ([1, 2, 3], 0),
        ([3, 1, 2], 1),
        ([1, 2, 5, 1, 2, 6], 3),
        ([1, 1, 1, 2], 2),
        ([2, 1], NEVER),
        ([], NEVER),
        ([256, 512], NEVER),  # whose bytes have those of 1 and 2, at other places
    ],
)
def test_the_last_place_of_a_prompt_counts(prompt: list[int], first: int) -> None:
    assert CALLED.in_prompt(array("i", prompt)).first == first
    assert PLAIN.in_prompt(array("i", prompt)) == PLAIN
    assert PLAIN.first == 0


def test_blocks_before_it_have_no_key() -> None:
    found = CALLED.in_prompt(array("i", [7, 7, 7, 7, 7, 1, 2, 7]))
    keys = [found.key_parts(begin, begin + 4) for begin in range(0, 12, 4)]
    assert [bool(key) for key in keys] == [False, True, False]
    other = CALLED.in_prompt(array("i", [7, 7, 7, 7, 7, 1, 2, 1, 2]))
    assert other.key_parts(4, 8) != keys[1], (
        "the tokens of the block are the same ones, and begin elsewhere to be changed"
    )
    assert [bool(PLAIN.key_parts(begin, begin + 4)) for begin in (0, 4)] == [True, False]
    assert not any(CALLED.in_prompt(array("i", [7] * 8)).key_parts(begin, begin + 4) for begin in (0, 4))


def test_what_is_left_of_a_prompt_has_its_own_places() -> None:
    found = CALLED.in_prompt(array("i", [1, 2, 7, 1, 2, 7, 1, 2]))
    assert found.first == 6
    assert found.cut(0, 7).first == 3
    assert found.cut(4, 8).first == 2
    assert found.cut(1, 3).first == NEVER
    assert PLAIN.cut(1, 3) == PLAIN
