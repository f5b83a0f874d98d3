"""Beam search, token by token, as vLLM has it: `width` sequences live, each goes on with its likeliest tokens, and the best of all that
ended or still live are the answer. The HTTP process and the Python API give `search` the step that asks the mesh for log-probabilities.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Beam(NamedTuple, Generic[T]):
    """One sequence. `details` are the caller's own, one for each token."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # of all its tokens, its end's too
    details: tuple[T, ...] = ()
    end: int = -1  # the token that ended it, which is not in token_ids; -1: none has


class Candidate(NamedTuple, Generic[T]):
    """A token that may follow a beam."""

    token_id: int
    logprob: float
    detail: T


class BeamSearch(Generic[T]):
    """One prompt's search. `beams` live; each is to be given its likeliest tokens, `num_candidates` of them."""

    def __init__(
        self, width: int, ends: Collection[int], num_prompt: int, max_tokens: int, length_penalty: float = 1.0
    ) -> None:
        """ends: tokens that end a sequence; none, where they are ignored."""
        self._width, self._ends, self._num_prompt, self._penalty = width, ends, num_prompt, length_penalty
        self._longest = num_prompt + max_tokens
        self.num_left = max_tokens
        self.beams: list[Beam[T]] = [Beam()]
        self._completed: list[Beam[T]] = []

    @property
    def is_over(self) -> bool:
        """No token is left, no beam lives, or none that does can still be among the best."""
        if not self.num_left or not self.beams:
            return True
        if len(self._completed) < self._width:
            return False
        worst = sorted(map(self._score, self._completed), reverse=True)[self._width - 1]
        return all(self._bound(beam) <= worst for beam in self.beams)

    def take(self, candidates: Sequence[Sequence[Candidate[T]]]) -> None:
        """The likeliest tokens of each of `beams`, in their order."""
        found: list[tuple[float, Beam[T], Candidate[T]]] = []
        for beam, mine in zip(self.beams, candidates, strict=True):
            for one in mine:
                logprob = beam.logprob + one.logprob
                if one.token_id in self._ends:
                    self._completed.append(beam._replace(logprob=logprob, end=one.token_id))
                else:
                    found.append((logprob, beam, one))
        found.sort(key=lambda each: -each[0])
        self.beams = [
            Beam((*beam.token_ids, one.token_id), logprob, (*beam.details, one.detail))
            for logprob, beam, one in found[: self._width]
        ]
        self.num_left -= 1

    def best(self) -> list[Beam[T]]:
        return sorted([*self._completed, *self.beams], key=self._score, reverse=True)[: self._width]

    def _score(self, beam: Beam[T]) -> float:
        """The mean log-probability with a length_penalty of 1; the prompt's tokens count, as in vLLM."""
        score: float = beam.logprob / float(self._num_prompt + len(beam.token_ids)) ** self._penalty
        return score

    def _bound(self, beam: Beam[T]) -> float:
        """The score that it could have at most, if all that is to come were certain."""
        longest = self._longest if self._penalty > 0 else self._num_prompt + len(beam.token_ids)
        score: float = beam.logprob / float(longest) ** self._penalty
        return score


Step = Callable[[list[tuple[int, Beam[T]]]], Awaitable[Sequence[Sequence[Candidate[T]]]]]


async def search(searches: Sequence[BeamSearch[T]], step: Step[T]) -> None:
    """Takes steps until all are over. `step` gives the likeliest tokens of all live beams, each with the index of its search."""
    while live := [(index, one) for index, one in enumerate(searches) if not one.is_over]:
        candidates = iter(await step([(index, beam) for index, one in live for beam in one.beams]))
        for _, one in live:
            one.take(list(islice(candidates, len(one.beams))))


def num_candidates(width: int, vocab_size: int) -> int:
    """The likeliest tokens that each beam is gone on with: where all but one end it, `width` live on."""
    return min(2 * width, vocab_size)
