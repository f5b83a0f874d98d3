"""One request's journal entry: what is needed to decode it and to have it continued elsewhere."""

from array import array
from dataclasses import InitVar, dataclass, field

from meshlm.detokenizer.decode import Decoder, TokenTable
from meshlm.detokenizer.kept_logprobs import KeptLogprobs
from meshlm.detokenizer.states import TRANSITIONS, RequestStatus
from meshlm.detokenizer.stops import StopFinder
from meshlm.protocol.edges.admit import EngineRequest, SchedulerIncarnation
from meshlm.protocol.edges.text import Finished, PositionLogprobs, PromptLogprobs, RequestEvent, Submit
from meshlm.protocol.edges.token import Ended, First
from meshlm.protocol.extras import Extras
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.deaths import Death
from meshlm.runtime.process.events import check_transition

REPETITION_DETECTED = "repetition_detected"
NOBODY = Identity(Role.FRONTEND, -1)  # the frontend of a request whose client is away


@dataclass(slots=True, eq=False)
class RequestState:
    """Changed by core.py, journal.py and attempts.py, and by itself in `push`. `told`: log-probabilities of what is delivered."""

    submit: Submit
    choice: InitVar[int]
    frontend: Identity
    frontend_incarnation: Incarnation
    handle: Handle
    told: InitVar[list[PositionLogprobs]]
    request_id: RequestId = field(init=False)
    work_id: RequestId = field(init=False)  # its name at the coordinator and the schedulers
    frontend_handle: Handle = field(init=False)
    attempt: int = field(init=False)
    status: RequestStatus = RequestStatus.ENCODING
    prompt: "array[int]" = field(default_factory=lambda: array("i"))
    extras: Extras = ()
    output_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sampling: SamplingParams = field(init=False)
    asked: Incarnation = Incarnation(0)  # the incarnation of the coordinator that got this attempt's Admit
    submitted_at: float = 0.0  # when its prompt came ...
    asked_at: float = 0.0  # ... and when that Admit left
    preempted_us: tuple[int, ...] = ()  # before its end, as its scheduler said
    drafts: bytearray = field(default_factory=bytearray)  # as in Finished
    kv_transfer: bytes = b""  # as in Ended
    retried: list[tuple[float, str]] = field(default_factory=list)  # when other attempts began, and why
    encode_s: float = 0.0  # from its prompt's arrival to its tokens ...
    route_s: float = 0.0  # ... and from the Admit to a rank
    scheduler: SchedulerIncarnation | None = None  # which has this attempt
    deaths: tuple[Death, ...] = ()  # of schedulers and the coordinator, that it met since the last token
    num_in_hand: int = 0  # deaths of schedulers and the coordinator that had it in hand
    begun_with: int = 0  # tokens that there were after the last such death
    weights: str = field(init=False)  # WeightsVersion.label of what computed its last token
    num_crashes: int = 0  # deaths of workers at ranks that gave it back, without a token between them ...
    crashed_at: int = 0  # ... and its tokens then
    decoder: Decoder | None = None
    stop: StopFinder | None = None
    batch: object = None  # the batch whose row `place` may still take more of this request's tokens
    place: int = 0
    measured: Decoder | None = None  # of those that want logprobs: has read `num_measured` tokens
    num_measured: int = 0
    slow: bool = False  # its tokens need more than a look-up and a row of their own
    # Only with a Retry: what is needed to send everything again.
    arrival_s: float = field(init=False)  # of the connection that has it
    cut: int = field(init=False)  # a row must begin at this token
    num_told: int = field(init=False)  # tokens that connections before this one had
    told_again: int = 0  # tokens that this connection was told again
    logprobs: KeptLogprobs = field(init=False)
    prompt_logprobs: PromptLogprobs | None = None
    first: First | None = None
    finished: Finished | None = None
    hidden: bool = False  # the last token is not shown
    lacks_media: bool = False  # the file of one of its images is gone, so no other attempt can begin
    tail: str = ""  # text behind the last token's
    pooled: bytes = b""  # the vector, at the end

    def __post_init__(self, choice: int, told: list[PositionLogprobs]) -> None:
        submit = self.submit
        self.request_id = self.work_id = submit.request_ids[choice]
        self.frontend_handle, self.attempt, self.sampling = submit.handles[choice], submit.attempt, submit.sampling
        self.weights = submit.weights
        cuts = submit.retry.cuts if submit.retry is not None else ()
        self.cut = cuts[choice] if choice < len(cuts) else 0
        self.arrival_s, self.num_told = submit.arrival_s, len(submit.delivered) // 4
        self.logprobs = KeptLogprobs(told)

    def move(self, status: RequestStatus) -> None:
        """InvalidTransition where the table of states.py has no such entry."""
        check_transition(TRANSITIONS, self.status, status, self.request_id)
        self.status = status

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
    def matched_stop(self) -> str | None:
        return None if self.stop is None else self.stop.matched

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
            weights=self.weights if self.output_token_ids else "",
        )
