"""Keys of blocks: the tokens before a block and what else decides its contents."""

from array import array

from meshlm.scheduler_proc.kv import hashes

TOKENS = array("i", range(16))


def chain(extra: dict[int, bytes]) -> list[bytes]:
    found: list[bytes] = []
    hashes.extend(found, extra, TOKENS, 4, len(TOKENS))
    return found


def test_an_extra_key_counts_from_its_own_block_on() -> None:
    plain, image = chain({}), chain({2: b"image"})
    assert plain[:2] == image[:2], "the text before it is shared"
    assert not set(plain[2:]) & set(image[2:])
    assert not set(image[2:]) & set(chain({2: b"other"}))


def test_a_salt_counts_from_the_first_block_on() -> None:
    assert hashes.extra_keys("") == {}
    chains = [chain(hashes.extra_keys(salt)) for salt in ("", "a", "b")]
    assert len({block_hash for one in chains for block_hash in one}) == 12


def test_a_chain_may_be_made_piece_by_piece() -> None:
    extra = {0: b"a", 3: b"b", 9: b"c"}
    found: list[bytes] = []
    for num_tokens in (3, 4, 6, 13, 13, 16):
        hashes.extend(found, extra, TOKENS, 4, num_tokens)
        assert len(found) == num_tokens // 4
    assert found == chain(extra)
