"""The steps that a start runs, so that no later one has to compile: one of each kind of launch. Used by the engine; launches
nothing."""

from collections.abc import Iterator, Sequence

from meshlm.workers.graphs.dispatcher import ANY, LONG, SHORT, Key


def steps(
    decodes: list[int], rows: set[int], max_rows: int, longest_prompt: int, max_tokens: int
) -> Iterator[list[int]]:
    """Token counts of eager steps. decodes: numbers of requests whose decodes have all tiles of attention. rows: numbers of tokens
    which have all kinds of products between them, each up to so many.
    """
    for count in decodes:  # each tile is a variant, and each has one beside prompts
        yield [1] * count
        yield [1] * min(count, max_rows - 1) + [3]
    for length in (3, longest_prompt):  # prompts of either shape of tile
        yield [length]
    most = min(max_tokens, max_rows * longest_prompt)
    for tokens in sorted({min(number, most) for number in rows}):  # prompts: few requests may have many tokens
        rest = tokens % longest_prompt
        yield [longest_prompt] * (tokens // longest_prompt) + ([rest] if rest else [])


def graphs(keys: list[Key], rows: set[int], most: int) -> list[Key]:
    """One of the graphs of each kind: eager steps have neither lines that are in order nor one request more than may run.

    rows: as for `steps`, which have up to `most` tokens; with few requests the padding of a graph makes them more.
    """
    decodes = [key for key in keys if key.uniform and key.contexts == ANY]
    short = [key for key in keys if key.contexts == SHORT]
    mixed: dict[int, Key] = {}
    for key in keys:
        if not key.uniform:
            mixed.setdefault(key.requests, key)
    wide = {
        max((key for key in keys if not key.uniform and most < key.tokens <= number), default=None) for number in rows
    }
    return decodes[:1] + short + list(mixed.values()) + sorted(key for key in wide if key is not None)


def long(keys: list[Key], requests: Sequence[int]) -> list[Key]:
    """Mixed steps behind long contexts: prompts have the kernel for few tokens in the shortest, that for many keys in the longest."""
    tokens = [key.tokens for key in keys if not key.uniform]
    return [Key(number, most, contexts=LONG) for most in requests for number in sorted({*tokens[:1], *tokens[-1:]})]


def shared(keys: list[Key], numbers: list[int], max_rows: int) -> list[Key]:
    """Steps whose decodes share prefixes: with so many requests, which have all kinds of launches, and with one more than may run."""
    wide = [key for key in keys if not key.uniform and key.requests > max_rows]
    return [key._replace(shared=True) for key in [*(Key(number, number) for number in numbers), *wide[:1]]]
