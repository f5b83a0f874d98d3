"""One request's journal entry: what is needed to decode it and to have it continued elsewhere."""

from array import array
from enum import Enum

from meshlm.detokenizer.decode import Decoder, TokenTable
from meshlm.detokenizer.stops import StopFinder
from meshlm.protocol.admit_edge import Work
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import Submit
from meshlm.protocol.token_edge import Ended


class StreamState(Enum):
    """ENCODING -> ADMITTED (again after a scheduler's death) -> gone from the journal."""

    ENCODING = "encoding"
    ADMITTED = "admitted"


class Stream:
    """Changed by core.py and by itself in `push`."""

    __slots__ = (
        "attempt",
        "batch",
        "decoder",
        "emitted",
        "frontend",
        "frontend_handle",
        "frontend_incarnation",
        "handle",
        "place",
        "prompt",
        "request_id",
        "sampling",
        "scheduler",
        "scheduler_incarnation",
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
        self.scheduler: Identity | None = None
        self.scheduler_incarnation = Incarnation(0)
        self.decoder: Decoder | None = None
        self.stop: StopFinder | None = None
        self.batch: object = None  # the batch whose row `place` may still take more of this stream's tokens
        self.place = 0

    def begin(self, table: TokenTable, prompt: "array[int]", sampling: SamplingParams) -> None:
        """The prompt is encoded. Ids that the client has already (resume) are decoded silently."""
        self.prompt, self.sampling = prompt, sampling
        text = self.submit.text
        self.decoder = table.decoder(text.skip_special_tokens)
        self.stop = StopFinder(text.stop, text.include_stop_str_in_output) if text.stop else None
        for token in array("i", self.submit.delivered):
            self.push(token)

    def push(self, token: int) -> str:
        """One more output token; the text to show. `stop.matched` is set when a stop string is complete."""
        assert self.decoder is not None
        self.emitted.append(token)
        text = self.decoder.push(token)
        if self.stop is not None and len(self.emitted) > self.sampling.min_tokens:
            return self.stop.push(text)
        return text

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
