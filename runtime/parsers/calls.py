"""Tool calls and what finds them in an answer's text: the types that all formats of tools/ share. Pure.

A call is given out as it is written: its name when that is known and its arguments begin, then the arguments piece by piece. What does
not begin as a call stays text, so nothing of an answer is lost. What is given out after some text is a function of that text alone,
however it is cut into pieces.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers import structures
from meshlm.runtime.parsers.gemma_structure import GemmaStructure

Tools = Mapping[str, Mapping[str, Any]]  # of each tool that the request names: the JSON schema of its parameters


class Call(Struct, frozen=True):
    """The beginning of a call, with the arguments that came with it; without a name more arguments of the call before."""

    name: str
    arguments: str  # a part of a JSON object as text, with the values as the model wrote them
    id: str = ""  # the model's own, where its template must find it again


Part = str | Call  # of an answer: content, or what belongs to a call


class Finder(Protocol):
    """One answer, piece by piece."""

    @property
    def in_call(self) -> bool:
        """Whether a call has begun that has not ended."""
        ...

    def push(self, piece: str) -> list[Part]:
        """Takes the next text; gives the content that may be shown and what it brings of calls, in order."""
        ...

    def finish(self) -> list[Part]:
        """The rest, when no text follows."""
        ...


class Changed:
    """Another finder, of whose parts `change` makes others."""

    def __init__(self, finder: Any, change: Callable[[Iterable[Any]], list[Part]]) -> None:
        self._finder, self._change = finder, change

    @property
    def in_call(self) -> bool:
        return bool(self._finder.in_call)

    def push(self, piece: str) -> list[Part]:
        return self._change(self._finder.push(piece))

    def finish(self) -> list[Part]:
        return self._change(self._finder.finish())


class Structure(Struct, frozen=True):
    """How a call whose arguments are held to their schema is written: `trigger` begins `begin`, in which NAME is the tool's."""

    trigger: str
    begin: str
    end: str
    number_before: str = ""  # a number and this text stand before the arguments

    def content(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """What stands between begin and end, as a format of a structural tag: arguments by this schema, or any."""
        arguments = nodes.arguments(given)
        if not self.number_before:
            return arguments
        head = [nodes.regex("[0-9]+"), nodes.const(self.number_before)]
        return nodes.sequence(*head, arguments)


Listed = structures.ListStructure | structures.FencedStructure | structures.PythonStructure | GemmaStructure
CallStructure = Structure | structures.ParameterStructure | Listed | structures.ChannelStructure


class ToolParser(Struct, frozen=True):
    """One format of tool calls: what --tool-call-parser names, and what an entry point of `meshlm.tool_parsers` gives."""

    finder: Callable[[Tools], Finder]  # makes that of one answer
    tags: tuple[str, ...] = ()  # what may be a special token of the model's, which its decoder must show the finder
    ends_reasoning: bool = False  # tags tell calls from other text, so one may begin before the reasoning ends
    structure: CallStructure | None = None  # None: the format's arguments cannot be held to a schema
    short_ids: bool = False  # a call's id has nine letters and digits, as Mistral's templates demand


def joined(parts: Iterable[Part]) -> tuple[str, list[Call]]:
    """The content of these parts, and their calls with all of their arguments."""
    content, calls = list[str](), list[tuple[Call, list[str]]]()
    for part in parts:
        if isinstance(part, str):
            content.append(part)
        elif part.name or not calls:
            calls.append((part, [part.arguments]))
        else:
            calls[-1][1].append(part.arguments)
    return "".join(content), [Call(call.name, "".join(texts), call.id) for call, texts in calls]
