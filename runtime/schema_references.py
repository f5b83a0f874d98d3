"""References within a JSON schema: what `$ref` names, by pointer, `$id` or `$anchor`. Pure.

Used by whoever reads a schema (schema_reader.py) or makes a grammar of one (frontend/openai/tool_choice.py,
detokenizer/json_schemas.py). Nothing here recurses, so no schema of a client is too deep or too long for it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

import msgspec

Json = dict[str, Any]
DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
# whose values are schemas by name
NAMED = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas"
_MARKS = (b'"$id"', b'"$anchor"')
_PLACE = ("$id", "$anchor")
MAX_POINTER = 4096  # characters; a longer one names nothing


class TooDeep(ValueError):
    """A schema is nested deeper than whoever asked takes."""


class TooLarge(ValueError):
    """A schema is larger than whoever asked takes."""


def target(root: Any, reference: Any) -> Any:
    """The schema that a pointer within the document names; None where it names none."""
    if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > MAX_POINTER:
        return None
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < 10 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def pointer_step(name: str) -> str:
    """A name within a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def with_pointers(schema: Json) -> Json:
    """The schema with each reference as a pointer from its root, so that it needs no `$id` and no `$anchor`."""
    try:
        written = msgspec.json.encode(schema)
    except RecursionError:
        written = _MARKS[0]
    return moved(schema, "#") if any(mark in written for mark in _MARKS) else schema


def moved(schema: Json, base: str, max_depth: int | None = None) -> Json:
    """A copy that stands at the pointer `base` of another document, with its references into itself as pointers to there. References to
    what is not in it stay as they are. TooDeep."""
    paths_of_uris = _paths_of_uris(schema)
    found: Json = copied(schema, lambda subschema, uri: _point(subschema, uri, paths_of_uris, base), max_depth)
    return found


def extracted(schema: Mapping[str, Any], root: Any, take: Callable[[], None] = lambda: None) -> Json:
    """A schema within a document as one of its own, with all that its references name. `take` is called for each schema in it."""
    names, waiting = dict[str, str](), list[tuple[str, Any]]()

    def point(subschema: Json, uri: str) -> None:
        take()
        reference = subschema.get("$ref")
        if not isinstance(reference, str):
            return
        if reference not in names:
            if (found := target(root, reference)) is None:
                return
            names[reference] = str(len(names))
            waiting.append((names[reference], found))
        subschema["$ref"] = f"#/$defs/{names[reference]}"

    bare = {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
    found, definitions = copied(bare, point), dict[str, Any]()
    while waiting:
        name, one = waiting.pop()
        definitions[name] = copied(one, point)
    return {**found, "$defs": definitions} if definitions else found


def copied(schema: Any, change: Callable[[Json, str], None], max_depth: int | None = None) -> Any:
    """A copy in which `change` was called with each schema and the URI against which its references are read. TooDeep."""
    copy: list[Any] = [schema]
    # What is still to copy: where its copy goes, the URI, whether it is a mapping of names to schemas, and its depth.
    waiting: list[tuple[Any, Any, str, bool, int]] = [(copy, 0, "", False, 0)]
    while waiting:
        holder, key, uri, is_named, depth = waiting.pop()
        if max_depth is not None and depth > max_depth:
            raise TooDeep
        subschema = holder[key]
        if isinstance(subschema, list):
            holder[key] = subschema = list(subschema)
            waiting += [(subschema, index, uri, False, depth + 1) for index in range(len(subschema))]
        elif isinstance(subschema, Mapping):
            holder[key] = subschema = dict(subschema)
            if not is_named:
                uri = _uri_of(subschema, uri)
                change(subschema, uri)
            for name, inner in subschema.items():
                if is_named or name not in DATA:
                    names = not is_named and name in NAMED and isinstance(inner, Mapping)
                    waiting.append((subschema, name, uri, names, depth if names else depth + 1))
    return copy[0]


def _point(subschema: Json, uri: str, paths_of_uris: Mapping[str, str], base: str) -> None:
    """The reference of this schema as a pointer; its names for others go, as nothing needs them any more. Changes it."""
    reference = subschema.get("$ref")
    if isinstance(reference, str) and len(reference) <= MAX_POINTER:
        document, _, fragment = _joined(uri, reference).partition("#")
        if (not fragment or fragment.startswith("/")) and document in paths_of_uris:
            subschema["$ref"] = base + paths_of_uris[document] + fragment
        elif (base_path := paths_of_uris.get(f"{document}#{fragment}")) is not None:
            subschema["$ref"] = base + base_path
    for name in _PLACE:
        if isinstance(subschema.get(name), str):
            del subschema[name]


def _paths_of_uris(schema: Any) -> dict[str, str]:
    """The pointers of what has a name of its own: documents by URI, anchors by URI#name. The root is the URI ""."""
    found = {"": ""}
    for subschema, path, uri in _schemas(schema):
        named = subschema.get("$id")
        names = [
            f"{uri}#{subschema[keyword]}"
            for keyword in ("$anchor", "$dynamicAnchor")
            if isinstance(subschema.get(keyword), str)
        ]
        if isinstance(named, str):  # one with # is an anchor, as older drafts write it
            names.append(uri + named if named.startswith("#") else uri)
        if names and (pointer := _pointer(path)) is not None:
            for name in names:
                found.setdefault(name, pointer)
    return found


Path = tuple[Any, Any] | None  # the path of what a part is in, and its place there; None: the root


def _pointer(path: Path) -> str | None:
    """None for one that is too long."""
    steps, length = list[str](), 0
    while path is not None:
        path, step = path
        length += 1 + len(str(step))
        if length > MAX_POINTER:
            return None
        steps.append(pointer_step(str(step)))
    return "".join(f"/{step}" for step in reversed(steps))


def _schemas(schema: Any) -> Iterator[tuple[Mapping[str, Any], Path, str]]:
    """Each schema of the document with its path and the URI of the document that it is in."""
    waiting: list[tuple[Any, Path, str, bool]] = [(schema, None, "", False)]
    while waiting:
        subschema, path, uri, is_named = waiting.pop()
        if isinstance(subschema, list):
            waiting += [(inner, (path, index), uri, False) for index, inner in enumerate(subschema)]
        elif isinstance(subschema, Mapping):
            if not is_named:
                uri = _uri_of(subschema, uri)
                yield subschema, path, uri
            for name, inner in subschema.items():
                if (is_named or name not in DATA) and isinstance(inner, list | Mapping):
                    names = not is_named and name in NAMED and isinstance(inner, Mapping)
                    waiting.append((inner, (path, name), uri, names))


def _uri_of(subschema: Mapping[str, Any], uri: str) -> str:
    named = subschema.get("$id")
    if isinstance(named, str) and len(named) > MAX_POINTER:
        return uri
    return _joined(uri, named).partition("#")[0] if isinstance(named, str) and not named.startswith("#") else uri


def _joined(uri: str, reference: str) -> str:
    if reference.startswith("#"):  # also of a URN, against which nothing else can be read
        return uri + reference
    try:
        return urljoin(uri, reference)
    except ValueError:
        return reference
