"""One request's journal entry: what is needed to decode it and to have it continued elsewhere."""

from array import array
from enum import Enum

from meshlm.detokenizer.decode import Decoder, TokenTable
from meshlm.detokenizer.kept_logprobs import KeptLogprobs
from meshlm.detokenizer.stops import StopFinder
from meshlm.protocol.edges.admit import EngineRequest, SchedulerIncarnation
from meshlm.protocol.edges.text import Finished, PositionLogprobs, PromptLogprobs, RequestEvent, Submit
from meshlm.protocol.edges.token import Ended, First
from meshlm.protocol.extras import Extras
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.deaths import Death


class RequestStatus(Enum):
    """ENCODING -> ADMITTED (again after a scheduler's or the coordinator's death) -> FINISHED, with an Idempotency-Key -> gone."""

    ENCODING = "encoding"
    ADMITTED = "admitted"
    FINISHED = "finished"


REPETITION_DETECTED = "repetition_detected"
NOBODY = Identity(Role.FRONTEND, -1)  # the frontend of a request whose client is away


class RequestState:
    """Changed by core.py and its bases, and by itself in `push`."""

    __slots__ = (
        "arrival_s",
        "asked",
        "asked_at",
        "attempt",
        "batch",
        "begun_with",
        "crashed_at",
        "cut",
        "deaths",
        "decoder",
        "encode_s",
        "extras",
        "finished",
        "first",
        "frontend",
        "frontend_handle",
        "frontend_incarnation",
        "handle",
        "heard",
        "hidden",
        "logprobs",
        "measured",
        "num_crashes",
        "num_in_hand",
        "num_measured",
        "num_told",
        "output_token_ids",
        "place",
        "pooled",
        "preempted_us",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "retried",
        "route_s",
        "sampling",
        "scheduler",
        "slow",
        "status",
        "stop",
        "submit",
        "submitted_at",
        "tail",
        "told_again",
        "work_id",
    )

    def __init__(
        self,
        submit: Submit,
        choice: int,
        sender: Identity,
        incarnation: Incarnation,
        handle: Handle,
        logprobs: list[PositionLogprobs],
    ) -> None:
        """`logprobs`: of what is delivered."""
        self.submit = submit
        self.request_id: RequestId = submit.request_ids[choice]
        self.work_id = self.request_id  # its name at the coordinator and the schedulers
        self.frontend, self.frontend_incarnation = sender, incarnation
        self.frontend_handle = submit.handles[choice]
        self.handle = handle
        self.attempt = submit.attempt
        self.status = RequestStatus.ENCODING
        self.prompt: array[int] = array("i")
        self.extras: Extras = ()
        self.output_token_ids: array[int] = array("i")
        self.sampling: SamplingParams = submit.sampling
        self.asked = Incarnation(0)  # the incarnation of the coordinator that this attempt's Admit went to; 0: none yet
        self.submitted_at = self.asked_at = 0.0  # when its prompt came, and when that Admit left
        self.preempted_us: tuple[int, ...] = ()  # before its end, as its scheduler said
        self.retried: list[tuple[float, str]] = []  # when other attempts began, and why
        self.encode_s = self.route_s = 0.0  # from the one to its tokens, and from the other to a rank
        self.scheduler: SchedulerIncarnation | None = None  # which has this attempt
        self.heard = False  # tokens of this attempt came
        self.deaths: tuple[Death, ...] = ()  # of schedulers and the coordinator, that it met since the last token
        self.num_in_hand = 0  # deaths of schedulers and the coordinator that had it in hand
        self.begun_with = 0  # tokens that there were after the last such death
        self.num_crashes = 0  # deaths of workers at ranks that gave it back, without a token between them ...
        self.crashed_at = 0  # ... and its tokens then
        self.decoder: Decoder | None = None
        self.stop: StopFinder | None = None
        self.batch: object = None  # the batch whose row `place` may still take more of this request's tokens
        self.place = 0
        self.measured: Decoder | None = None  # of those that want logprobs: has read `num_measured` tokens
        self.num_measured = 0
        self.slow = False  # its tokens need more than a look-up and a row of their own
        # Only with a Retry: what is needed to send everything again.
        self.arrival_s = submit.arrival_s  # of the connection that has it
        cuts = submit.retry.cuts if submit.retry is not None else ()
        self.cut = cuts[choice] if choice < len(cuts) else 0  # a row must begin at this token
        self.num_told = len(submit.delivered) // 4  # tokens that connections before this one had
        self.told_again = 0  # tokens that this connection was told again
        self.logprobs = KeptLogprobs(logprobs)
        self.prompt_logprobs: PromptLogprobs | None = None
        self.first: First | None = None
        self.finished: Finished | None = None
        self.hidden = False  # the last token is not shown
        self.tail = ""  # text behind the last token's
        self.pooled = b""  # the vector, at the end

    def begin(self, table: TokenTable, prompt: "array[int]", sampling: SamplingParams, extras: Extras) -> None:
        """The prompt is encoded. Ids that the client has already (resume) are decoded silently."""
        self.prompt, self.sampling, self.extras = prompt, sampling, extras
        self.decoder, self.stop = self.reader(table)
        for token in array("i", self.submit.delivered):
            self.push(token)
        self.begun_with = len(self.output_token_ids)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Whether the next tokens need more than a look-up and a search for stop strings."""
        self.slow = len(self.output_token_ids) < self.cut

    def reader(self, table: TokenTable) -> tuple[Decoder, StopFinder | None]:
        """The state of decoding, before the first token."""
        text = self.submit.text
        stop = StopFinder(text.stop, text.include_stop_str_in_output) if text.stop else None
        return table.decoder(text.skip_special_tokens, text.keep_special_tokens), stop

    def push(self, token: int) -> str:
        """One more output token; the text to show. `stop.matched` is set when a stop string is complete."""
        assert self.decoder is not None
        self.output_token_ids.append(token)
        text = self.decoder.push(token)
        return text if self.stop is None else self.searched(self.stop, text, len(self.output_token_ids))

    def searched(self, stop: StopFinder, text: str, num_tokens: int) -> str:
        """The text of token number `num_tokens`, as far as it may be shown."""
        return stop.push(text) if num_tokens > self.sampling.min_tokens else text

    @property
    def repeats(self) -> bool:
        """Whether its output ends in a pattern that the request does not want."""
        detection, ids = self.sampling.repetition_detection, self.output_token_ids
        return detection is not None and len(ids) >= max(1, self.sampling.min_tokens) and detection.ends(ids, 0)

    def num_chars(self, table: TokenTable, count: int) -> list[int]:
        """The number of characters that each of the newest tokens brings to the text, stop strings apart."""
        if self.measured is None:
            self.measured = self.reader(table)[0]
        sizes = [len(self.measured.push(token)) for token in self.output_token_ids[self.num_measured :]]
        self.num_measured = len(self.output_token_ids)
        return sizes[len(sizes) - count :]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """It goes on after a detokenizer's death, and what it had then comes again with its next token."""
        wanted = self.sampling.prompt_logprobs >= 0 and len(self.prompt) > 1
        return wanted and self.prompt_logprobs is None and self.finished is None

    def push_silent(self, token: int) -> str:
        """A stop token: counted, not shown."""
        self.output_token_ids.append(token)
        return ""

    def finish(self) -> str:
        """The text that was held back, at the end without a stop string."""
        assert self.decoder is not None
        rest = self.decoder.finish()
        if self.stop is None:
            return rest
        shown = self.stop.push(rest)
        return shown if self.stop.matched is not None else shown + self.stop.finish()

    def hides(self, ended: Ended | None) -> bool:
        """Whether the last token of this end is a stop token that the client should not read."""
        return ended is not None and ended.stop_token_id >= 0 and not self.submit.text.include_stop_str_in_output

    def events(self, now: float) -> tuple[RequestEvent, ...]:
        """Preemptions and retries, at its end."""
        preempted = [RequestEvent(ago_us, "preemption") for ago_us in self.preempted_us]
        return (*preempted, *(RequestEvent(int((now - at) * 1e6), "retry", why) for at, why in self.retried))

    def stop_reason(self, ended: Ended) -> str | int | None:
        """vLLM's `stop_reason`: the client's stop token id, None for the model's own end."""
        if ended.reason is FinishReason.REPETITION:
            return REPETITION_DETECTED
        stop_ids = (-1, *self.sampling.eos_token_ids)
        if ended.reason is FinishReason.STOP and ended.stop_token_id not in stop_ids:
            return ended.stop_token_id
        return None

    def work(self) -> EngineRequest:
        """The request as a scheduler needs it now."""
        return EngineRequest(
            request_id=self.work_id,
            handle=self.handle,
            prompt_token_ids=self.prompt.tobytes(),
            sampling=self.sampling,
            attempt=self.attempt,
            output_token_ids=self.output_token_ids.tobytes(),
            priority=self.submit.priority,
            cache_salt=self.submit.cache_salt,
            arrival_s=self.submit.arrival_s,
            deadline_s=self.submit.deadline_s,
            num_crashes=self.num_crashes if len(self.output_token_ids) == self.crashed_at else 0,
            extras=self.extras,
        )
