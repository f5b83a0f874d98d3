"""A model for tests whose state is a rolling hash of all tokens before: its tokens and vectors prove which KV they were made from."""

from collections.abc import Callable, Iterable

from meshlm.protocol.pool import PoolKind


def extend(state: int, token: int) -> int:
    """The state after one token more."""
    return (state * 1_000_003 + token + 1) % (1 << 61)


def generate(prompt: Iterable[int], num_tokens: int, next_token: Callable[[int], int], stop: int = -1) -> list[int]:
    """The tokens of an undisturbed run, up to `stop` if it comes."""
    state = 0
    for token in prompt:
        state = extend(state, token)
    found: list[int] = []
    while len(found) < num_tokens:
        found.append(next_token(state))
        if found[-1] == stop:
            break
        state = extend(state, found[-1])
    return found


def vector_of(states: list[int], kind: PoolKind) -> bytes:
    """Eight bytes that only the right states give: of the last token, of all, or of the first; or eight for each token."""
    if kind is PoolKind.ALL:
        return b"".join(state.to_bytes(8, "little") for state in states)
    numbers = {PoolKind.LAST: states[-1], PoolKind.MEAN: sum(states) % (1 << 61), PoolKind.CLS: states[0]}
    number = max(states) if kind is PoolKind.SPLADE else numbers[kind]
    return number.to_bytes(8, "little")


def pooled_reference(prompt: Iterable[int], kind: PoolKind) -> bytes:
    """The vector of a prompt."""
    states = [0]
    for token in prompt:
        states.append(extend(states[-1], token))
    return vector_of(states[1:], kind)
