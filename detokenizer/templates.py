"""Chat templates: Jinja in a sandbox, with the names that Hugging Face templates expect."""

import datetime
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshlm.protocol.edges.text import ChatPrompt
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError


@dataclass
class _Marked:
    """The text that is being rendered, so far its length, and which characters of it are in `{% generation %}`."""

    num_chars: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


_marked_now: ContextVar[_Marked | None] = ContextVar("_marked_now", default=None)  # of this thread's rendering


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote; otherwise its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body, lineno=line)

    def _text(self, caller: Any) -> str:
        text = str(caller())
        if (marked := _marked_now.get()) is not None:
            marked.spans.append((marked.num_chars, marked.num_chars + len(text)))
        return text


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML does not allow. The names and their order are those of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `special` gives bos_token and the like. `loops` says whether it goes through the parts of a message's
    content, `tests_text` whether it asks if the content is text, `marks` whether it marks the assistant's text."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """RequestError when the source is no template."""
        extensions = [_Generation, loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestError(ErrorKind.INVALID, f"not a chat template: {error}", "chat_template") from None
        self._special = special
        self.loops = _loops_over_content(tree)
        self.marks = any(call.identifier == _Generation.identifier for call in tree.find_all(nodes.ExtensionAttribute))
        self.tests_text = any(test.name == "string" for test in tree.find_all(nodes.Test))

    def render(self, prompt: ChatPrompt, messages: list[dict[str, Any]]) -> str:
        """The prompt's text, with its messages as this template expects them. RequestError names `messages` when it refuses them."""
        if prompt.continue_final_message and prompt.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other"
            raise RequestError(ErrorKind.INVALID, text, "continue_final_message")
        if prompt.continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1] if messages else {})]
        tools = msgspec.json.decode(prompt.tools_json) if prompt.tools_json else None
        extra = msgspec.json.decode(prompt.template_kwargs_json) if prompt.template_kwargs_json else {}
        given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt.add_generation_prompt}
        try:
            text = _joined(self._template.generate(**given, **{"documents": None, **self._special, **extra}))
        except (jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"the chat template refuses these messages: {error}"
            raise RequestError(ErrorKind.INVALID, text, "messages") from None
        return _cut_at_mark(text) if prompt.continue_final_message else text

    def spans(self, render: Callable[[], str]) -> tuple[str, list[tuple[int, int]]]:
        """The text of `render`, which calls this template's, and where `{% generation %}` begins and ends in it, in characters."""
        marked = _Marked()
        token = _marked_now.set(marked)
        try:
            return render(), marked.spans
        finally:
            _marked_now.reset(token)


def _joined(pieces: Iterator[str]) -> str:
    """The text of a rendering. Each piece is known before the next one is made, so that places in the text can be told."""
    found, marked = [], _marked_now.get() or _Marked()
    for piece in pieces:
        found.append(piece)
        marked.num_chars += len(piece)
    return "".join(found)


MARK = "<<the-final-message-ends-here>> "  # the blank shows whether the template strips messages


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a `for` of the template goes through `message.content`, or through a variable that is named or set so."""

    def is_content(node: nodes.Node) -> bool:
        match node:
            case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
                return is_content(inner)
            case nodes.Getitem(arg=nodes.Const(value="content")) | nodes.Getattr(attr="content"):
                return True
            case nodes.Name(name=name):
                return name in names
        return False

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark behind its text, for what the template puts after it to be found."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    for place in range(len(content or ()) - 1, -1, -1):
        part = content[place]  # type: ignore[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            marked = {**part, "text": part["text"] + MARK}
            return {**message, "content": [*content[:place], marked, *content[place + 1 :]]}  # type: ignore[index]
    raise RequestError(ErrorKind.INVALID, "the last message has no text to continue", "continue_final_message")


def _cut_at_mark(text: str) -> str:
    """Drop what the template puts after the last message, so that the model goes on with it."""
    at = text.rfind(MARK.strip())
    if at < 0:
        why = "the chat template does not show the last message as it is, so it cannot be continued"
        raise RequestError(ErrorKind.INVALID, why, "continue_final_message")
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
