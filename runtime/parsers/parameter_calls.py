"""Calls whose parameters stand each between tags, and have the types of the tool's schema. Pure."""

import re
from collections.abc import Callable

from msgspec import Struct

from meshlm.runtime.parsers import typed_values
from meshlm.runtime.parsers.scan import Steps, Tags, nothing
from meshlm.runtime.parsers.streamed_calls import Answer
from meshlm.runtime.schema_reader import SchemaReader

_NAME, _NAME_RUN = (re.compile(rf"[^<>{{}}\s\"']{several}") for several in "+*")


class Parameter(Struct, frozen=True):
    """What the tag of a parameter says: its name, and its types where the format says them itself."""

    name: str
    kinds: frozenset[str] | None = None


def plain_key(text: str) -> Parameter | None:
    """A name, which may stand in quotes."""
    name = unquoted(text)
    return Parameter(name) if name else None


def unquoted(text: str) -> str:
    found = text.strip()
    return found[1:-1] if len(found) > 1 and found[0] == found[-1] and found[0] in "\"'" else found


class ParameterForm(Struct, frozen=True):
    """The tags of such a call behind the one that opens it. `body` reads it."""

    close: str  # of the call; it must come, for arguments may be missing before it
    parameter: str  # opens a parameter
    key_end: str  # stands behind its name
    parameter_close: str
    name_end: str = ">"  # stands behind the call's name; "": blanks do, or the next tag
    value_open: str = ""
    trims: bool = True  # a line break at either end of a value is not part of it
    key: Callable[[str], Parameter | None] = plain_key
    # Stands behind calls; a value ends before the end of the call and it, though its closing tag is missing.
    after: str = ""
    cdata: bool = False  # a value may stand in `<![CDATA[` and `]]>`
    known_if_empty: bool = False  # without parameters it is a call only of a tool that the request names

    def body(self, answer: Answer) -> Steps[None]:
        name = yield from self._name(answer)
        yield from answer.blanks()
        follows = yield from answer.ahead(self.parameter, self.close)
        if not name or not _NAME.fullmatch(name) or not follows:
            return
        if follows == self.close and self.known_if_empty and name not in answer.tools:
            return
        first = yield from self._parameter(answer) if follows == self.parameter else nothing()
        if follows == self.parameter and first is None:
            return
        answer.begin(name)
        answer.add("{")
        if first is not None:
            yield from self._parameters(answer, name, first)
        if (yield from answer.take(self.close)):
            answer.add("}")

    def _name(self, answer: Answer) -> Steps[str]:
        if self.name_end:
            name, _ = yield from answer.upto(Tags(self.name_end))
            return unquoted(name)
        yield from answer.blanks()
        return (yield from answer.run(_NAME_RUN))

    def _parameter(self, answer: Answer) -> Steps[Parameter | None]:
        """The opening tag of a parameter."""
        answer.hold()
        tag = yield from answer.take(self.parameter)
        key, tag = (yield from answer.upto(Tags(self.key_end))) if tag else ("", "")
        if tag and self.value_open:
            yield from answer.blanks()
            tag = yield from answer.take(self.value_open)
        found = self.key(key) if tag else None
        if found is None:
            answer.back()
        else:
            answer.drop()
        return found

    def _parameters(self, answer: Answer, name: str, parameter: Parameter) -> Steps[None]:
        tool, comma = SchemaReader(answer.tools.get(name)), ""
        now: Parameter | None = parameter
        while now is not None:
            kinds = frozenset(tool.kinds_of(now.name)) if now.kinds is None else now.kinds
            answer.add(f"{comma}{typed_values.quoted(now.name)}:")
            comma = ","
            yield from self._value(answer, kinds, tool)
            yield from answer.blanks()
            now = yield from self._parameter(answer)

    def _value(self, answer: Answer, kinds: frozenset[str], tool: SchemaReader) -> Steps[None]:
        """A value and its closing tag. A string is given out as it comes, any other value when it is complete."""
        if self.trims:
            yield from answer.take("\n")
        value = _Value(answer, kinds)
        in_cdata = self.cdata and bool((yield from answer.take("<![CDATA[")))
        close = f"]]>{self.parameter_close}" if in_cdata else self.parameter_close
        in_lines = self.trims and not in_cdata
        missing = (f"\n{self.parameter}", f"\n{self.close}") if in_lines else ()  # where the closing tag may be
        tags = Tags(close, f"\n{close}" if in_lines else "", *missing)
        while tag := (yield from answer.stream(tags, value.take)):
            if tag not in missing:
                ends = yield from self._ends(answer)
            elif ends := (yield from self._ends_without_tag(answer, tag, tool)):
                answer.at -= len(tag)
            if ends:
                value.end()
                return
            value.take(tag)
        value.stop()

    def _ends_without_tag(self, answer: Answer, tag: str, tool: SchemaReader) -> Steps[bool]:
        """Whether a value has ended before this tag: a parameter that the tool has is opened, or the call ends and what stands behind
        calls follows."""
        answer.at -= len(tag)
        answer.hold()
        answer.at += len(tag)
        if tag == f"\n{self.parameter}":
            key, end = yield from answer.upto(Tags(self.key_end))
            found = self.key(key) if end else None
            ends = found is not None and tool.declares(found.name)
        else:
            yield from answer.blanks()
            ends = bool(self.after) and bool((yield from answer.ahead(self.after)))
        answer.back()
        answer.at += len(tag)
        return ends

    def _ends(self, answer: Answer) -> Steps[bool]:
        """Whether the closing tag of a value was no part of it: another parameter follows, or the end of the call or of the text."""
        answer.hold()
        yield from answer.blanks()
        ends = bool((yield from answer.ahead(self.parameter, self.close))) or not (yield from answer.next())
        answer.back()
        return ends


class _Value:
    """One value, in pieces: text as soon as it can be nothing else."""

    def __init__(self, answer: Answer, kinds: frozenset[str]) -> None:
        self._answer, self._kinds = answer, kinds
        self._held: list[str] | None = []  # None: it is a string, whose beginning was given out
        self._has_begun = False  # something but blanks came

    def take(self, text: str) -> None:
        if self._held is None:
            self._answer.add(typed_values.escaped(text))
            return
        self._held.append(text)
        first = text.lstrip()[:1]
        if first and not self._has_begun:
            self._has_begun = True
            if typed_values.is_text(first, self._kinds):
                self._begin_text()

    def _begin_text(self) -> None:
        held, self._held = "".join(self._held or ()), None
        self._answer.add('"' + typed_values.escaped(held))

    def end(self) -> None:
        if self._held is None:
            self._answer.add('"')
        else:
            self._answer.add(typed_values.typed("".join(self._held), self._kinds))

    def stop(self) -> None:
        """The text has ended within the value."""
        if self._held is not None:
            self._begin_text()
