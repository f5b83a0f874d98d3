"""--stream-interval N: what an HTTP request does with news of its choices, N tokens at a time.

Pure. generation.py puts one between a streamed answer's choices and the answer. The first row and the end pass at once, as in vLLM.
"""

from array import array

from meshlm.frontend.choice import Choice, ResponseSink
from meshlm.protocol.ids import ErrorKind
from meshlm.protocol.text_edge import Accepted, Finished, PositionLogprobs, PromptLogprobs
from meshlm.protocol.token_edge import First


class _Held:
    """Rows of one choice that wait for more."""

    def __init__(self) -> None:
        self.token_ids, self.texts = array("i"), [""]
        self.logprobs: list[PositionLogprobs] | None = None


class Interval:
    """A ResponseSink before another."""

    def __init__(self, answer: ResponseSink, num_tokens: int) -> None:
        self._answer, self._num_tokens = answer, num_tokens
        self.choices = answer.choices
        self._held: dict[int, _Held] = {}  # by choice, from its first row on

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        self._answer.accepted(choice, accepted)

    def row(
        self,
        choice: Choice,
        token_ids: memoryview,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: PromptLogprobs | None,
        first: First | None,
    ) -> None:
        begun = choice.index in self._held
        held = self._held.setdefault(choice.index, _Held())
        held.token_ids.extend(token_ids)
        held.texts.append(text)
        if logprobs is not None:
            held.logprobs = (held.logprobs or []) + logprobs
        retry = choice.submit.retry
        cut = retry.cuts[0] if retry is not None and retry.cuts else 0
        waits = begun and finished is None and prompt_logprobs is None and first is None
        if (
            waits and len(held.token_ids) < self._num_tokens and len(choice.token_ids) != cut
        ):  # what a client has ends an event
            return
        self._held[choice.index] = _Held()
        ids, text = memoryview(held.token_ids), "".join(held.texts)
        self._answer.row(choice, ids, text, finished, held.logprobs, prompt_logprobs, first)

    def text(self, choice: Choice, token_ids: memoryview, text: str) -> None:
        self.row(choice, token_ids, text, None, None, None, None)

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        """The client gets what there was."""
        held = self._held.pop(choice.index, None)
        if held is not None and held.token_ids:
            ids, text = memoryview(held.token_ids), "".join(held.texts)
            self._answer.row(choice, ids, text, None, held.logprobs, None, None)
        self._answer.failed(choice, kind, message, param)
