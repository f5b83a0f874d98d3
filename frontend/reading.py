"""A chat answer's text as reasoning, content and tool calls, where it may have more than content. Pure; called by responses.py."""

import hashlib
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.parse import ParsedRequest
from meshlm.frontend.reasoning import Splitter
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import Call
from meshlm.runtime.parsers.reasoning import ReasoningParser

Json = dict[str, Any]


class Said(NamedTuple):
    """The reasoning, content and tool calls that some new text brought."""

    reasoning: str
    content: str
    calls: list[Json]  # in OpenAI's form


def needed(ask: ParsedRequest) -> bool:
    """Whether the answer may hold more than content."""
    return ask.begins_with_reasoning or bool(ask.tool_call_parser)


def reasoning_parser(ask: ParsedRequest) -> ReasoningParser:
    """The form of the answer's reasoning, which may have begun in the prompt."""
    found = registry.reasoning_parser(ask.reasoning_parser)
    return msgspec.structs.replace(found, assumed=True) if ask.opened_reasoning else found


class Reader:
    """One choice. Names of calls are made from the request's, so that they are the same when it is asked again."""

    def __init__(self, ask: ParsedRequest, request_id: str, index: int) -> None:
        self._ask, self._name = ask, f"{request_id}-{index}"
        parser = registry.tool_parser(ask.tool_call_parser) if ask.tool_call_parser else None
        self._splitter = Splitter(reasoning_parser(ask), parser, ask.tools) if ask.begins_with_reasoning else None
        self._finder = parser.finder(ask.tools) if parser else None
        self._short_ids = parser is not None and parser.short_ids
        self.num_calls = 0  # that were given out

    @property
    def plain(self) -> bool:
        """Whether all that follows is content."""
        return self._finder is None and (self._splitter is None or self._splitter.closed)

    def push(self, text: str, *, last: bool) -> Said:
        """More text; `last`: none follows."""
        thought, content, calls = "", text, list[Call]()
        if self._splitter is not None:
            thought, content = self._splitter.push(text)
            if last:
                more_thought, more_content = self._splitter.finish()
                thought, content = thought + more_thought, content + more_content
        if self._finder is not None:
            content, calls = self._finder.push(content)
            if last:
                rest, more = self._finder.finish()
                content, calls = content + rest, calls + more
        return Said(
            thought if self._ask.include_reasoning else "", content, [self._call(call) for call in self._fewer(calls)]
        )

    def _fewer(self, calls: list[Call]) -> list[Call]:
        """parallel_tool_calls: false is one call."""
        return calls if self._ask.parallel_tool_calls else calls[: max(0, 1 - self.num_calls)]

    def _call(self, call: Call) -> Json:
        own = call.id or self._new_id()
        found = {
            "index": self.num_calls,
            "id": own,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self.num_calls += 1
        return found

    def _new_id(self) -> str:
        digest = hashlib.sha256(f"{self._name}-{self.num_calls}".encode()).hexdigest()[:16]
        return digest[:9] if self._short_ids else f"chatcmpl-tool-{digest}"
