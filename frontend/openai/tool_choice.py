"""Which calls a request wants, and the schemas that hold an answer to them. Pure; HttpError names the field. Called by parse.py.

`required` is a list of calls, and a named function its arguments alone, as in vLLM; so neither needs a parser of the model's format.
The tools' schemas stand under $defs by their names, where references within them are made to point.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import structured
from meshlm.frontend.openai.prompts import check_shapes
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.frontend.openai.structured import PLAIN
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.grammar import Grammar
from meshlm.runtime import schema_references
from meshlm.runtime.errors import RequestError
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import CallStructure, Structure, Tools
from meshlm.runtime.parsers.structures import ParameterStructure
from meshlm.runtime.schema_references import pointer_step
from meshlm.runtime.structured_outputs import json_schema
from meshlm.runtime.structured_outputs import structural_tag as made_tag

Json = dict[str, Any]
NO_PARAMETERS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_DEPTH = 100


class ToolChoice(NamedTuple):
    """What is asked of an answer: whether calls are looked for, and which one must be there."""

    tools: Tools  # that may be called; empty: nothing is looked for
    required: bool = False
    name: str = ""  # of the one function that must be called

    is_part: bool = False  # of the request's tools: the model is not shown the others
    parallel: bool = True  # several calls may be asked for

    @property
    def forces(self) -> bool:
        return self.required or bool(self.name)


NO_CALLS = ToolChoice({})


def read(request: ChatRequest) -> ToolChoice:
    """The request's tools, tool_choice and parallel_tool_calls."""
    return _choice(request)._replace(parallel=request.parallel_tool_calls is not False)


def shown(choice: ToolChoice, request: ChatRequest, server: ServerConfig) -> list[Json] | None:
    """The tools that the model is told of."""
    if request.tool_choice == "none" and server.exclude_tools_when_tool_choice_none:
        return None
    tools = request.tools
    return [tool for tool in tools or [] if tool["function"]["name"] in choice.tools] if choice.is_part else tools


def grammar(choice: ToolChoice, request: ChatRequest, server: ServerConfig) -> Grammar | None:
    """What holds the answer to the calls that are asked for. A response_format gives way to a forced call, as in vLLM."""
    functions = [tool["function"] for tool in request.tools or []]
    strict = {function["name"] for function in functions if function.get("strict")} & choice.tools.keys()
    if request.use_beam_search and (choice.forces or strict):
        field = "tool_choice" if choice.forces else "tools"
        raise field_error(field, "a forced or strict call does not go with use_beam_search")
    if choice.forces:
        if any(getattr(request, name) is not None for name in ("structured_outputs", *PLAIN)):
            raise field_error("tool_choice", "a forced call goes with no other constraint of the text")
        found = _in_channels(choice, server) if has_channels(server) else _forced(choice, server, bool(strict))
        return msgspec.structs.replace(found, whitespace_pattern=request.guided_whitespace_pattern or "")
    if choice.tools and not server.enable_auto_tool_choice:
        flags = "--enable-auto-tool-choice, --tool-call-parser"
        raise field_error("tools", f"the server reads no calls ({flags}); tool_choice 'none' shows them")
    if not strict:
        return None
    form = registry.tool_parser(server.tool_call_parser).structure
    if form is None:
        text = f"calls in the form of --tool-call-parser {server.tool_call_parser} are not held to a schema"
        raise field_error("tools", f"strict: {text}; with tool_choice 'required' or a function's name they are")
    if structured.grammar(request, server) is not None:
        raise field_error("tools", "strict: goes with no other constraint of the text")
    return _made(lambda: made_tag(structural_tag(form, choice, strict), "tools", server.structured_outputs))


def _forced(choice: ToolChoice, server: ServerConfig, strict: bool) -> Grammar:
    return _made(lambda: json_schema(schema(choice), "tools", server.structured_outputs, strict=strict))


def has_channels(server: ServerConfig) -> bool:
    """Whether answers are messages of harmony. The grammar of a forced call has their reasoning in it."""
    return bool(server.reasoning_parser) and registry.reasoning_parser(server.reasoning_parser).channels


def _in_channels(choice: ToolChoice, server: ServerConfig) -> Grammar:
    if not server.tool_call_parser:
        raise field_error("tool_choice", f"forced calls of gpt-oss need --tool-call-parser {registry.HARMONY}")
    from meshlm.runtime.parsers import harmony

    wanted = [choice.name] if choice.name else choice.tools
    tag = {"format": harmony.forced_call({name: own(choice.tools[name]) for name in wanted})}
    return _made(lambda: made_tag(tag, "tools", server.structured_outputs))


def _made(make: Callable[[], Grammar]) -> Grammar:
    try:
        return make()
    except RequestError as error:
        raise HttpError(400, error.message, error.param) from None


def _choice(request: ChatRequest) -> ToolChoice:
    check_shapes([], request.tools)
    choice = request.tool_choice
    if request.tools == [] and choice == "auto":
        return NO_CALLS
    if choice in (None, "none"):
        looks = choice is None and bool(request.tools)
        return ToolChoice(_parameters(request.tools or []) if looks else {})
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        raise field_error("tool_choice", "'none', 'auto', 'required' or a function is expected")
    if not request.tools:
        raise field_error("tool_choice", f"{choice if isinstance(choice, str) else 'a function'!r} needs tools")
    tools = _parameters(request.tools)
    if isinstance(choice, str):
        return ToolChoice(tools, required=choice == "required")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools)
    return ToolChoice(tools, name=_name(choice, tools))


def _name(choice: Any, tools: Tools) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise field_error("tool_choice", '{"type": "function", "function": {"name": ...}} is expected')
    if name not in tools:
        raise field_error("tool_choice", f"there is no tool {name[:64]!r}")
    return name


def _allowed(allowed: Any, tools: Tools) -> ToolChoice:
    """A choice among some of the tools."""
    mode, names = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(names, list) or not names:
        raise field_error("tool_choice", "allowed_tools needs a mode, 'auto' or 'required', and a list of tools")
    found = {name: tools[name] for name in (_name(one, tools) for one in names)}
    return ToolChoice(found, required=mode == "required", is_part=True)


def _parameters(tools: list[Json]) -> Tools:
    """The JSON schema of each tool's parameters, by the tool's name."""
    found = {}
    for tool in tools:
        given = tool["function"].get("parameters")
        found[tool["function"]["name"]] = NO_PARAMETERS if given is None else schema_references.with_pointers(given)
    return found


def schema(choice: ToolChoice) -> Json:
    """The schema of an answer that a forced choice asks for."""
    if choice.name:
        return own(choice.tools[choice.name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{pointer_step(name)}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in choice.tools
    ]
    found: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions(choice.tools)}
    return found if choice.parallel else {**found, "maxItems": 1}


def structural_tag(form: CallStructure, choice: ToolChoice, strict: Collection[str]) -> Json:
    """Free text, in which calls of these tools keep to their schemas; those of others have any object as arguments."""
    if not isinstance(form, Structure | ParameterStructure):
        try:
            found = form.format({name: own(given) if name in strict else None for name, given in choice.tools.items()})
        except ValueError as error:
            raise _not_held(error) from None
        return {"type": "structural_tag", "format": found}
    tags = [
        {
            "type": "tag",
            "begin": form.begin.replace("NAME", name),
            "content": _content(form, name, given if name in strict else None),
            "end": form.end,
        }
        for name, given in ((name, own(given)) for name, given in choice.tools.items())
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}}


def _content(form: Structure | ParameterStructure, name: str, given: Json | None) -> Json:
    try:
        return form.content(given)
    except ValueError as error:
        raise _not_held(f"{error}, of the tool {name!r},") from None


def _not_held(what: object) -> HttpError:
    return field_error("tools", f"strict: {what} cannot be enforced in the form of --tool-call-parser")


def definitions(tools: Tools) -> Json:
    """The tools' schemas as definitions of a larger one."""
    return {name: _moved(of_object(given), f"#/$defs/{pointer_step(name)}") for name, given in tools.items()}


def own(given: Mapping[str, Any]) -> Json:
    """A tool's schema on its own."""
    return _moved(of_object(given), "#")


def of_object(given: Mapping[str, Any]) -> Json:
    """Arguments are an object, also where their schema does not say so."""
    says = any(key in given for key in ("type", "$ref", "anyOf", "oneOf", "allOf"))
    return dict(given) if says else {"type": "object", **given}


def _moved(given: Json, base: str) -> Json:
    try:
        return schema_references.moved(given, base, MAX_DEPTH)
    except schema_references.TooDeep:
        raise field_error("tools", f"a schema is nested more than {MAX_DEPTH} deep") from None


def for_counting(request: ChatRequest, server: ServerConfig) -> tuple[ChatRequest, ServerConfig]:
    """A chat whose tokens are counted: nothing is generated, so tools need no parser, and are told as where they may be called."""
    if request.tools and request.tool_choice != "none":
        request = msgspec.structs.replace(request, tool_choice="none")
        server = msgspec.structs.replace(server, exclude_tools_when_tool_choice_none=False)
    return request, server
