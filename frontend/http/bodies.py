"""A request body to its Struct of schema.py. Pure; HttpError says what is wrong with the JSON, or names the field at fault.

Called by routes.py. Numbers and truths are read as pydantic reads them for vLLM, of which msgspec has nearly the same rules.

A large body is read in a thread beside the loop, but a thread waits for nobody while it is inside msgspec. So nothing here decodes, or
frees, millions of values in one call: fields are looked at before they are decoded, and the prompts of a list are decoded one by one.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from meshlm.frontend.http.answer_fields import ANSWER, NEEDLESS, PROMPT, asks_for_nothing, why_refused
from meshlm.frontend.http.errors import HttpError

Body = TypeVar("Body", bound=Struct)

# What a body may hold, so that nobody waits long for its decoding: 0.2 µs for an array or object, 0.1 for a text, 0.02 for a number.
MAX_CONTAINERS = 1 << 17
MAX_TEXTS = 300_000  # names of fields too
MAX_VALUES = 6_000_000
MAX_FIELDS = 1024
MAX_IN_LIST = 1 << 20  # of one list, or as many as the context holds
MAX_LARGE_DEPTH = 6  # so deep what is in a large body may be large
BEGINNINGS = (4 << 20, 12 << 20)  # most bodies that have too many have so already here
LARGE_BYTES = 1 << 18  # a longer body is not read by the loop

_OTHERS = bytes(set(range(256)) - set(b'[{,"'))


def decode(
    body: bytes,
    kind: type[Body],
    check: Callable[[Mapping[str, Raw]], None] = lambda fields: None,
    longest: int = MAX_IN_LIST,
) -> tuple[Body, tuple[str, ...]]:
    """The body as its Struct, and the fields that nobody knows. `check` sees those of a large one undecoded; a list holds `longest`."""
    return converted(fields_of(body, check, longest), kind)


def converted(raw: dict[str, Any], kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """Fields as their Struct, and the names of those that nobody knows."""
    try:
        value = msgspec.convert(raw, kind, strict=False)  # 16.0 and "16" are numbers here, as for vLLM
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`")
        if not path and "required field" in what:
            param = what.rpartition("`")[0].rpartition("`")[2]
        raise HttpError(400, f"{param}: {what}" if param else what, param.split("[")[0]) from None
    for name in kind.__struct_fields__:
        if isinstance(given := raw.get(name), str) and getattr(value, name) is None:
            raise HttpError(400, f"{name}: the text {given!r} is no null", name)
    return value, _unknown(raw, value)


def fields_of(
    body: bytes, check: Callable[[Mapping[str, Raw]], None] = lambda fields: None, longest: int = 1 << 62
) -> dict[str, Any]:
    """The JSON object that the body is. HttpError when it is none."""
    is_large, where = len(body) > LARGE_BYTES, ""
    if not is_large:
        check_counts(body)
    try:
        found = msgspec.json.decode(body, type=dict[str, Raw] if is_large else dict[str, Any])
        if len(found) > MAX_FIELDS:
            raise HttpError(400, f"the body has {len(found)} fields; at most {MAX_FIELDS} are taken")
        if is_large:
            check(found)
            check_counts(body)
            for name, value in found.items():
                where = f" of the field {name[:40]!r}"
                found[name] = _in_pieces(memoryview(value), longest)
    except msgspec.DecodeError as error:
        if str(error).startswith("Expected `object`"):
            raise HttpError(400, f"the body must be a JSON object: {error}") from None
        raise HttpError(400, f"the body is not valid JSON: {error}{where}") from None
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not valid UTF-8: {error.reason} at byte {_bad_byte(body)}") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    return found


def _in_pieces(value: memoryview, longest: int, depth: int = 0) -> Any:
    """A value, in several calls where it is long: each prompt of many, each message, each field of an object is one."""
    if len(value) <= LARGE_BYTES or value[0] not in b"[{":
        return msgspec.json.decode(value)
    begin = bytes(value[:64]).translate(None, b" \n\r\t")
    if depth < MAX_LARGE_DEPTH and begin.startswith(b"{"):
        fields = msgspec.json.decode(value, type=dict[str, Raw])
        return {name: _in_pieces(memoryview(inner), longest, depth + 1) for name, inner in fields.items()}
    if depth < MAX_LARGE_DEPTH and begin.startswith((b"[[", b"[{")):
        items = msgspec.json.decode(value, type=list[Raw])
        return [_in_pieces(memoryview(item), longest, depth + 1) for item in items]
    if not begin.startswith(b'["') and bytes(value).count(b",") >= longest:
        raise HttpError(400, f"a list has more than {longest} values")
    return msgspec.json.decode(value)


def check_counts(body: bytes) -> None:
    """HttpError when the body has so many values that to decode it would hold up everybody else. No loop in Python, at any size."""
    for size in (*BEGINNINGS, len(body)):
        begin = body[:size]
        if _too_many(begin):
            plain = begin.replace(b"\\\\", b"").replace(b'\\"', b"")
            if text := _too_many(plain, of=b'"') or _too_many(b"".join(plain.split(b'"')[::2]), of=b"[{,"):
                raise HttpError(400, text)
        if size >= len(body):
            return


def _too_many(json: bytes, of: bytes = b'[{,"') -> str:
    """Says what there is too much of, or "" for nothing. Brackets and commas inside texts count too."""
    marks = json.translate(None, _OTHERS)
    counts = {kind: len(marks) - len(marks.translate(None, kind)) for kind in (b"[{", b'"', b",") if kind in of}
    if counts.get(b"[{", 0) > MAX_CONTAINERS:
        return f"the body has more than {MAX_CONTAINERS} arrays and objects"
    if counts.get(b'"', 0) > 2 * MAX_TEXTS:
        return f"the body has more than {MAX_TEXTS} texts and names"
    return f"the body has more than {MAX_VALUES} values" if counts.get(b",", 0) > MAX_VALUES else ""


def _unknown(raw: dict[str, Any], value: Struct, before: str = "") -> tuple[str, ...]:
    """The names of the fields that nobody knows, also of objects within. HttpError for one that would change the answer."""
    kind, found = type(value), list[str]()
    changes = getattr(kind, "changes", None)
    for name in sorted(raw.keys() - set(kind.__struct_fields__)):
        full = f"{before}{name}"
        if changes is not None:
            why = why_refused(name, changes)
        else:
            why = why_refused(full, (PROMPT, ANSWER)) if before else ""
        if why and not asks_for_nothing(name, raw[name]):
            instead = getattr(kind, "names_here", {}).get(name)
            raise HttpError(400, f"{full}: {f'not supported on this path; {instead} is' if instead else why}", full)
        if not why and name not in NEEDLESS and full not in NEEDLESS:
            found.append(full)
    for name in kind.__struct_fields__:
        inner = getattr(value, name)
        if isinstance(inner, Struct) and isinstance(given := raw.get(name), dict):
            found += _unknown(given, inner, f"{before}{name}.")
    return tuple(found)


def _bad_byte(body: bytes) -> int:
    """The place of the first byte that is not UTF-8; msgspec counts from the beginning of the string that holds it."""
    try:
        return len(body.decode())
    except UnicodeDecodeError as error:
        return error.start
