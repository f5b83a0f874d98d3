"""Keys of blocks: the tokens before a block and what else decides its contents."""

from array import array

from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.wire.parts import joined
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.kv.hashes import ExtraKeys

TOKENS = array("i", range(16))


def embeds(*values: int, first: int = 8) -> ExtraKeys:
    """Vectors of one byte each, from a position on."""
    return ExtraKeys("", (PromptEmbeds("float32", ((first, len(values)),), bytes(values)),))


def chain(extra: ExtraKeys) -> list[bytes]:
    found: list[bytes] = []
    hashes.extend(found, extra, TOKENS, 4, len(TOKENS))
    return found


def test_vectors_count_from_their_own_block_on() -> None:
    plain, some = chain(ExtraKeys()), chain(embeds(1, 2))
    assert plain[:2] == some[:2], "the text before it is shared"
    assert not set(plain[2:]) & set(some[2:])
    assert not set(some[2:]) & set(chain(embeds(1, 3))[2:])
    assert not set(some[2:]) & set(chain(embeds(1, 2, first=9))[2:]), "where they stand counts"


def test_a_common_beginning_of_vectors_is_shared() -> None:
    one, other = chain(embeds(*range(12), first=0)), chain(embeds(*range(8), 99, 98, 97, 96, first=0))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_a_salt_counts_from_the_first_block_on() -> None:
    chains = [chain(ExtraKeys(salt)) for salt in ("", "a", "b")]
    assert len({block_hash for one in chains for block_hash in one}) == 12


def test_a_chain_may_be_made_piece_by_piece() -> None:
    extra = embeds(*range(9), first=2)._replace(cache_salt="a")
    found: list[bytes] = []
    for num_tokens in (3, 4, 6, 13, 13, 16):
        hashes.extend(found, extra, TOKENS, 4, num_tokens)
        assert len(found) == num_tokens // 4
    assert found == chain(extra)


def test_no_salt_stands_for_another_and_vectors() -> None:
    """A client chooses its salt, which must not spell out another's salt with the vectors behind it."""
    vectors = embeds(1, 2, first=0)._replace(cache_salt="s")
    assert vectors.extras
    begins = ["s", "s\0", "s" + chr(6) + "\0" * 7]
    texts = [f"{begin}embeds\0float32\0{tail}" for begin in begins for tail in ("0 2\0\1\2", "\1\2")]
    first = chain(vectors)[0]
    assert first not in {chain(ExtraKeys(text))[0] for text in texts}


def test_no_two_lists_of_parts_are_joined_alike() -> None:
    lists = [
        (),
        (b"",),
        (b"", b""),
        (b"ab",),
        (b"a", b"b"),
        (b"a\0b",),
        (b"a", b"\0b"),
        (b"a\0", b"b"),
        (b"salt", b"a"),
    ]
    assert len({joined(*parts) for parts in lists}) == len(lists)
