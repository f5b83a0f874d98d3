"""/openapi.json and /docs, made of the routes (operation.py) and the Structs that bodies are read with. Pure."""

import html
import re
from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import msgspec

from meshlm.frontend.http.answer_fields import GROUPS, NEEDLESS
from meshlm.frontend.http.operation import EVENTS, Operation, Parameter
from meshlm.frontend.http.web_pages import HEADERS, source
from meshlm.frontend.routes.request_schema import Served, refine
from meshlm.runtime.api_keys import ADMIN

Json = dict[str, Any]
Refs = dict[type | GenericAlias, dict[str, Any]]
REASONS = {
    400: "A field or header is not allowed, or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The API key is for something else (--api-key-file, --admin-api-key); without keys: it comes from a web page of elsewhere.",
    404: "There is no such model, or nothing of the kind.",
    409: "It cannot be done now.",
    413: "The body is too large (--max-body-bytes).",
    415: "The body does not say that it is JSON, or a form where one is taken.",
    422: "The Idempotency-Key names another request.",
    429: "The key has asked too often (its limits in --api-key-file); try again after Retry-After seconds.",
    500: "The request was given up.",
    503: "The server is full or not ready; try again after Retry-After seconds.",
    504: "The request's time was over.",
}
_EVENT: Json = {  # of a stream, field by field
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, or [DONE]."}, "id": {"type": "string"}},
}
_TEXT: Json = {"schema": {"type": "string"}}
_DESCRIPTION = (
    "The API of OpenAI and vLLM, and Anthropic's messages. A field that changes the answer, of these or of another server, is "
    "honoured where a path has it, and refused by name, with status 400, where it has not and the field asks for something: "
    "{refused}. Without effect: {needless}. Other unknown fields are ignored."
)
_REF = "#/components/schemas/{name}"


def document(operations: Sequence[Operation], version: str, keys: bool, served: Served, root: str = "") -> Json:
    """The OpenAPI document. `keys`: all but the probes need one. `root`: the path under which a proxy has this server."""
    structs = {kind for op in operations for kind in (op.body, op.answers, op.error)}
    kinds = [kind for kind in structs if isinstance(kind, type | GenericAlias)]
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    refine(components, served)
    refs: Refs = dict(zip(kinds, references, strict=True))
    paths: Json = {}
    for op in operations:
        for method in op.methods:
            paths.setdefault(op.path, {})[method.lower()] = _operation(op, method, refs, keys, served)
    refused = ", ".join(f"`{name}`" for name in sorted({name for group in GROUPS.values() for name in group}))
    needless = ", ".join(f"`{name}`" for name in NEEDLESS)
    found: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "MeshLM",
            "version": version,
            "description": _DESCRIPTION.format(refused=refused, needless=needless),
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }
    if root:
        found["servers"] = [{"url": root}]
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(op: Operation, method: str, refs: Refs, keys: bool, served: Served) -> Json:
    errors = {*op.errors, *((401, 403) if (keys and not op.is_open) or op.key_scope == ADMIN else ())}
    if keys and method == "POST" and op.counts:
        errors.add(429)
    if not keys and not op.is_probe:
        errors |= {403} | ({415} if op.body is not None else set())
    found: Json = {
        "operationId": f"{method.lower()}{re.sub('[^a-z]+', '_', op.path)}".rstrip("_"),
        "summary": op.summary,
    }
    if op.parameters:
        found["parameters"] = [_parameter(one, served) for one in op.parameters]
    if op.body is not None:
        kind = "multipart/form-data" if op.is_form else "application/json"
        found["requestBody"] = {"required": True, "content": {kind: {"schema": refs[op.body]}}}
    found["responses"] = {"200": _success(op, refs)}
    for status in sorted(errors):
        content = {"application/json": {"schema": refs[op.error]}}
        found["responses"][str(status)] = {"description": REASONS[status], "content": content}
        if status == 503:
            found["responses"]["503"]["headers"] = {"Retry-After": {**_TEXT, "description": "Seconds."}}
    for status in op.plain_errors:
        found["responses"][str(status)]["content"] |= _text(str(op.answers))
    if op.is_open:
        found["security"] = []
    return found


def _parameter(parameter: Parameter, served: Served) -> Json:
    schema = {"enum": list(served.names)} if parameter.name == "model" else parameter.schema
    found = {"name": parameter.name, "in": parameter.place, "required": parameter.place == "path", "schema": schema}
    return {**found, "description": parameter.description}


def _success(op: Operation, refs: Refs) -> Json:
    if op.answers is None:
        return {"description": "Nothing."}
    if isinstance(op.answers, str):
        return {"description": "As it is.", "content": _text(op.answers)}
    content = {"application/json": {"schema": refs[op.answers]}}
    for media_type in op.texts:
        content |= _text(media_type)
    if not op.streams:
        return {"description": "The answer.", "content": content}
    return {
        "description": "The answer; with stream: true server-sent events.",
        "content": {**content, EVENTS: {"schema": _EVENT}},
        "headers": {"X-Request-Id": {**_TEXT, "description": "The client's own, or the answer's id."}},
    }


def _text(media_type: str) -> Json:
    return {media_type.partition(";")[0]: {"schema": {} if "json" in media_type else {"type": "string"}}}


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}summary{cursor:pointer}"
    "details{border:1px solid #8886;border-radius:6px;margin:.5rem 0;padding:.5rem 1rem}code,pre{font:13px ui-monospace,monospace}"
    "table{border-collapse:collapse}td,th{border-bottom:1px solid #8884;padding:.2rem .6rem;text-align:left;vertical-align:top}"
)
PAGE_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": f"default-src 'none'; style-src {source(_STYLE)}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}


def page(api: Json) -> str:
    """The document as a page that needs nothing from anywhere else."""
    operations = [
        _section(method.upper(), path, operation, api)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{api['info']['title']} {api['info']['version']}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(api['info']['description'])}</p>"
        f"<p>For programs: <a href=openapi.json>openapi.json</a></p>{''.join(operations)}</html>"
    )


def _section(method: str, path: str, operation: Json, api: Json) -> str:
    rows = [(p["name"], p["schema"], p["in"], p["description"]) for p in operation.get("parameters", ())]
    body = next((one["schema"] for one in operation.get("requestBody", {}).get("content", {}).values()), None)
    fields = _table("Parameters", rows) + (_fields("Body", body, api) if body else "")
    answers = []
    for status, answer in operation["responses"].items():
        kinds = ", ".join(answer.get("content", ())) or "no body"
        answers.append(f"<tr><td>{status}<td>{html.escape(answer['description'])}<td><code>{html.escape(kinds)}</code>")
    ok = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
    shape = _fields("Answer", ok, api) if ok else ""
    return (
        f"<details><summary><b>{method}</b> <code>{html.escape(path)}</code> {html.escape(operation['summary'])}</summary>"
        f"{fields}<h4>Answers</h4><table>{''.join(answers)}</table>{shape}</details>"
    )


def _fields(title: str, reference: Json, api: Json) -> str:
    struct = api["components"]["schemas"].get(reference.get("$ref", "").rpartition("/")[2], {})
    required = struct.get("required", ())
    rows = []
    for name, field in struct.get("properties", {}).items():
        default = f"default {field['default']!r}" if field.get("default") is not None else ""
        rows.append((name, field, "required" if name in required else "", default))
    return _table(title, rows)


def _table(title: str, rows: list[tuple[str, Json, str, str]]) -> str:
    if not rows:
        return ""
    shown = [
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_kind(field))}<td>{html.escape(note)}<td>{html.escape(text)}"
        for name, field, note, text in rows
    ]
    return f"<h4>{title}</h4><table>{''.join(shown)}</table>"


def _kind(field: Json) -> str:
    """A schema in a few words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"])
    if "enum" in field:
        return " or ".join(repr(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]}" for key, sign in limits.items() if key in field]
    return " ".join((str(field.get("type", "anything")), *bounds))
