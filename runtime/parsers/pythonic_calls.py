"""`[name(key="value"), other()]`: calls as Python writes them, in a list or one on each line. Pure; nothing of it is ever run."""

import ast
import math
import re
import warnings

import msgspec

from meshlm.runtime.parsers.scan import Steps, nothing
from meshlm.runtime.parsers.streamed_calls import Answer
from meshlm.runtime.parsers.typed_values import escaped, quoted

MAX_DEPTH = 50  # of brackets: deeper ones could exhaust the compiler's stack
MAX_VALUE = 1 << 16  # characters of a value that is no string: it is held until it is complete
_JSON_NAMES = {"true": True, "false": False, "null": None}
_BEFORE_FIRST, _BETWEEN = re.compile(r"[\s\[]*"), re.compile(r"[\s,;]*")
_NAME = re.compile(r"[\w.]*")
_PLAIN = {mark: re.compile(rf"[^{mark[0]}\\]*") for mark in ('"""', "'''")} | {
    mark: re.compile(rf"[^{mark}\\\n]*") for mark in ('"', "'")
}
_STRING_REST = {
    mark: re.compile(rf"[^{mark[0]}\\]*(?:(?:\\.|(?!{mark}){mark[0]})[^{mark[0]}\\]*)*{mark}", re.DOTALL)
    for mark in _PLAIN
}
_MARKS = re.compile(r"""["'\[\](){},]""")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|N\{[^}\"']*\}|[^xuUN0-7])", re.DOTALL
)
_LONGEST_ESCAPE = 12


def calls(answer: Answer) -> Steps[None]:
    """A body of calls, with the names of tools that the request names and with named arguments."""
    found = False
    while True:
        answer.hold()
        yield from answer.run(_BETWEEN if found else _BEFORE_FIRST)
        if not (yield from _call(answer)):
            answer.back()
            break
        answer.drop()
        found = True
    if found:
        yield from answer.take_behind_blanks("]")


def _call(answer: Answer) -> Steps[bool]:
    """One call. It begins when its first argument is known to be a value; what ends it too early leaves its arguments unfinished."""
    name = yield from answer.run(_NAME)
    yield from answer.blanks()
    if name not in answer.tools or not (yield from answer.take("(")):
        return False
    begun, separator = False, "{"
    while True:
        yield from answer.blanks()
        if (yield from answer.take(")")):
            break
        answer.hold()
        key = yield from answer.run(_NAME)
        yield from answer.blanks()
        equals = bool(key) and bool((yield from answer.take("=")))
        yield from answer.blanks()
        value = yield from _literal(answer) if equals else nothing()
        if value is None:
            answer.back()
            return begun
        answer.drop()
        if not begun:
            answer.begin(name)
            begun = True
        answer.add(f"{separator}{quoted(key)}:{value}")
        separator = ","
        if not value and not (yield from _string(answer)):
            return True
        yield from answer.blanks()
        if not (yield from answer.take(",")):
            if (yield from answer.take(")")):
                break
            return True
    if not begun:
        answer.begin(name)
    answer.add("}" if begun else "{}")
    answer.end()
    return True


def _literal(answer: Answer) -> Steps[str | None]:
    """A value as JSON; "" for a string, which `_string` then gives out as it comes; None for what JSON has not."""
    if (yield from answer.ahead('"', "'")):
        return ""
    depth, place, text = 0, 0, ""
    while True:  # `place` counts from the value's beginning
        text = answer.text[answer.at :]
        end = -1
        while found := _MARKS.search(text, place):
            mark = found.group()
            if mark in "\"'":
                closing = _string_end(text, found.start())
                if closing < 0:
                    break
                place = closing
                continue
            if mark in ",)" and not depth:
                end = found.start()
                break
            depth += (mark in "([{") - (mark in ")]}")
            place = found.end()
            if depth < 0 or depth > MAX_DEPTH:
                return None
        if 0 <= end <= MAX_VALUE:
            answer.at += end
            return _json(text[:end])
        if answer.ended or len(text) > MAX_VALUE:
            return None
        yield


def _string_end(text: str, at: int) -> int:
    """The place behind the string that begins here, or -1."""
    mark = text[at] * 3 if text.startswith(text[at] * 3, at) else text[at]
    found = _STRING_REST[mark].match(text, at + len(mark))
    return found.end() if found else -1


def _json(text: str) -> str | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in the model's strings
            return msgspec.json.encode(_value(ast.parse(text.strip(), mode="eval").body)).decode()
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return None


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
            is_finite = not isinstance(found, float) or math.isfinite(found)
            if not isinstance(found, str | int | float | None) or not is_finite:
                raise ValueError("no value that JSON has")
            return found


def _key(node: ast.expr | None) -> str:
    found = ast.literal_eval(node) if node is not None else None
    if not isinstance(found, str):
        raise ValueError("no text as a key")
    return found


def _string(answer: Answer) -> Steps[bool]:
    """A string, or several side by side, given out as JSON while it comes; False where it does not end."""
    answer.add('"')
    while True:
        mark = yield from answer.take('"""', "'''", '""', "''", '"', "'")
        if len(mark) != 2 and not (yield from _inside(answer, mark)):
            return False
        answer.hold()
        yield from answer.blanks()
        if not (yield from answer.ahead('"', "'")):
            answer.back()
            answer.add('"')
            return True
        answer.drop()


def _inside(answer: Answer, mark: str) -> Steps[bool]:
    """The text of one string up to its closing mark."""
    while True:
        found = _PLAIN[mark].match(answer.text, answer.at)
        end = found.end() if found else answer.at
        answer.add(escaped(answer.text[answer.at : end]))
        answer.at = end
        if (yield from answer.take(mark)):
            return True
        sign = answer.text[answer.at : answer.at + 1]
        if sign == "\\":
            yield from _escape(answer)
        elif sign == "\n" and len(mark) == 1:
            return False  # no string of Python goes on behind a line break
        elif sign:
            answer.add(escaped(sign))
            answer.at += 1
        elif answer.ended:
            return False


def _escape(answer: Answer) -> Steps[None]:
    """One escape; where it means nothing, its backslash is text."""
    while True:
        text = answer.text[answer.at : answer.at + _LONGEST_ESCAPE]
        found = _ESCAPE.match(text)
        if found and (found.end() < len(text) or answer.ended or found.group()[1] not in "01234567"):
            answer.at += found.end()
            with warnings.catch_warnings(action="ignore"):
                try:
                    meant = str(ast.literal_eval(f'"""{found.group()}"""' if text[1] != '"' else "'\"'"))
                    answer.add(escaped(meant))
                except (SyntaxError, ValueError):
                    answer.add(escaped(found.group()))
            return
        if answer.ended or len(text) == _LONGEST_ESCAPE:
            answer.add(escaped("\\"))
            answer.at += 1
            return
        yield
