"""One request's journal entry: what is needed to decode it and to have it continued elsewhere."""

from array import array
from enum import Enum

from meshlm.detokenizer.decode import Decoder, TokenTable
from meshlm.detokenizer.stops import StopFinder
from meshlm.protocol.admit_edge import SchedulerLife, Work
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import Submit
from meshlm.protocol.token_edge import Ended


class StreamState(Enum):
    """ENCODING -> ADMITTED (again after a scheduler's or the coordinator's death) -> gone from the journal."""

    ENCODING = "encoding"
    ADMITTED = "admitted"


class Stream:
    """Changed by core.py and by itself in `push`."""

    __slots__ = (
        "asked",
        "attempt",
        "batch",
        "decoder",
        "emitted",
        "frontend",
        "frontend_handle",
        "frontend_incarnation",
        "handle",
        "heard",
        "lost",
        "num_lost",
        "place",
        "prompt",
        "request_id",
        "sampling",
        "scheduler",
        "state",
        "stop",
        "submit",
    )

    def __init__(self, submit: Submit, choice: int, sender: Identity, incarnation: Incarnation, handle: Handle) -> None:
        self.submit = submit
        self.request_id: RequestId = submit.request_ids[choice]
        self.frontend, self.frontend_incarnation = sender, incarnation
        self.frontend_handle = submit.handles[choice]
        self.handle = handle
        self.attempt = submit.attempt
        self.state = StreamState.ENCODING
        self.prompt: array[int] = array("i")
        self.emitted: array[int] = array("i")
        self.sampling: SamplingParams = submit.sampling
        self.asked = Incarnation(0)  # the life of the coordinator that this attempt's Admit went to; 0: none yet
        self.scheduler: SchedulerLife | None = None  # which has this attempt
        self.heard = False  # tokens of this attempt came
        self.lost: SchedulerLife | None = None  # the last one that died with the request
        self.num_lost = 0  # attempts that ended by a death
        self.decoder: Decoder | None = None
        self.stop: StopFinder | None = None
        self.batch: object = None  # the batch whose row `place` may still take more of this stream's tokens
        self.place = 0

    def begin(self, table: TokenTable, prompt: "array[int]", sampling: SamplingParams) -> None:
        """The prompt is encoded. Ids that the client has already (resume) are decoded silently."""
        self.prompt, self.sampling = prompt, sampling
        self.decoder, self.stop = self._reader(table)
        for token in array("i", self.submit.delivered):
            self.push(token)

    def _reader(self, table: TokenTable) -> tuple[Decoder, StopFinder | None]:
        """The state of decoding, before the first token."""
        text = self.submit.text
        stop = StopFinder(text.stop, text.include_stop_str_in_output) if text.stop else None
        return table.decoder(text.skip_special_tokens), stop

    def push(self, token: int) -> str:
        """One more output token; the text to show. `stop.matched` is set when a stop string is complete."""
        assert self.decoder is not None
        self.emitted.append(token)
        return self._read(self.decoder, self.stop, token, len(self.emitted))

    def _read(self, decoder: Decoder, stop: StopFinder | None, token: int, num_tokens: int) -> str:
        text = decoder.push(token)
        return stop.push(text) if stop is not None and num_tokens > self.sampling.min_tokens else text

    def shown_from(self, table: TokenTable, index: int) -> str:
        """The text that the tokens from `index` on have shown: read all again, what is held back now stays so."""
        decoder, stop = self._reader(table)
        texts = [self._read(decoder, stop, token, number) for number, token in enumerate(self.emitted, 1)]
        return "".join(texts[index:])

    def push_silent(self, token: int) -> str:
        """A stop token: counted, not shown."""
        self.emitted.append(token)
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

    def stop_reason(self, ended: Ended) -> str | int | None:
        """vLLM's `stop_reason`: the client's stop token id, None for the model's own end."""
        if ended.reason is FinishReason.STOP and ended.stop_token_id not in self.sampling.eos_token_ids:
            return ended.stop_token_id
        return None

    def work(self) -> Work:
        """The request as a scheduler needs it now."""
        return Work(
            request_id=self.request_id,
            handle=self.handle,
            prompt_token_ids=self.prompt.tobytes(),
            sampling=self.sampling,
            attempt=self.attempt,
            emitted=self.emitted.tobytes(),
            priority=self.submit.priority,
            cache_salt=self.submit.cache_salt,
            arrival_s=self.submit.arrival_s,
            deadline_s=self.submit.deadline_s,
        )
