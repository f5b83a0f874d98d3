"""`[name(key="value"), other()]`: calls as a Python list, as Llama 3.2 and ToolACE write them."""

import ast
import math
import warnings

import msgspec

from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.whole_calls import WholeCalls, WholeForm

MAX_DEPTH = 50  # of brackets: deeper ones could exhaust the compiler's stack
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read(text: str, tools: Tools) -> list[Call]:
    """The calls of a whole answer. The text is parsed, never run: values are literals."""
    if _depth(text) > MAX_DEPTH:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in the model's strings
            found = ast.parse(text, mode="eval").body
            return [_call(node) for node in found.elts] if isinstance(found, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _depth(text: str) -> int:
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments")
    values = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    try:
        return Call(ast.unparse(node.func), msgspec.json.encode(values).decode())
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> object:
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_key(key) for key in keys]
            if len(set(names)) < len(names):
                raise ValueError("a key twice")
            return dict(zip(names, map(_value, values), strict=True))
        case _:
            found = ast.literal_eval(node)
            if not isinstance(found, str | int | float | None) or (
                isinstance(found, float) and not math.isfinite(found)
            ):
                raise ValueError("no value that JSON has")
            return found


def _key(node: ast.expr | None) -> str:
    found = ast.literal_eval(node) if node is not None else None
    if not isinstance(found, str):
        raise ValueError("no text as a key")
    return found


FORM = WholeForm(read, starts=("[",))
PARSER = ToolParser(lambda tools: WholeCalls(FORM, tools))
