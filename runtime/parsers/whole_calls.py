"""An answer that is nothing but calls, without tags that would tell them from text. Pure."""

from collections.abc import Callable

from msgspec import Struct

from meshlm.runtime.parsers.calls import Call, Tools


class WholeForm(Struct, frozen=True):
    """How such answers look. `read` gives the calls that are the whole of a text, none where it is something else."""

    read: Callable[[str, Tools], list[Call]]
    starts: tuple[str, ...]  # with one of which, behind blanks, such an answer begins


class WholeCalls:
    """One answer, piece by piece; see Finder. Other answers may look the same, so a call is one of a tool that the request names."""

    __slots__ = ("_begins", "_form", "_held", "_tools")

    def __init__(self, form: WholeForm, tools: Tools) -> None:
        self._form, self._tools, self._held = form, tools, list[str]()
        self._begins: bool | None = None  # as a call does; None: not enough came to know

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Gives all text at once, unless it begins as a call does: then nothing before the end."""
        if self._begins is False:
            return piece, []
        self._held.append(piece)
        if self._begins or not piece:
            return "", []
        text = "".join(self._held)
        start = text.lstrip()
        self._begins = start.startswith(self._form.starts)
        if self._begins:
            return "", []
        if any(known.startswith(start) for known in self._form.starts):
            self._held, self._begins = [text], None
            return "", []
        self._held = []
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        """The calls, when no text follows; the text where it is none."""
        text, self._held = "".join(self._held), []
        calls = self._form.read(text.strip(), self._tools) if self._begins else []
        if calls and all(call.name in self._tools for call in calls):
            return "", calls
        return text, []
