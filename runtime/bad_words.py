"""The sequences of tokens that write a word which may not come (`bad_words`). Pure.

The detokenizer bans these; frontends count what they may take (`num_ids`). The text shows a word behind a space however it is cut
into tokens, and a model whose usual token is banned takes another cut, so all cuts of the spaced word count, those of the fewest tokens
first. Elsewhere a word is banned as tokenizers write it at its begin (of the text, or behind a mark that stands before words), since
the same pieces also end longer words: "th", "e" in "bathe".
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise

LONGEST = 32  # characters of a word that is cut, and looked for behind MARKS
CUTS = 64  # of one word
CUTS_OF_REQUEST = 1024  # of all words of a request together
MAX_CUT = 3  # tokens of one
# Marks that stand before words. No apostrophe: "'re" is a word's end.
MARKS = ("\n", '"', ' "', "(", " (", "[", "{", "*", "**", " **", "`", " `", "-", "/", "<", ">", ":", "“", "‘", "«")

Ids = tuple[int, ...]


def num_ids(words: Sequence[str]) -> int:
    """Token ids that the sequences of these words have at most."""
    short = [word for word in words if len(word) <= LONGEST]
    written = 3 * sum(len(word) + 1 for word in words) + len(MARKS) * sum(len(word) + 1 for word in short)
    return written + len(short) * _cuts_of_each(words) * MAX_CUT


def sequences(
    words: Sequence[str],
    encode: Callable[[list[str]], list[Ids]],
    text_of: Callable[[int], str | None],
    token_of: Callable[[str], int | None],
) -> tuple[Ids, ...]:
    """What may not come, of all words. encode: texts without special tokens; text_of, token_of: of the vocabulary's own letters."""
    bare = list(dict.fromkeys(word.lstrip() for word in words))
    texts = {word: _texts(word) for word in bare}
    asked = list(dict.fromkeys(("a", *MARKS, *(text for each in texts.values() for text in each))))
    known = dict(zip(asked, encode(asked), strict=True))
    found: list[Ids] = []
    for word in bare:
        found += [known[word], known[f" {word}"]]
        spaced = _behind("a", known[f"a {word}"], known)
        found += [spaced]
        found += [_behind(mark, ids, known, whole=True) for mark in MARKS if (ids := known.get(mark + word))]
        pieces = [text_of(token) or "" for token in spaced]
        if len(word) <= LONGEST and all(pieces):
            found += cuts("".join(pieces), token_of, _cuts_of_each(words))
    return _shortest(found)


def cuts(text: str, token_of: Callable[[str], int | None], most: int) -> list[Ids]:
    """The ways to write `text` in at most MAX_CUT tokens, those of fewer tokens first, `most` of them."""
    tokens: dict[tuple[int, int], int | None] = {}
    found: list[Ids] = []
    for num_cuts in range(MAX_CUT):
        for places in combinations(range(1, len(text)), num_cuts):
            ids = []
            for span in pairwise((0, *places, len(text))):
                if span not in tokens:
                    tokens[span] = token_of(text[slice(*span)])
                if (token := tokens[span]) is None:
                    break
                ids.append(token)
            else:
                found.append(tuple(ids))
                if len(found) >= most:
                    return found
    return found


def _cuts_of_each(words: Sequence[str]) -> int:
    return min(CUTS, CUTS_OF_REQUEST // max(1, len(words)))


def _texts(word: str) -> list[str]:
    plain = [word, f" {word}", f"a {word}", f"\n{word}"]
    return [*plain, *(mark + word for mark in MARKS)] if len(word) <= LONGEST else plain


def _behind(before: str, ids: Ids, known: dict[str, Ids], *, whole: bool = False) -> Ids:
    """What follows the tokens of `before`; where the two share a token, all or none."""
    begin = known[before]
    if ids[: len(begin)] == begin:
        return ids[len(begin) :]
    return ids if whole else ()


def _shortest(found: Iterable[Ids]) -> tuple[Ids, ...]:
    """Each once, without those that end with another: that one bans them too."""
    each = dict.fromkeys(ids for ids in found if ids)
    return tuple(ids for ids in each if not any(ids[begin:] in each for begin in range(1, len(ids))))
