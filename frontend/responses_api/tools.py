"""tools and tool_choice of a request to those of a chat. Pure; HttpError names what is wrong.

A namespace holds functions: the model knows each by NAMESPACE__NAME, and its calls come back with both names. Tools that are no
functions (web search, code interpreter, MCP), which a server would run, are not told to the model, since nobody here would answer: a
log line names their types. They cannot be chosen.
"""

from typing import Any, NamedTuple

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.responses_api.schema import ResponsesRequest

Json = dict[str, Any]
_FIELDS = ("name", "description", "parameters", "strict")


class Tool(NamedTuple):
    """One tool that a request names. `chat` is its form in a chat, None for a tool that is no function."""

    kind: str
    name: str
    namespace: str | None
    chat: Json | None

    @property
    def flat_name(self) -> str:
        return flat(self.namespace, self.name)


def flat(namespace: Any, name: str) -> str:
    """The name that the model knows a function by."""
    return f"{namespace}__{name}" if namespace else name


def namespaces(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """The namespace and the name of each function that has one, by the name that the model knows."""
    return {tool.flat_name: (tool.namespace, tool.name) for tool in listed(request.tools) if tool.namespace}


def chat_fields(request: ResponsesRequest) -> Json:
    """The fields `tools` and `tool_choice` of the chat."""
    tools, choice = listed(request.tools), request.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            (named,) = _named([choice], tools, "there is no tool {!r}")
            if named.chat is None:
                text = f"tools of type {named.kind[:40]!r} are not called here; functions are"
                raise field_error("tool_choice", text)
            choice = {"type": "function", "function": {"name": named.flat_name}}
        elif kind == "allowed_tools":
            tools, choice = _allowed(choice, tools)
        else:
            text = f"type {str(kind)[:40]!r} is not supported; 'function' and 'allowed_tools' are"
            raise field_error("tool_choice", text)
    tools = [tool for tool in tools if tool.chat is not None]
    if not tools:
        if choice not in (None, "auto", "none"):
            raise field_error("tool_choice", f"{str(choice)[:40]!r} needs tools of type 'function'")
        return {}
    return {"tools": [tool.chat for tool in tools], "tool_choice": choice}


def left_out(request: ResponsesRequest) -> tuple[str, ...]:
    """The types of tools that the model is not told of, as unknown fields are named."""
    kinds = {tool.kind for tool in listed(request.tools) if tool.chat is None}
    return tuple(f"tools of type {kind}" for kind in sorted(kinds))


def repeated(tools: list[Json] | None) -> list[Json]:
    """The tools as an answer repeats them: each function says all that it may say."""

    def filled(tool: Json) -> Json:
        if tool.get("type") == "namespace":
            return {**tool, "tools": [filled(one) for one in tool["tools"]]}
        if tool.get("type") != "function":
            return tool
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}

    return [filled(tool) for tool in tools or ()]


def _allowed(choice: Json, tools: list[Tool]) -> tuple[list[Tool], Any]:
    """The tools that the model is told of, and the choice among them: only a grammar could keep it from calling the others."""
    allowed = choice.get("tools")
    if choice.get("mode") not in ("auto", "required") or not isinstance(allowed, list):
        raise field_error("tool_choice", "allowed_tools has a mode, 'auto' or 'required', and tools")
    missing = "each of the allowed tools must be one of tools, and {!r} is none"
    named = _named([tool for tool in allowed if isinstance(tool, dict)], tools, missing)
    return [tool for tool in tools if tool in named], choice["mode"]


def _named(choices: list[Json], tools: list[Tool], missing: str) -> list[Tool]:
    """The tools that choices name: a function of a namespace by both names in one, or by its own where that is one function's."""
    found = []
    for choice in choices:
        name = choice.get("name") or choice.get("type")
        wanted = flat(choice.get("namespace"), str(name))
        fits = [tool for tool in tools if tool.flat_name == wanted] or [tool for tool in tools if tool.name == wanted]
        if not fits:
            raise field_error("tool_choice", f"{missing.format(str(name)[:40])}")
        if len(fits) > 1:
            raise field_error("tool_choice", f"{len(fits)} namespaces have a tool {wanted[:40]!r}")
        found += fits
    return found


def listed(tools: list[Json] | None) -> list[Tool]:
    """All tools, those within namespaces among them."""
    found = []
    for place, tool in enumerate(tools or []):
        where = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise HttpError(400, f"{where}: a tool is an object", "tools")
        if tool.get("type") != "namespace":
            found.append(_tool(tool, where, None))
            continue
        name, inner = _name(tool, where), tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise HttpError(400, f"{where}.tools: must be a list of functions", "tools")
        found += [_tool(one, f"{where}.tools[{index}]", name) for index, one in enumerate(inner)]
    names = [tool.flat_name for tool in found if tool.namespace]
    if len(names) > len(set(names)):
        raise field_error("tools", "two functions of a namespace have one name")
    return found


def _tool(tool: Json, where: str, namespace: str | None) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        return Tool(str(kind), str(tool.get("name") or kind), namespace, None)
    found = Tool(kind, _name(tool, where), namespace, None)
    function = {name: tool[name] for name in _FIELDS if tool.get(name) is not None} | {"name": found.flat_name}
    return found._replace(chat={"type": "function", "function": function})


def _name(tool: Json, where: str) -> str:
    name = tool.get("name")
    if not (isinstance(name, str) and name):
        raise HttpError(400, f"{where}.name: must be a string, and not empty", "tools")
    return name
