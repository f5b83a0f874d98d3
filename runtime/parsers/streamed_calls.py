"""Finds calls in an answer while they are written: the finder of all formats in tools/. Pure.

Text is shown until a tag opens a call, or, in formats without tags, unless the answer begins as a call. Then the format's own `body`
reads on. It begins a call (`begin`) once no doubt is left that it is one; where it cannot, all that it has read is text.
"""

from collections.abc import Callable

from msgspec import Struct

from meshlm.runtime.parsers.calls import Call, CallStructure, Part, ToolParser, Tools
from meshlm.runtime.parsers.scan import JsonMarks, Scan, Steps, Tags

MAX_HEAD = 1 << 16  # characters of a call before its name and its arguments are known; a longer one is text


class NoCall(Exception):
    """What was read is no call."""


class Answer(Scan):
    """The text of one answer, what a body gives out of it, and the tools that there are."""

    __slots__ = ("has_begun", "in_call", "json", "on_begin", "parts", "tools")

    def __init__(self, tools: Tools, json: JsonMarks, on_begin: Callable[[], None]) -> None:
        super().__init__()
        self.tools, self.json, self.on_begin = tools, json, on_begin
        self.parts = list[Part]()  # since the last piece
        self.in_call = self.has_begun = False  # has_begun: a call of the body that is being read

    def check(self) -> None:
        """NoCall where too much is held for what may be one."""
        if self.at - self.oldest > MAX_HEAD:
            raise NoCall

    def begin(self, name: str, call_id: str = "") -> None:
        """A call with this name; NoCall where it comes too late."""
        self.check()
        self.stay()
        self.in_call = self.has_begun = True
        self.on_begin()
        self.parts.append(Call(name, "", call_id))

    def add(self, arguments: str) -> None:
        """More arguments of the call that has begun."""
        if arguments:
            self.parts.append(Call("", arguments))

    def end(self) -> None:
        self.in_call = False


Body = Callable[[Answer], Steps[None]]


class Form(Struct, frozen=True):
    """How calls stand in a text. `body` reads those that begin behind an opening tag, if there are any."""

    body: Body
    opens: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()  # texts that a call may begin with, and that are a part of it
    closes: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()  # pairs of tags around one or more calls, which are nobody's text there
    starts: tuple[str, ...] = ()  # an answer that begins with one of these, behind blanks, may be a call without a tag


class StreamedCalls:
    """One answer, piece by piece; see Finder."""

    __slots__ = ("_answer", "_form", "_pending", "_steps", "_tags", "_unclosed")

    def __init__(self, form: Form, tags: Tags, json: JsonMarks, tools: Tools) -> None:
        """`tags` are those of text, `json` knows those that end JSON."""
        self._form, self._tags = form, tags
        self._answer = Answer(tools, json, self._begun)
        self._unclosed = False  # a call has ended whose closing tag may still come
        # Blanks and wrappers at the beginning or since a call or wrapper: nobody's if a call follows, and behind one if the end does.
        self._pending: tuple[bool, list[str]] | None = False, []
        self._steps = self._read()

    @property
    def in_call(self) -> bool:
        return self._answer.in_call

    def push(self, piece: str) -> list[Part]:
        """Takes the next text; gives the content that may be shown and what it brings of calls, in order."""
        self._answer.feed(piece)
        return self._go_on()

    def finish(self) -> list[Part]:
        """The rest, when no text follows."""
        self._answer.ended = True
        parts = self._go_on()
        if self._pending is not None:
            behind_call, texts = self._pending
            parts += [] if behind_call else texts
            self._pending = None
        return parts

    def _go_on(self) -> list[Part]:
        next(self._steps, None)
        parts, self._answer.parts = self._answer.parts, []
        return parts

    def _read(self) -> Steps[None]:
        answer, form = self._answer, self._form
        if form.starts:
            yield from self._read_start()
        while tag := (yield from answer.stream(self._tags, self._text)):
            if tag in form.closes and self._unclosed:
                self._unclosed, self._pending = False, (True, [])
            elif tag in form.opens or tag in form.begins:
                yield from self._read_body(tag)
            elif tag in form.wrappers:
                self._wrapper(tag)
            else:
                self._text(tag)

    def _read_start(self) -> Steps[None]:
        """A call without a tag at the answer's beginning."""
        answer = self._answer
        answer.hold()
        yield from answer.blanks()
        starts = yield from answer.ahead(*self._form.starts)
        if not starts or not (yield from self._body()):
            answer.give_up()

    def _read_body(self, tag: str) -> Steps[None]:
        answer = self._answer
        own = len(tag) if tag in self._form.begins else 0  # characters of the tag that the body reads
        answer.at -= own
        answer.hold()
        if (yield from self._body()):
            self._unclosed = True
            return
        answer.give_up()
        answer.at += own
        self._text(tag)

    def _body(self) -> Steps[bool]:
        """Whether there were calls; then the place is behind them."""
        answer, steps = self._answer, self._form.body(self._answer)
        answer.has_begun = False
        try:
            while True:
                next(steps)
                answer.check()
                yield
        except StopIteration:
            pass
        except NoCall:
            answer.give_up()
        if answer.has_begun:
            answer.stay()
            answer.give_up()
        answer.in_call = False
        return answer.has_begun

    def _begun(self) -> None:
        self._pending = True, []

    def _wrapper(self, tag: str) -> None:
        if self._pending is None:
            self._pending = False, []
        if self._pending[0] and tag in self._form.wrappers[1::2]:
            self._pending = True, []
        else:
            self._pending[1].append(tag)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._pending is None:
            self._answer.parts.append(text)
        elif text.isspace():
            self._pending[1].append(text)
        else:
            self._answer.parts += [*self._pending[1], text]
            self._pending = None


def parser(form: Form, *special: str, structure: CallStructure | None = None, short_ids: bool = False) -> ToolParser:
    """The parser of a form; `special` are more tags that may be special tokens."""
    tags = tuple(dict.fromkeys((*form.wrappers, *form.opens, *form.closes, *special)))
    in_json = (*form.opens, *form.closes, *form.wrappers)
    of_text, json = Tags(*in_json, *form.begins), JsonMarks(Tags(*in_json))
    return ToolParser(
        lambda tools: StreamedCalls(form, of_text, json, tools),
        tags=tags,
        ends_reasoning=not form.starts,
        structure=structure,
        short_ids=short_ids,
    )
