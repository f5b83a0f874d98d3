"""Which steps a start runs, so that no later one has to compile: one of each kind of launch. Used by the engine; launches nothing."""

from collections.abc import Iterator

from meshlm.workers.cuda.graphs import Key


def steps(decodes: list[int], max_rows: int, longest_prompt: int) -> Iterator[list[int]]:
    """Token counts of steps by hand. decodes: numbers of requests whose decodes have all tiles of attention."""
    for count in decodes:  # each tile is a variant, and each has one beside prompts
        yield [1] * count
        yield [1] * min(count, max_rows - 1) + [3]
    for length in (3, longest_prompt):  # prompts of either shape of tile
        yield [length]


def graphs(keys: list[Key]) -> list[Key]:
    """Of the graphs, one of each kind: steps by hand have neither lines that are in order nor one request more than may run."""
    decodes = [key for key in keys if key.uniform]
    mixed: dict[int, Key] = {}
    for key in keys:
        if not key.uniform:
            mixed.setdefault(key.requests, key)
    return decodes[:1] + list(mixed.values())
