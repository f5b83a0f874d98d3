"""The answer of one Generate call: tokens of its choices as gRPC messages. Pure; servicer.py sends what `take` gives.

Tokens that come while the client does not read are sent together when it does: nothing is queued here beside what a choice has.
"""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.openai.responses import AnswerHead, Response
from meshlm.protocol.edges.text import PositionLogprobs, PromptLogprobs
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.choice import Choice, RowDetails

ABORTED = "abort"


class GrpcResponse(Response):
    """Hears of its choices from request_tracker.py. The head's `on_end` is called whenever `take` may have something."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._on_news = head.on_end
        self._num_sent: dict[int, int] = {}  # tokens, by choice
        self._logprobs: dict[int, list[PositionLogprobs]] = {}  # by choice, of tokens that are not sent
        self._prompt_logprobs: dict[int, pb.InputLogProbs] = {}  # by choice, until its first message
        self._told: set[int] = set()  # choices whose end is sent
        self.is_aborted = False

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """Takes note of new tokens; their text is the client's to make."""
        if details is not None:
            self.note(choice, details)
            if details.logprobs:
                self._logprobs.setdefault(choice.index, []).extend(details.logprobs)
            if details.prompt_logprobs is not None:
                self._prompt_logprobs[choice.index] = input_logprobs(
                    details.prompt_logprobs, self.options.prompt_logprobs
                )
            if details.finished is not None:
                self.ended()
                return
        if self.options.stream:
            self._on_news()

    def abort(self) -> None:
        """The client asked for the end: `take` tells it of every choice that still ran."""
        self.is_aborted = True
        self._on_news()

    @property
    def is_over(self) -> bool:
        """True when no further message follows those that `take` gives now."""
        return self.is_aborted or self.error is not None or self.num_ended == len(self.choices)

    def take(self) -> list[pb.GenerateResponse]:
        """The messages for what came since the last call; of an answer that is not streamed, its end alone."""
        if not self.options.stream and not self.is_over:
            return []
        found = []
        for choice in self.choices:
            if choice.index in self._told:
                continue
            begin, end = self._num_sent.get(choice.index, 0), len(choice.token_ids)
            positions = self._logprobs.pop(choice.index, ())
            made = _News(choice, choice.token_ids[begin:end].tolist(), positions, self._num_cached(choice))
            if self.options.stream and end > begin:
                found.append(made.chunk(self._prompt_logprobs.pop(choice.index, None), self.options.logprobs))
            self._num_sent[choice.index] = end
            reason = self._reason(choice)
            if reason:
                self._told.add(choice.index)
                found.append(
                    made.complete(reason, self._prompt_logprobs.pop(choice.index, None), self.options.logprobs)
                )
        return found

    def _num_cached(self, choice: Choice) -> int:
        return self.num_cached.get(choice.prompt_index, 0)

    def _reason(self, choice: Choice) -> str:
        """finish_reason of the choice; empty while it runs."""
        if choice.finished is None:
            return ABORTED if self.is_aborted else ""
        return "" if choice.finished.reason is FinishReason.ERROR else choice.finished.reason.value


class _News:
    """The new tokens of one choice."""

    def __init__(
        self, choice: Choice, token_ids: list[int], positions: Sequence[PositionLogprobs], num_cached: int
    ) -> None:
        self._choice, self._token_ids, self._positions = choice, token_ids, positions
        self._num_cached = num_cached

    def chunk(self, prompt: pb.InputLogProbs | None, num_logprobs: int) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=self._token_ids,
                prompt_tokens=self._choice.num_prompt_tokens,
                completion_tokens=len(self._token_ids),
                cached_tokens=self._num_cached,
                output_logprobs=output_logprobs(self._positions, num_logprobs),
                input_logprobs=prompt,
                index=self._choice.index,
            )
        )

    def complete(self, reason: str, prompt: pb.InputLogProbs | None, num_logprobs: int) -> pb.GenerateResponse:
        """The end of the choice: with all its tokens, or those of the last chunk where it was streamed, as from vLLM."""
        finished = self._choice.finished
        stop = None if finished is None else finished.stop_reason
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=self._token_ids,
                finish_reason=reason,
                prompt_tokens=self._choice.num_prompt_tokens,
                completion_tokens=len(self._token_ids),
                cached_tokens=self._num_cached,
                output_logprobs=output_logprobs(self._positions, num_logprobs),
                input_logprobs=prompt,
                index=self._choice.index,
                matched_token_id=stop if isinstance(stop, int) else None,
                matched_stop_str=stop if isinstance(stop, str) else None,
            )
        )


def output_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> pb.OutputLogProbs | None:
    """Log-probabilities of output tokens, each with the `num_top` likeliest; None without any."""
    if num_top < 0 or not positions:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.token.logprob for position in positions],
        token_ids=[position.token.token_id for position in positions],
        top_logprobs=_tops(positions, num_top),
    )


def input_logprobs(found: PromptLogprobs, num_top: int) -> pb.InputLogProbs:
    """Log-probabilities of a prompt's tokens; the first one has none."""
    positions = list(positions_of(found))
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=position.token.logprob) for position in positions),
        ],
        token_ids=memoryview(found.token_ids).cast("i").tolist(),
        top_logprobs=[pb.TopLogProbs(), *_tops(positions, num_top)],
    )


def _tops(positions: Sequence[PositionLogprobs], num_top: int) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(
            values=[token.logprob for token in position.top[:num_top]],
            token_ids=[token.token_id for token in position.top[:num_top]],
        )
        for position in positions
    ]
