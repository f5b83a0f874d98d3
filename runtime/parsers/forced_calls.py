"""Answers that are calls because the request forces them: a grammar holds them to JSON, whatever the model's own format is. Pure."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, Part, ToolParser
from meshlm.runtime.parsers.json_calls import Keys
from meshlm.runtime.parsers.streamed_calls import Form, parser

# tool_choice "required": a list of calls.
REQUIRED = parser(Form(json_calls.calls(Keys(arguments=("parameters",))), starts=("[",)))


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
