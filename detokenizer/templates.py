"""Chat templates: Jinja in a sandbox, with the names that Hugging Face templates expect."""

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshlm.protocol.ids import ErrorKind
from meshlm.runtime.errors import RequestError


class _Generation(Extension):
    """`{% generation %}` marks training targets; for serving its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """One compiled template. `special` gives bos_token and the like."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """RequestError when the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(ErrorKind.INVALID, f"not a chat template: {error}", "chat_template") from None
        self._special = special

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        extra: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt's text. RequestError names `messages` when the template refuses them."""
        if continue_final_message and add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other"
            raise RequestError(ErrorKind.INVALID, text, "continue_final_message")
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **extra},
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise RequestError(
                ErrorKind.INVALID, f"the chat template refuses these messages: {error}", "messages"
            ) from None
        return _cut_after_final(text, messages) if continue_final_message else text


def _cut_after_final(text: str, messages: list[dict[str, Any]]) -> str:
    """Drop what the template puts after the last message, so that the model goes on with it."""
    final = messages[-1].get("content") if messages else None
    if not isinstance(final, str) or final.strip() not in text:
        raise RequestError(ErrorKind.INVALID, "the last message has no text to continue", "continue_final_message")
    wanted = final if final in text else final.strip()
    return (
        text[: text.rindex(wanted) + len(wanted)].rstrip()
        if wanted != final
        else text[: text.rindex(final) + len(final)]
    )
