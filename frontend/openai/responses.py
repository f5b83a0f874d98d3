"""What the client reads, in OpenAI's form: what all answers share, and whole ones. Streamed ones are stream_response.py's. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import embeds, limits, reading, reasoning, response_fields
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.edges.text import Accepted, Finished, PositionLogprobs, PromptLogprobs
from meshlm.protocol.kv_transfer import NAME as KV_TRANSFER
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.client.draft_metrics import DraftsTold, metrics_of
from meshlm.runtime.client.placement import Choice, RowDetails

TRACE_HEADERS = ("traceparent", "tracestate")  # of W3C
Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def data_event(fields: object) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + _encode(fields) + b"\n\n"


def trace_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """Those that say which trace a request belongs to; of HTTP, or of gRPC's metadata."""
    return {name: str(headers[name]) for name in TRACE_HEADERS if name in headers}


class AnswerHead(NamedTuple):
    """What every answer is made of. `on_end` is called once, when no choice runs any more."""

    parsed_request: ParsedRequest
    request_id: str
    created: int
    model: str
    on_end: Callable[[], None]


class Response(ABC):
    """An answer on its way, as a `ResponseSink`. Clients of HTTP get a `WholeAnswer` or a `StreamedAnswer`."""

    def __init__(self, head: AnswerHead) -> None:
        self.parsed_request, self.request_id, self.created, self.model, self._on_end = head
        self.options = self.parsed_request.answer
        self.choices: list[Choice] = []
        self.has_begun = False
        self.fingerprint: str | None = None  # set by generation.py
        self.tells_times = False  # likewise
        self.drafts_told: DraftsTold | None = None  # likewise
        self.num_cached: dict[int, int] = {}  # by prompt
        self.prompt: dict[int, Accepted] = {}  # by prompt
        self.error: HttpError | None = None
        self.is_refused = False
        self._num_prompt_logprobs = self._num_kept_logprobs = 0
        self.num_ended = 0
        self.trace_headers: dict[str, str] = {}  # that say which trace the request belongs to
        self.media_type, self.headers = "application/json", dict[str, str]()  # of a whole answer

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        if choice.prompt_index not in self.prompt and self.options.prompt_logprobs >= 0:
            self._count_prompt_logprobs(accepted)
        self.prompt[choice.prompt_index] = accepted
        if accepted.arrival_s:  # of the first time that it was asked
            self.created = int(accepted.arrival_s)

    def _count_prompt_logprobs(self, accepted: Accepted) -> None:
        of_one = (1 + self.options.prompt_logprobs) * accepted.num_prompt_tokens
        self._num_prompt_logprobs += of_one * self.parsed_request.mesh.num_choices
        echoes = self.options.stream and self.options.echo
        self._check(partial(limits.check_prompt_logprobs, of_one, self._num_prompt_logprobs, echoes_in_stream=echoes))

    def _check(self, limit: Callable[[], None]) -> None:
        """Refuse the request as a whole where it is beyond a limit, of which only what has come tells: whoever waits closes it."""
        try:
            limit()
        except HttpError as error:
            self.error, self.is_refused = self.error or error, True
            self._on_end()

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        if self.error is None:
            self.error = self._as_client_knows(kind, message, param)
        self.ended()

    def ended(self) -> None:
        self.num_ended += 1
        if self.num_ended == len(self.choices):
            self._on_end()

    def note(self, choice: Choice, details: RowDetails) -> None:
        """Keeps what every row may bring."""
        finished, first = details.finished, details.first
        if first is not None and choice.first is None:  # taken up again, it finds its own tokens
            choice.first = first
            self.num_cached.setdefault(choice.prompt_index, first.num_cached_tokens)
        if details.logprobs and not (self.options.stream and choice.submit.retry is None):
            self._num_kept_logprobs += len(details.logprobs) * (1 + max(0, self.options.logprobs))
            self._check(partial(limits.check_kept_logprobs, self._num_kept_logprobs))
        if finished is not None and finished.reason is FinishReason.ERROR and self.error is None:
            self.error = self._as_client_knows(finished.kind, finished.message, finished.param)

    def _as_client_knows(self, kind: ErrorKind, message: str, param: str) -> HttpError:
        name = self.options.client_names.get(param, param)
        if name != param and message.startswith((f"{param}:", f"{param}.")):
            message = name + message.removeprefix(param)
        return HttpError.of_kind(kind, message, name)

    def num_prompt_tokens(self) -> int:
        return sum(accepted.num_prompt_tokens for accepted in self.prompt.values())

    def usage(self) -> Json:
        prompt = self.num_prompt_tokens()
        output = 0 if self.options.prompt_only else sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(self.num_cached.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            **response_fields.weights_of_answer(self.choices),
        }

    def _kept_logprobs(self, choice: Choice) -> Sequence[PositionLogprobs]:
        return choice.logprobs

    def sampled_logprobs(self, choice: Choice) -> list[float] | None:
        """Those of its tokens; None where they were not asked for, or are not kept."""
        kept = self._kept_logprobs(choice)
        return [max(one.token.logprob, -9999.0) for one in kept] if len(kept) == len(choice.token_ids) else None

    def metrics(self) -> Json:
        """The times of an answer with one choice, and its drafts; where neither is told, nothing."""
        if not self.tells_times and self.drafts_told is None:
            return {}
        found: Json | None = response_fields.timing(self.choices)
        if found is not None and not self.tells_times:
            found = dict.fromkeys(found)
        if found is not None and self.drafts_told is not None:
            finished = self.choices[0].finished
            drafts = b"" if finished is None else finished.drafts
            found["speculative_decoding"] = metrics_of(drafts, self.drafts_told)
        return {"metrics": found}

    def shown(self, positions: Sequence[PositionLogprobs]) -> Sequence[PositionLogprobs]:
        """Logprobs with the names that the client wants for tokens."""
        return response_fields.by_id(positions) if self.options.tokens_as_ids else positions

    def prompt_ids(self, choice: Choice) -> Json:
        if embeds.vectors_of(choice.submit.prompt):
            return {"prompt_token_ids": None}
        ids = self.prompt[choice.prompt_index].prompt_token_ids
        return {"prompt_token_ids": memoryview(ids).cast("i").tolist() if self.options.return_token_ids else None}

    def prompt_text(self, choice: Choice) -> Json:
        return {
            "prompt_text": self.prompt[choice.prompt_index].prompt_text if self.options.return_prompt_text else None
        }

    def echoed(self, choice: Choice, found: PromptLogprobs | None) -> Json | None:
        """The logprobs of an echoed prompt, if they are wanted."""
        if self.options.logprobs < 0:
            return None
        accepted = self.prompt[choice.prompt_index]
        positions = list(positions_of(found)) if found is not None else []
        return response_fields.echoed_logprobs(
            self.shown(positions), accepted, self.options.logprobs, self.options.tokens_as_ids
        )

    @abstractmethod
    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None: ...

    def frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class WholeAnswer(Response):
    @abstractmethod
    def body(self) -> bytes:
        """The whole answer; call after the end, when `error` is None."""


class StreamedAnswer(Response):
    @abstractmethod
    def last_events(self) -> bytes:
        """The events that a stream ends with."""


def visible_reason(finished: Finished, calls: bool = False) -> str:
    """finish_reason as OpenAI's clients know it; `calls`: the model has chosen to call."""
    return "tool_calls" if calls and finished.reason is FinishReason.STOP else finished.reason.value


class WholeResponse(WholeAnswer):
    """An answer that is not streamed: it collects all rows, and `body` gives the JSON."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[PositionLogprobs]] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        self._texts.setdefault(choice.index, []).append(text)
        if details is None:
            return
        if details.logprobs:
            self._logprobs.setdefault(choice.index, []).extend(details.logprobs)
        if details.prompt_logprobs is not None:
            self._prompt_logprobs[choice.index] = details.prompt_logprobs
        self.note(choice, details)
        if details.finished is not None:
            self.ended()

    def body(self) -> bytes:
        kept = self._best()
        entries = [self._entry(choice, index) for index, choice in enumerate(kept)]
        kind = "chat.completion" if self.options.is_chat else "text_completion"
        usage = self.usage()
        usage["prompt_tokens_details"] |= response_fields.NO_PROMPT_DETAILS
        rest: Json = {
            **response_fields.NO_ANSWER,
            "usage": usage,
            "system_fingerprint": self.fingerprint,
            **self.metrics(),
            KV_TRANSFER: self.kv_transfer(),
        }
        rest |= self.passed_on()
        if self.options.is_chat:
            rest = {**response_fields.NO_CHAT, **rest, **self._of_prompt(kept[0]), **self.prompt_text(kept[0])}
        return _encode({**self.frame(kind, entries), **rest})

    def kv_transfer(self) -> msgspec.Raw | None:
        """kv_transfer_params of an answer whose prompt's KV is leased to another mesh."""
        finished = self.choices[0].finished
        return msgspec.Raw(finished.kv_transfer) if finished is not None and finished.kv_transfer else None

    def passed_on(self) -> Json:
        """Fields of an answer that came with its tokens from elsewhere (rendering/derender.py)."""
        return {}

    def _kept_logprobs(self, choice: Choice) -> Sequence[PositionLogprobs]:
        return self._logprobs.get(choice.index, ())

    def _best(self) -> list[Choice]:
        """All choices, or with best_of the likeliest of each prompt."""
        if self.options.num_returned == self.parsed_request.mesh.num_choices:
            return self.choices
        kept: list[Choice] = []
        for prompt_index in sorted({choice.prompt_index for choice in self.choices}):
            mine = [choice for choice in self.choices if choice.prompt_index == prompt_index]
            mine.sort(key=lambda choice: -self._mean_logprob(choice))
            kept += mine[: self.options.num_returned]
        return kept

    def _mean_logprob(self, choice: Choice) -> float:
        positions = self._logprobs.get(choice.index, [])
        return sum(p.token.logprob for p in positions) / max(1, len(positions))

    def _entry(self, choice: Choice, index: int) -> Json:
        finished = choice.finished
        assert finished is not None
        text = "" if self.options.prompt_only else "".join(self._texts.get(choice.index, []))
        entry: Json = {
            "index": index,
            **(response_fields.NO_CHOICE if self.options.is_chat else response_fields.NO_TEXT_CHOICE),
        }
        if self.options.is_chat:
            entry["message"] = {"role": "assistant", **response_fields.NO_MESSAGE, **self._said(choice, text)}
            positions = self._logprobs.get(choice.index)
            wanted = self.options.logprobs >= 0 and positions is not None and not self.options.hides_tokens
            certain = bool(self.parsed_request.mesh.sampling.logprob_token_ids)
            entry["logprobs"] = (
                response_fields.chat_logprobs(self.shown(positions or []), has_sampled=certain) if wanted else None
            )
        else:
            entry["text"] = self.prompt[choice.prompt_index].prompt_text + text if self.options.echo else text
            entry["logprobs"] = self._completion_logprobs(choice)
            entry |= self._of_prompt(choice)
        calls = bool(entry.get("message", {}).get("tool_calls")) and not self.options.tool_choice.name
        entry["finish_reason"] = visible_reason(finished, calls)
        entry["stop_reason"] = finished.stop_reason
        if self.options.return_token_ids and not self.options.hides_tokens:
            entry["token_ids"] = [] if self.options.prompt_only else choice.token_ids.tolist()
            entry |= response_fields.weights_of_tokens(choice)
        return entry

    def _said(self, choice: Choice, text: str) -> Json:
        """A chat's content, and its reasoning and tool calls where they are told from it."""
        if not reading.needed(self.parsed_request):
            return {"content": self.options.begins_with + text}
        said = reading.Reader(self.parsed_request, self.request_id, choice.index).push(text, last=True)
        message: Json = {"content": self.options.begins_with + said.content or None}
        may_reason = self.options.begins_with_reasoning and self.options.include_reasoning
        if may_reason and (said.reasoning or reading.reasoning_parser(self.parsed_request).assumed):
            message |= reasoning.fields(said.reasoning)
        if said.calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in said.calls]
        return message

    def _of_prompt(self, choice: Choice) -> Json:
        """The fields about the prompt that were asked for: beside a chat's choices, in each choice of a completion."""
        found = self.prompt_ids(choice)
        if self.options.prompt_logprobs >= 0:  # a prompt of one token has none
            found["prompt_logprobs"] = response_fields.prompt_logprobs_json(self._prompt_logprobs.get(choice.index))
        return found

    def _completion_logprobs(self, choice: Choice) -> Json | None:
        positions = [] if self.options.prompt_only else self.shown(self._logprobs.get(choice.index, []))
        if not self.options.echo:
            return (
                response_fields.completion_logprobs(positions, 0, self.options.logprobs)
                if self.options.logprobs >= 0
                else None
            )
        of_prompt = self.echoed(choice, self._prompt_logprobs.get(choice.index))
        if of_prompt is None:
            return None
        offset = len(self.prompt[choice.prompt_index].prompt_text)
        of_output = response_fields.completion_logprobs(positions, offset, self.options.logprobs)
        return {key: of_prompt[key] + of_output[key] for key in of_prompt}
