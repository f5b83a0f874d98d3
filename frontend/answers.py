"""What the client reads: whole answers and server-sent events in OpenAI's form.

Pure but for the `write` function that a stream is given. A chunk that is nothing but text is a constant prefix, the escaped text and a
constant suffix: 0.3 µs instead of a JSON encoder's 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from meshlm.frontend import nulls, reading, reasoning
from meshlm.frontend.choice import Choice
from meshlm.frontend.errors import HttpError, error_object
from meshlm.frontend.logprobs import (
    Position,
    by_id,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs_json,
)
from meshlm.frontend.parse import Ask
from meshlm.frontend.reading import Reader
from meshlm.frontend.retry import Progress
from meshlm.protocol.ids import ErrorKind, FinishReason
from meshlm.protocol.text_edge import Accepted, Finished, PositionLogprobs
from meshlm.protocol.token_edge import First

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Answer:
    """State that whole and streamed answers share. `on_end` is called once, when no choice runs any more."""

    def __init__(self, ask: Ask, request_id: str, created: int, model: str, on_end: Callable[[], None]) -> None:
        self.ask, self.request_id, self.created, self.model = ask, request_id, created, model
        self.choices: list[Choice] = []
        self.num_cached: dict[int, int] = {}  # by prompt
        self.prompt: dict[int, Accepted] = {}  # by prompt
        self.error: HttpError | None = None
        self.num_ended = 0
        self._on_end = on_end

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        self.prompt[choice.prompt_index] = accepted
        if accepted.arrival_s:  # of the first time that it was asked
            self.created = int(accepted.arrival_s)

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        if self.error is None:
            self.error = self._as_client_knows(kind, message, param)
        self.ended()

    def ended(self) -> None:
        self.num_ended += 1
        if self.num_ended == len(self.choices):
            self._on_end()

    def note(self, choice: Choice, finished: Finished | None, first: First | None) -> None:
        """What every row may bring."""
        if first is not None and choice.first is None:  # taken up again, it finds its own tokens
            choice.first = first
            self.num_cached.setdefault(choice.prompt_index, first.num_cached_tokens)
        if finished is not None and finished.reason is FinishReason.ERROR and self.error is None:
            self.error = self._as_client_knows(finished.kind, finished.message, finished.param)

    def _as_client_knows(self, kind: ErrorKind, message: str, param: str) -> HttpError:
        return HttpError.of(kind, message, self.ask.client_names.get(param, param))

    def num_prompt_tokens(self) -> int:
        return sum(accepted.num_prompt_tokens for accepted in self.prompt.values())

    def usage(self) -> Json:
        prompt = self.num_prompt_tokens()
        output = 0 if self.ask.prompt_only else sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(self.num_cached.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def shown(self, positions: Sequence[Position]) -> Sequence[Position]:
        """Logprobs with the names that the client wants for tokens."""
        return by_id(positions) if self.ask.tokens_as_ids else positions

    def prompt_ids(self, choice: Choice) -> Json:
        ids = self.prompt[choice.prompt_index].prompt_token_ids
        return {"prompt_token_ids": memoryview(ids).cast("i").tolist() if self.ask.return_token_ids else None}

    def prompt_text(self, choice: Choice) -> Json:
        return {"prompt_text": self.prompt[choice.prompt_index].prompt_text if self.ask.return_prompt_text else None}

    def echoed(self, choice: Choice, positions: Sequence[PositionLogprobs | None]) -> Json | None:
        """The logprobs of an echoed prompt, if they are wanted."""
        if self.ask.logprobs < 0:
            return None
        accepted = self.prompt[choice.prompt_index]
        return echoed_logprobs(self.shown(positions), accepted, self.ask.logprobs, self.ask.tokens_as_ids)

    def frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def visible_reason(finished: Finished, calls: bool = False) -> str:
    """finish_reason as OpenAI's clients know it."""
    return "tool_calls" if calls and finished.reason is FinishReason.STOP else finished.reason.value


class WholeAnswer(Answer):
    """Not streamed: collects, then `body`."""

    def __init__(self, ask: Ask, request_id: str, created: int, model: str, on_end: Callable[[], None]) -> None:
        super().__init__(ask, request_id, created, model, on_end)
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[PositionLogprobs]] = {}
        self._prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}

    def row(
        self,
        choice: Choice,
        token_ids: memoryview,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs | None] | None,
        first: First | None,
    ) -> None:
        self._texts.setdefault(choice.index, []).append(text)
        if logprobs:
            self._logprobs.setdefault(choice.index, []).extend(logprobs)
        if prompt_logprobs:
            self._prompt_logprobs[choice.index] = prompt_logprobs
        if first is not None or finished is not None:
            self.note(choice, finished, first)
        if finished is not None:
            self.ended()

    def text(self, choice: Choice, token_ids: memoryview, text: str) -> None:
        self._texts.setdefault(choice.index, []).append(text)

    def body(self) -> bytes:
        """The JSON answer; call after the end, when `error` is None."""
        kept = self._best()
        entries = [self._entry(choice, index) for index, choice in enumerate(kept)]
        kind = "chat.completion" if self.ask.is_chat else "text_completion"
        usage = self.usage()
        usage["prompt_tokens_details"] |= nulls.PROMPT_DETAILS
        rest: Json = {**nulls.ANSWER, "usage": usage}
        if self.ask.is_chat:
            rest = {**nulls.CHAT, **rest, **self._of_prompt(kept[0]), **self.prompt_text(kept[0])}
        return _encode({**self.frame(kind, entries), **rest})

    def _best(self) -> list[Choice]:
        """All choices, or with best_of the likeliest of each prompt."""
        if self.ask.num_returned == self.ask.num_choices:
            return self.choices
        kept: list[Choice] = []
        for prompt_index in sorted({choice.prompt_index for choice in self.choices}):
            mine = [choice for choice in self.choices if choice.prompt_index == prompt_index]
            mine.sort(key=lambda choice: -self._mean_logprob(choice))
            kept += mine[: self.ask.num_returned]
        return kept

    def _mean_logprob(self, choice: Choice) -> float:
        positions = self._logprobs.get(choice.index, [])
        return sum(p.token.logprob for p in positions) / max(1, len(positions))

    def _entry(self, choice: Choice, index: int) -> Json:
        finished = choice.finished
        assert finished is not None
        text = "" if self.ask.prompt_only else "".join(self._texts.get(choice.index, []))
        entry: Json = {"index": index, **(nulls.CHOICE if self.ask.is_chat else nulls.TEXT_CHOICE)}
        if self.ask.is_chat:
            entry["message"] = {"role": "assistant", **nulls.MESSAGE, **self._said(choice, text)}
            positions = self._logprobs.get(choice.index)
            wanted = self.ask.logprobs >= 0 and positions is not None and not self.ask.hides_tokens
            entry["logprobs"] = chat_logprobs(self.shown(positions or [])) if wanted else None
        else:
            entry["text"] = self.prompt[choice.prompt_index].prompt_text + text if self.ask.echo else text
            entry["logprobs"] = self._completion_logprobs(choice)
            entry |= self._of_prompt(choice)
        entry["finish_reason"] = visible_reason(finished, bool(entry.get("message", {}).get("tool_calls")))
        entry["stop_reason"] = finished.stop_reason
        if self.ask.return_token_ids and not self.ask.hides_tokens:
            entry["token_ids"] = [] if self.ask.prompt_only else choice.token_ids.tolist()
        return entry

    def _said(self, choice: Choice, text: str) -> Json:
        """A chat's content, and its reasoning and tool calls where they are told from it."""
        if not reading.needed(self.ask):
            return {"content": self.ask.begins_with + text}
        said = reading.Reader(self.ask, self.request_id, choice.index).push(text, last=True)
        message: Json = {"content": self.ask.begins_with + said.content or None}
        if self.ask.begins_with_reasoning and self.ask.include_reasoning:
            message |= reasoning.fields(said.reasoning)
        if said.calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in said.calls]
        return message

    def _of_prompt(self, choice: Choice) -> Json:
        """What is asked for of the prompt: beside a chat's choices, in each choice of a completion."""
        found = self.prompt_ids(choice)
        if self.ask.prompt_logprobs >= 0:  # a prompt of one token has none
            found["prompt_logprobs"] = prompt_logprobs_json(self._prompt_logprobs.get(choice.index, [None]))
        return found

    def _completion_logprobs(self, choice: Choice) -> Json | None:
        positions = [] if self.ask.prompt_only else self.shown(self._logprobs.get(choice.index, []))
        if not self.ask.echo:
            return completion_logprobs(positions, 0, self.ask.logprobs) if self.ask.logprobs >= 0 else None
        of_prompt = self.echoed(choice, self._prompt_logprobs.get(choice.index, []))
        if of_prompt is None:
            return None
        offset = len(self.prompt[choice.prompt_index].prompt_text)
        of_output = completion_logprobs(positions, offset, self.ask.logprobs)
        return {key: of_prompt[key] + of_output[key] for key in of_prompt}


class StreamAnswer(Answer):
    """Streamed: every row becomes a chunk at once. `write` takes complete events. With `progress` they have ids, and those that
    the client has are left out."""

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        created: int,
        model: str,
        on_end: Callable[[], None],
        write: Callable[[bytes], None],
        progress: Progress | None = None,
    ) -> None:
        super().__init__(ask, request_id, created, model, on_end)
        self._write, self._progress = write, progress
        self._kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        self._affixes: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._readers: dict[int, Reader] = {}  # of choices that may have more than content
        self._shows_ids = ask.return_token_ids and not ask.hides_tokens
        self._plain = not (self._shows_ids or ask.continuous_usage)
        self._nothing: Json = {**(nulls.CHAT_CHUNK_CHOICE if ask.is_chat else nulls.TEXT_CHUNK_CHOICE)}

    def row(
        self,
        choice: Choice,
        token_ids: memoryview,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs | None] | None,
        first: First | None,
    ) -> None:
        index = choice.index
        failed = finished is not None and finished.reason is FinishReason.ERROR
        if index not in self._begun and not failed:  # a failure at once still has its HTTP status
            self._begin(choice, prompt_logprobs)
        if self.ask.prompt_only:
            token_ids, text, logprobs = token_ids[:0], "", None
        if self.ask.hides_tokens:
            logprobs = None
        if finished is None and logprobs is None and self._plain and index not in self._readers:
            if first is not None:
                self.note(choice, None, first)
            if text:
                prefix, suffix = self._affixes[index]
                self._emit(choice, prefix + _encode(text) + suffix)
            return
        self.note(choice, finished, first)
        if not failed:
            self._general(choice, token_ids, text, finished, logprobs)
        if finished is not None:
            self.ended()

    def text(self, choice: Choice, token_ids: memoryview, text: str) -> None:
        affixes = self._affixes.get(choice.index)
        if affixes is None or not self._plain or choice.index in self._readers:
            self.row(choice, token_ids, text, None, None, None, None)
        elif text and self._progress is None:
            self._write(affixes[0] + _encode(text) + affixes[1])
        elif text:
            self._emit(choice, affixes[0] + _encode(text) + affixes[1])

    def _emit(self, choice: Choice, event: bytes, num_tokens: int = -1, ended: bool = False) -> None:
        """Write an event that brings a choice so far; -1: to its newest token."""
        if self._progress is None:
            self._write(event)
            return
        name = self._progress.event(choice.index, len(choice.token_ids) if num_tokens < 0 else num_tokens, ended)
        if name is not None:
            self._write(b"id: %b\n%b" % (name, event))

    def _begin(self, choice: Choice, prompt_logprobs: list[PositionLogprobs | None] | None) -> None:
        """The constant parts of this choice's chunks; a chat's first chunk names the role, an echo gives the prompt."""
        index = choice.index
        self._begun.add(index)
        if reading.needed(self.ask):
            self._readers[index] = Reader(self.ask, self.request_id, index)
        mark = "\x00"
        delta = {"delta": {"content": mark}} if self.ask.is_chat else {"text": mark}
        event = self._event([{"index": index, **delta, **self._nothing}])
        prefix, suffix = event.split(_encode(mark))
        self._affixes[index] = (prefix, suffix)
        nothing = {**self._nothing, "token_ids": [] if self._shows_ids else None}
        usage = self._usage_so_far(choice, 0)
        if self.ask.is_chat:
            delta = {"delta": {"role": "assistant", "content": self.ask.begins_with}}
            of_prompt = {**self.prompt_ids(choice), **self.prompt_text(choice)}
            self._emit(choice, self._event([{"index": index, **delta, **nothing}], {**of_prompt, **usage}), 0)
        elif self.ask.echo or self.ask.return_token_ids:
            first = {"index": index, **nothing, **self._echo(choice, prompt_logprobs), **self.prompt_ids(choice)}
            self._emit(choice, self._event([first], usage), 0)

    def _echo(self, choice: Choice, prompt_logprobs: list[PositionLogprobs | None] | None) -> Json:
        """The prompt's text and logprobs; what is generated begins behind them."""
        if not self.ask.echo:
            return {"text": "", "logprobs": None}
        accepted = self.prompt[choice.prompt_index]
        self._offsets[choice.index] = len(accepted.prompt_text)
        return {"text": accepted.prompt_text, "logprobs": self.echoed(choice, prompt_logprobs or [])}

    def _general(
        self,
        choice: Choice,
        token_ids: memoryview,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
    ) -> None:
        entry: Json = {"index": choice.index, **self._nothing}
        if self.ask.is_chat:
            entry["delta"] = self._delta(choice, text, finished)
            if not entry["delta"] and finished is None and logprobs is None and self._plain:
                return  # what came may be a part of a tag
            if logprobs:
                entry["logprobs"] = chat_logprobs(self.shown(logprobs))
        else:
            entry["text"] = text
            if logprobs:
                entry["logprobs"] = self._completion_logprobs(choice, logprobs)
        reader = self._readers.get(choice.index)
        calls = reader is not None and reader.num_calls > 0
        if finished is not None:
            entry["finish_reason"] = visible_reason(finished, calls)
            entry["stop_reason"] = finished.stop_reason
        if self._shows_ids:
            entry["token_ids"] = token_ids.tolist()
        event = self._event([entry], self._usage_so_far(choice, len(choice.token_ids)))
        self._emit(choice, event, ended=finished is not None)

    def _completion_logprobs(self, choice: Choice, logprobs: list[PositionLogprobs]) -> Json:
        """Offsets go on behind the tokens before, as in a whole answer: however many tokens a row brings, they are the same."""
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(position.num_chars for position in logprobs)
        return completion_logprobs(self.shown(logprobs), offset, self.ask.logprobs)

    def _usage_so_far(self, choice: Choice, num_tokens: int) -> Json:
        """Of one choice, in each of its chunks, where that is wanted."""
        if not self.ask.continuous_usage:
            return {}
        prompt = self.prompt[choice.prompt_index].num_prompt_tokens
        output = 0 if self.ask.prompt_only else num_tokens
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}}

    def _delta(self, choice: Choice, text: str, finished: Finished | None) -> Json:
        reader = self._readers.get(choice.index)
        if reader is None:
            return {"content": text} if text or finished is None else {}
        said = reader.push(text, last=finished is not None)
        if reader.plain:
            del self._readers[choice.index]
        delta: Json = reasoning.fields(said.reasoning) if said.reasoning else {}
        if said.content:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = said.calls
        return delta

    def _event(self, choices: list[Json], extra: Json | None = None) -> bytes:
        frame = {**self.frame(self._kind, choices), **(extra or {})}
        return b"data: " + _encode(frame) + b"\n\n"

    def last_events(self) -> bytes:
        """After the end: usage if asked for, or the error, then [DONE]."""
        done = b"data: [DONE]\n\n"
        if self.error is not None:  # without ids: asked again, it begins where the text ends
            error = error_object(self.error.message, self.error.kind, self.error.param, self.error.status)
            return b"data: " + _encode(error) + b"\n\n" + done
        usage = self._event([], {"usage": self.usage()}) if self.ask.include_usage else b""
        if self._progress is None:
            return usage + done
        named = [(self._progress.last(1), usage), (self._progress.last(2), done)]
        return b"".join(b"id: %b\n%b" % (name, event) for name, event in named if name is not None and event)
