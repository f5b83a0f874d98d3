"""A streamed answer: server-sent events in OpenAI's form. Pure but for the `write` function that it is given; see responses.py.

A chunk that is nothing but text is a constant prefix, the escaped text and a constant suffix: 0.3 µs instead of a JSON encoder's 1.
"""

from collections.abc import Callable

import msgspec

from meshlm.frontend.http.retry import Progress
from meshlm.frontend.openai import reading, reasoning, response_fields
from meshlm.frontend.openai.reading import Reader
from meshlm.frontend.openai.response_fields import chat_logprobs, completion_logprobs, weights_of_tokens
from meshlm.frontend.openai.responses import DONE, AnswerHead, Json, StreamedAnswer, data_event, visible_reason
from meshlm.protocol.edges.text import Finished, PositionLogprobs, PromptLogprobs
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import NO_DETAILS, Choice, RowDetails

_encode = msgspec.json.Encoder().encode


class StreamResponse(StreamedAnswer):
    """Streamed: every row becomes a chunk at once, one whose tokens are no text yet, too (clients take the time between chunks for
    that between tokens). `write` takes complete events. With `progress` they have ids, and those that the client has are left out."""

    def __init__(self, head: AnswerHead, write: Callable[[bytes], None], progress: Progress | None = None) -> None:
        super().__init__(head)
        self._write, self._progress = write, progress
        self._kind = "chat.completion.chunk" if self.options.is_chat else "text_completion"
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._readers: dict[int, Reader] = {}  # of choices that may have more than content
        self._shows_ids = self.options.return_token_ids and not self.options.hides_tokens
        self._plain = not (self._shows_ids or self.options.continuous_usage)
        self._nothing: Json = {
            **(response_fields.NO_CHAT_CHUNK_CHOICE if self.options.is_chat else response_fields.NO_TEXT_CHUNK_CHOICE)
        }

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        affixes = choice.affixes
        if affixes is None or details is not None:
            self._detailed(choice, num_tokens, text, details or NO_DETAILS)
        elif text or num_tokens:
            self._emit(choice, affixes[0] + _encode(text) + affixes[1])

    def _detailed(self, choice: Choice, num_tokens: int, text: str, details: RowDetails) -> None:
        """A row that needs more than the constant parts, or comes before they are made."""
        index, finished, logprobs = choice.index, details.finished, details.logprobs
        if self.is_refused:
            return
        failed = finished is not None and finished.reason is FinishReason.ERROR
        if index not in self._begun and not failed:  # a failure at once still has its HTTP status
            self._begin(choice, details.prompt_logprobs)
        if self.options.prompt_only:
            num_tokens, text, logprobs = 0, "", None
        if self.options.hides_tokens:
            logprobs = None
        self.note(choice, details)
        affixes = choice.affixes
        if finished is None and logprobs is None and affixes is not None:
            if text or num_tokens:
                self._emit(choice, affixes[0] + _encode(text) + affixes[1])
        elif not failed:
            self._general(choice, num_tokens, text, finished, logprobs)
        if finished is not None:
            self.ended()

    def _emit(self, choice: Choice, event: bytes, num_tokens: int = -1, ended: bool = False) -> None:
        """Write an event that brings a choice so far; -1: to its newest token."""
        if self._progress is None:
            self._write(event)
            return
        name = self._progress.event(choice.index, len(choice.token_ids) if num_tokens < 0 else num_tokens, ended)
        if name is not None:
            self._write(b"id: %b\n%b" % (name, event))

    def _begin(self, choice: Choice, prompt_logprobs: PromptLogprobs | None) -> None:
        """The constant parts of this choice's chunks; a chat's first chunk names the role, an echo gives the prompt."""
        index = choice.index
        self._begun.add(index)
        if reading.needed(self.parsed_request):
            self._readers[index] = Reader(self.parsed_request, self.request_id, index)
        else:
            self._become_plain(choice)
        nothing = {**self._nothing, "token_ids": [] if self._shows_ids else None}
        usage = self._usage_so_far(choice, 0)
        if self.options.is_chat:
            delta = {"delta": {"role": "assistant", "content": self.options.begins_with}}
            of_prompt = {**self.prompt_ids(choice), **self.prompt_text(choice)}
            self._emit(choice, self._event([{"index": index, **delta, **nothing}], {**of_prompt, **usage}), 0)
        elif self.options.echo or self.options.return_token_ids:
            first = {"index": index, **nothing, **self._echo(choice, prompt_logprobs), **self.prompt_ids(choice)}
            self._emit(choice, self._event([first], usage), 0)

    def _become_plain(self, choice: Choice) -> None:
        """Marks the choice as one that brings nothing but text from now on, unless each chunk is to tell more."""
        if self._plain:
            mark = "\x00"
            delta = {"delta": {"content": mark}} if self.options.is_chat else {"text": mark}
            event = self._event([{"index": choice.index, **delta, **self._nothing}])
            prefix, suffix = event.split(_encode(mark))
            choice.affixes = (prefix, suffix)

    def _echo(self, choice: Choice, prompt_logprobs: PromptLogprobs | None) -> Json:
        """The prompt's text and logprobs; what is generated begins behind them."""
        if not self.options.echo:
            return {"text": "", "logprobs": None}
        accepted = self.prompt[choice.prompt_index]
        self._offsets[choice.index] = len(accepted.prompt_text)
        return {"text": accepted.prompt_text, "logprobs": self.echoed(choice, prompt_logprobs)}

    def _general(
        self,
        choice: Choice,
        num_tokens: int,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
    ) -> None:
        entry: Json = {"index": choice.index, **self._nothing}
        if self.options.is_chat:
            entry["delta"] = self._delta(choice, text, finished)
            if not entry["delta"] and finished is None and logprobs is None and self._plain:
                return  # what came may be a part of a tag
            if logprobs:
                certain = bool(self.parsed_request.mesh.sampling.logprob_token_ids)
                entry["logprobs"] = chat_logprobs(self.shown(logprobs), has_sampled=certain)
        else:
            entry["text"] = text
            if logprobs:
                entry["logprobs"] = self._completion_logprobs(choice, logprobs)
        reader = self._readers.get(choice.index)
        calls = reader is not None and reader.num_calls > 0 and not self.options.tool_choice.name
        if finished is not None:
            entry["finish_reason"] = visible_reason(finished, calls)
            entry["stop_reason"] = finished.stop_reason
        if self._shows_ids:
            entry["token_ids"] = choice.token_ids[len(choice.token_ids) - num_tokens :].tolist()
            if finished is not None:
                entry |= weights_of_tokens(choice)
        extra = self._usage_so_far(choice, len(choice.token_ids))
        if finished is not None and not self.options.include_usage:
            extra |= self._fingerprint()
        event = self._event([entry], extra)
        self._emit(choice, event, ended=finished is not None)

    def _completion_logprobs(self, choice: Choice, logprobs: list[PositionLogprobs]) -> Json:
        """Offsets go on behind the tokens before, as in a whole answer: however many tokens a row brings, they are the same."""
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(position.num_chars for position in logprobs)
        return completion_logprobs(self.shown(logprobs), offset, self.options.logprobs)

    def _fingerprint(self) -> Json:
        """The system_fingerprint, which only the last chunk carries, as it is the same in all."""
        return {} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}

    def _usage_so_far(self, choice: Choice, num_tokens: int) -> Json:
        """The usage of one choice so far, for each of its chunks where that is wanted."""
        if not self.options.continuous_usage:
            return {}
        prompt = self.prompt[choice.prompt_index].num_prompt_tokens
        output = 0 if self.options.prompt_only else num_tokens
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}}

    def _delta(self, choice: Choice, text: str, finished: Finished | None) -> Json:
        reader = self._readers.get(choice.index)
        if reader is None:
            return {"content": text} if text or finished is None else {}
        said = reader.push(text, last=finished is not None)
        if reader.plain:
            del self._readers[choice.index]
            self._become_plain(choice)
        delta: Json = reasoning.fields(said.reasoning) if said.reasoning else {}
        if said.content:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = said.calls
        return delta

    def _event(self, choices: list[Json], extra: Json | None = None) -> bytes:
        return data_event({**self.frame(self._kind, choices), **(extra or {})})

    def last_events(self) -> bytes:
        """The events after the end: usage if asked for, or the error, then [DONE]."""
        if self.error is not None:  # without ids: asked again, it begins where the text ends
            return data_event(self.error.response()) + DONE
        usage = (
            self._event([], {"usage": self.usage(), **self._fingerprint(), **self.metrics()})
            if self.options.include_usage
            else b""
        )
        if self._progress is None:
            return usage + DONE
        named = [(self._progress.last(1), usage), (self._progress.last(2), DONE)]
        return b"".join(b"id: %b\n%b" % (name, event) for name, event in named if name is not None and event)
