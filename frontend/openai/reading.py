"""A chat answer's text as reasoning, content and tool calls, where it may have more than content. Pure; called by responses.py."""

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import Call, Finder, Part, ToolParser
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.scan import Lexer
from meshlm.runtime.parsers.splitter import Splitter

if TYPE_CHECKING:  # few servers need them
    from meshlm.runtime.parsers.harmony import Channels

Json = dict[str, Any]


class Said(NamedTuple):
    """The reasoning, content and tool calls that some new text brought."""

    reasoning: str
    content: str
    calls: list[Json]  # in OpenAI's form


def needed(parsed_request: ParsedRequest) -> bool:
    """Whether the answer may hold more than content."""
    return (
        parsed_request.answer.begins_with_reasoning
        or _parser_of_calls(parsed_request) is not None
        or parsed_request.answer.changes_content
    )


def _parser_of_calls(parsed_request: ParsedRequest) -> ToolParser | None:
    """How the answer holds calls; None where none are looked for."""
    choice = parsed_request.answer.tool_choice
    if parsed_request.answer.tool_call_parser:
        return registry.tool_parser(parsed_request.answer.tool_call_parser)
    if not choice.forces:
        return None
    from meshlm.runtime.parsers import forced_calls

    if choice.name:
        return forced_calls.named(choice.name)
    return forced_calls.REQUIRED


def reasoning_parser(parsed_request: ParsedRequest) -> ReasoningParser:
    """The form of the answer's reasoning, which may have begun in the prompt."""
    found = registry.reasoning_parser(parsed_request.answer.reasoning_parser)
    return msgspec.structs.replace(found, assumed=True) if parsed_request.answer.opened_reasoning else found


class Reader:
    """One choice. Names of calls are made from the request's, so that they are the same when it is asked again."""

    def __init__(self, parsed_request: ParsedRequest, request_id: str, index: int) -> None:
        self._parsed_request, self._name = parsed_request, f"{request_id}-{index}"
        self._parser = _parser_of_calls(parsed_request)
        self._finder: Finder | None = None
        self._splitter: Splitter | None = None
        self._channels: Channels | None = None
        self._hidden: Lexer | None = None
        self._first_content = ""
        self._short_ids = self._parser is not None and self._parser.short_ids
        self._num_begun = 0  # calls of the model's
        self.num_calls = 0  # that were given out
        form = (
            reasoning_parser(parsed_request)
            if parsed_request.answer.begins_with_reasoning or parsed_request.answer.changes_content
            else None
        )
        if form is not None and parsed_request.answer.changes_content:
            self._hidden, self._first_content = Lexer(*form.hides), form.begins_content
        if form is None or not parsed_request.answer.begins_with_reasoning:
            self._begin_content()
        elif form.channels:
            from meshlm.runtime.parsers import harmony

            tools = parsed_request.answer.tools if self._parser else {}
            self._channels = harmony.Channels(tools, opened=parsed_request.answer.opened_reasoning)
        else:
            self._splitter = Splitter(form, self._parser, parsed_request.answer.tools)

    @property
    def plain(self) -> bool:
        """Whether all that follows is content."""
        return self._finder is None and self._splitter is None and self._channels is None and self._hidden is None

    def push(self, text: str, *, last: bool) -> Said:
        """More text; `last`: none follows."""
        if self._channels is not None:
            return self._push_channels(self._channels, text, last)
        thought, parts = "", list[Part]()
        if self._splitter is not None:
            thought, parts, text = self._splitter.push(text)
            if last:
                more, more_parts, rest = self._splitter.finish()
                thought, parts, text = thought + more, parts + more_parts, text + rest
            if last or self._splitter.closed:
                self._begin_content(self._splitter.finder)
                self._splitter = None
        parts += self._content(text, last)
        return self._said(thought, parts)

    def _push_channels(self, channels: "Channels", text: str, last: bool) -> Said:
        from meshlm.runtime.parsers.harmony import Reasoned

        found = channels.push(text) + (channels.finish() if last else [])
        thought = "".join(part.text for part in found if isinstance(part, Reasoned))
        return self._said(thought, [part for part in found if not isinstance(part, Reasoned)])

    def _content(self, text: str, last: bool) -> list[Part]:
        """Text behind the reasoning."""
        text, self._first_content = self._first_content + text, ""
        pieces = [text] if self._hidden is None else self._hidden.push(text)
        pieces += ["", self._hidden.finish()] if last and self._hidden is not None else []
        parts = list[Part]()
        for place, piece in enumerate(pieces):
            if place % 2 == 1 and not (self._finder is not None and self._finder.in_call):
                continue  # a tag that is nobody's
            parts += [piece] if self._finder is None else self._finder.push(piece)
        return parts + (self._finder.finish() if last and self._finder is not None else [])

    def _begin_content(self, finder: Finder | None = None) -> None:
        """`finder` goes on with a call that began in the reasoning."""
        self._finder = finder
        if finder is None and self._parser is not None:
            self._finder = self._parser.finder(self._parsed_request.answer.tools)

    def _said(self, thought: str, parts: list[Part]) -> Said:
        """Gives what was read in OpenAI's form; with parallel_tool_calls false only the first call counts."""
        content, calls = list[str](), dict[int, Json]()
        for part in parts:
            if isinstance(part, str):
                content.append(part)
                continue
            self._num_begun += bool(part.name)
            index = self._num_begun - 1
            if index and not self._parsed_request.answer.parallel_tool_calls:
                continue
            if part.name:
                calls[index] = self._beginning(part, index)
            elif index not in calls:
                calls[index] = {"index": index, "function": {"arguments": ""}}
            calls[index]["function"]["arguments"] += part.arguments
        told = thought if self._parsed_request.answer.include_reasoning else ""
        return Said(told, "".join(content), list(calls.values()))

    def _beginning(self, call: Call, index: int) -> Json:
        self.num_calls += 1
        own = call.id or self._new_id(index)
        return {"index": index, "id": own, "type": "function", "function": {"name": call.name, "arguments": ""}}

    def _new_id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._name}-{index}".encode()).hexdigest()[:16]
        return digest[:9] if self._short_ids else f"chatcmpl-tool-{digest}"
