"""How fast one HTTP request goes in and comes out: prompts as its sequences begin, news N tokens at a time (--stream-interval N). Pure.

Thousands of prompts do not come at once: every process from here to the workers would have them before others' tokens, and no batch
takes them faster. Used by generation.py."""

from collections.abc import Sequence

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import Accepted, PositionLogprobs
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.client.placement import NO_DETAILS, Choice, ResponseSink, RowDetails

MOST_WAITING = 256  # sequences of a request without a first token, for each rank: a batch does not run dry of them


def most_waiting(config: MeshConfig) -> int:
    """The sequences of a request that may be in the mesh without a token."""
    return MOST_WAITING * config.parallel.data_parallel_size


class Pace:
    """The sequences of one request that were asked for and have no token yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[Choice] = []

    def room(self, num: int) -> bool:
        """Whether `num` more may be asked for now. A prompt has all its choices at once, however many they are."""
        if len(self._waiting) + num > self._most:
            self._waiting = [choice for choice in self._waiting if not choice.first_at and choice.finished is None]
        return not self._waiting or len(self._waiting) + num <= self._most

    def asked(self, choices: Sequence[Choice]) -> None:
        """These were asked for."""
        self._waiting += choices


class _Held:
    """Rows of one choice that wait for more."""

    def __init__(self) -> None:
        self.num_tokens, self.texts = 0, [""]
        self.logprobs: list[PositionLogprobs] | None = None


class Interval:
    """A ResponseSink before another."""

    def __init__(self, answer: ResponseSink, num_tokens: int) -> None:
        self._answer, self._num_tokens = answer, num_tokens
        self.choices = answer.choices
        self.has_begun = False
        self._held: dict[int, _Held] = {}  # by choice, from its first row on

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        self._answer.accepted(choice, accepted)

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        begun = choice.index in self._held
        held = self._held.setdefault(choice.index, _Held())
        held.num_tokens += num_tokens
        held.texts.append(text)
        details = details or NO_DETAILS
        if details.logprobs is not None:
            held.logprobs = (held.logprobs or []) + details.logprobs
        retry = choice.submit.retry
        cut = retry.cuts[0] if retry is not None and retry.cuts else 0
        waits = begun and not (details.finished or details.prompt_logprobs or details.first)
        # What a client has ends an event.
        if waits and held.num_tokens < self._num_tokens and len(choice.token_ids) != cut:
            return
        self._held[choice.index] = _Held()
        self._answer.row(choice, held.num_tokens, "".join(held.texts), replace(details, logprobs=held.logprobs))

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        """The client gets what there was."""
        held = self._held.pop(choice.index, None)
        if held is not None and held.num_tokens:
            self._answer.row(choice, held.num_tokens, "".join(held.texts), RowDetails(logprobs=held.logprobs))
        self._answer.failed(choice, kind, message, param)
