"""Answers that are calls because the request forces them: a grammar holds them to JSON, whatever the model's own format is. Pure."""

from collections.abc import Iterable

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, Changed, Part, ToolParser
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser

_LISTED = parser(Form(json_calls.calls(Keys(arguments=("parameters",))), starts=("[",)))


def _calls_alone(parts: Iterable[Part]) -> list[Part]:
    """What is no call, such as the beginning of one that max_tokens cut, is nobody's text: a client would show it."""
    return [part for part in parts if isinstance(part, Call)]


REQUIRED = ToolParser(lambda tools: Changed(_LISTED.finder(tools), _calls_alone))  # tool_choice "required"


class NamedCall:
    """An answer that is the arguments of one call; see Finder. Without text there is no call."""

    __slots__ = ("_name", "in_call")

    def __init__(self, name: str) -> None:
        self._name, self.in_call = name, False

    def push(self, piece: str) -> list[Part]:
        if self.in_call:
            return [Call("", piece)] if piece else []
        arguments = piece.lstrip()
        if not arguments:
            return []
        self.in_call = True
        return [Call(self._name, arguments)]

    def finish(self) -> list[Part]:
        self.in_call = False
        return []


def named(name: str) -> ToolParser:
    """A tool_choice that names a function."""
    return ToolParser(lambda tools: NamedCall(name))
