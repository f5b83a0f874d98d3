"""Tool calls and what finds them in an answer's text: the types that all formats of tools/ share. Pure.

A call is given out when it is complete. What does not read as a call stays text, so nothing of an answer is lost. What is given out
after some text is a function of that text alone, however it is cut into pieces, and the work is linear in it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

Tools = Mapping[str, Mapping[str, Any]]  # of each tool that the request names: the JSON schema of its parameters


class Call(Struct, frozen=True):
    """One call; `arguments` is a JSON object as text, with the values as the model wrote them."""

    name: str
    arguments: str
    id: str = ""  # the model's own, where its template must find it again


class Finder(Protocol):
    """One answer, piece by piece."""

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Takes the next text; gives the content that may be shown, and the calls that are complete."""
        ...

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows."""
        ...


class ToolParser(Struct, frozen=True):
    """One format of tool calls: what --tool-call-parser names, and what an entry point of `meshlm.tool_parsers` gives."""

    finder: Callable[[Tools], Finder]  # makes that of one answer
    tags: tuple[str, ...] = ()  # what may be a special token of the model's, which its decoder must show the finder
    around: tuple[str, str] | None = None  # the tags around calls: such calls may begin before the reasoning ends
    short_ids: bool = False  # a call's id has nine letters and digits, as Mistral's templates demand
