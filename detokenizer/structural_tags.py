"""Structural tags to Lark: free text in which tags have contents with grammars of their own. Pure.

Read are vLLM's older form (`structures` and `triggers`) and the newer one (`format`), as xgrammar defines it. Called by grammars.py.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

ANY_TEXT = r"/(.|\n)*/"
MAX_DEPTH = 32  # of formats within formats


class GrammarError(ValueError):
    """The text names the part at fault."""


def to_lark(text: str) -> str:
    """Lark as it is, EBNF (GBNF) translated. GrammarError for what is neither."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(f"the grammar is not understood: {next(iter(str(error).splitlines()), '')[:300]}") from None


class StructuralTag:
    """Translates one structural tag. `schema` prepares a JSON schema for `%json`; `special` are the ids of special tokens by their
    text, which no text matches."""

    def __init__(self, special: Mapping[str, int], schema: Callable[[Any], dict[str, Any]]) -> None:
        self._special, self._schema = special, schema
        self._rules: list[str] = []
        self._made: dict[str, str] = {}
        self._grammars: list[dict[str, str]] = []
        named = sorted(filter(None, special), key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, named))) if named else None
        self._kinds: dict[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": lambda part, depth: self._text(_string(part, "value")),
            "json_schema": self._json,
            "regex": lambda part, depth: _regex(_string(part, "pattern")),
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": lambda part, depth: " ".join(self._all(part, "elements", depth)) or '""',
            "or": lambda part, depth: "(" + " | ".join(self._all(part, "elements", depth, least=1)) + ")",
            "optional": lambda part, depth: f"({self._content(part, depth)})?",
            "star": lambda part, depth: f"({self._content(part, depth)})*",
            "plus": lambda part, depth: f"({self._content(part, depth)})+",
            "repeat": self._repeat,
            "tag": lambda part, depth: self._tag(part, depth),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "joined": self._joined,
            "beginning_or": self._beginning_or,
        }

    def translate(self, text: str) -> str:
        """The library's grammar: Lark, or JSON with several grammars. GrammarError."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise GrammarError(f"it is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise GrammarError("it must be a JSON object")
        start = self._format(given["format"] if "format" in given else _of_structures(given), 0)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._grammars:
            return json.dumps({"grammars": [{"lark_grammar": lark}]})
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._grammars]})

    def behind_optional(self, begin: str, end: str, grammar: str) -> str:
        """The library's grammar `grammar`, behind free text between `begin` and `end` or without it."""
        first, *others = json.loads(grammar)["grammars"]
        opens = self._text(begin)
        if "<[" in opens:
            tag = f"/\\s*/ {self._tag({'begin': begin, 'content': {'type': 'any_text'}, 'end': end}, 0)}"
        else:  # an answer that begins so has reasoning, though free text of the other grammar might begin so, too
            head = self._rule(f"/\\s*/ {opens}", "[lazy]")
            tag = f"{head} {self._tag({'begin': begin, 'content': {'type': 'any_text'}, 'end': end}, 0, '')}"
        lark = "\n".join(["%llguidance {}", f"start: ({tag} /\\s*/)? @body", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "body"}, *others]})

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _format(self, part: Any, depth: int) -> str:
        if not isinstance(part, dict):
            raise GrammarError("each format must be an object with a type")
        translate = self._kinds.get(part.get("type", ""))
        if translate is None:
            known = ", ".join(sorted(self._kinds))
            raise GrammarError(f"format {part.get('type')!r} is not supported; {known} are")
        if depth > MAX_DEPTH:
            raise GrammarError(f"formats are nested more than {MAX_DEPTH} deep")
        key = json.dumps(part)
        if key not in self._made:  # one rule for formats that are the same
            self._made[key] = self._rule(translate(part, depth + 1))
        return self._made[key]

    def _content(self, part: dict[str, Any], depth: int) -> str:
        return self._format(part.get("content"), depth)

    def _all(self, part: dict[str, Any], name: str, depth: int, least: int = 0) -> list[str]:
        return [self._format(element, depth) for element in _list(part, name, least)]

    def _text(self, text: str) -> str:
        """A text, in which special tokens are tokens."""
        pieces, at = [], 0
        for match in self._cut.finditer(text) if self._cut is not None else ():
            pieces += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(filter(None, [*pieces, _quoted(text[at:])])) or '""'

    def _json(self, part: dict[str, Any], depth: int) -> str:
        if part.get("style", "json") != "json":
            raise GrammarError(f"json_schema: style {part['style']!r} is not supported; 'json' is")
        _refuse(part, "any_order", "max_whitespace_cnt", "excludes")
        return f"%json {json.dumps(self._schema(part.get('json_schema', {})))}"

    def _grammar(self, part: dict[str, Any], depth: int) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": to_lark(_string(part, "grammar"))})
        return f"@{name}"

    def _any_text(self, part: dict[str, Any], depth: int) -> str:
        _refuse(part, "excludes", "max_tokens", "max_chars")
        return ANY_TEXT

    def _repeat(self, part: dict[str, Any], depth: int) -> str:
        least, most = part.get("min"), part.get("max")
        if not isinstance(least, int) or not isinstance(most, int) or least < 0 or (most != -1 and most < least):
            raise GrammarError("repeat: min and max must be numbers, min at most max; max -1 is no limit")
        return f"({self._content(part, depth)}){{{least},{'' if most == -1 else most}}}"

    def _tag(self, part: dict[str, Any], depth: int, begin: str | None = None) -> str:
        """begin: what is left of its beginning, behind a trigger."""
        ends = part.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError("tag: end must be a text, or a list of texts")
        first = self._text(_string(part, "begin") if begin is None else begin)
        content = part.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            _refuse(content, "excludes", "max_tokens", "max_chars")
            return f"{first} ({' | '.join(map(self._until, ends))})"
        return f"{first} {self._format(content, depth)} ({' | '.join(map(self._text, ends))})"

    def _until(self, end: str) -> str:
        """Any text up to the first place where this one stands, and it."""
        if not end:
            return ANY_TEXT
        pieces = self._text(end)
        if pieces.startswith("<["):
            return self._rule(f"{ANY_TEXT} {pieces}")
        plain, _, rest = pieces.partition(" <[")
        found = self._rule(f"{ANY_TEXT} {plain}", "[lazy]")
        return f"{found} <[{rest}" if rest else found

    def _triggered(self, part: dict[str, Any], depth: int) -> str:
        _refuse(part, "excludes")
        triggers = [trigger for trigger in _list(part, "triggers", 1) if isinstance(trigger, str) and trigger]
        if len(triggers) < len(part["triggers"]):
            raise GrammarError("triggers must be texts, and not empty")
        after, whole = [], []
        for one in _list({"patterns": [], **part}, "patterns"):  # of MeshLM's own, like the two formats below
            begin = self._rule(f"{ANY_TEXT} {_regex(_string(one, 'pattern'))}", "[lazy]")
            after.append(self._rule(f"{begin} {self._content(one, depth)}"))
        for tag in _list(part, "tags", 1):
            begin = _string(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"no trigger is the beginning of the tag {begin!r}")
            body = self._rule(self._tag(tag, depth, begin.removeprefix(trigger)))
            after.append(self._rule(f"{self._until(trigger)} {body}"))
            whole.append(self._rule(f"{self._text(trigger)} {body}"))
        tags, first = f"({' | '.join(after)})", f"({' | '.join(whole)})"
        is_needed = _flag(part, "at_least_one")
        if _flag(part, "stop_after_first"):
            return first if is_needed else f"({tags} | {ANY_TEXT})"
        return f"{first if is_needed else ''} {tags}* {ANY_TEXT}"

    def _separated(self, part: dict[str, Any], depth: int) -> str:
        tags = "(" + " | ".join(self._rule(self._tag(tag, depth)) for tag in _list(part, "tags", 1)) + ")"
        if not _flag(part, "stop_after_first"):
            tags = f"{tags} ({self._text(_string(part, 'separator'))} {tags})*"
        return tags if _flag(part, "at_least_one") else f"({tags})?"

    # --- two formats of MeshLM's own, for calls that are no tags (runtime/parsers/structures.py) ---

    def _joined(self, part: dict[str, Any], depth: int) -> str:
        """Elements in their order, those that are not required or left out, with a separator between any two. A rule each."""
        between = self._format(part.get("separator"), depth)
        first = behind = self._rule('""')  # what may follow where no element came before, and where one did
        for element in reversed(_list(part, "elements")):
            one, is_required = self._content(element, depth), element.get("required") is True
            more = f"{between} {one} {behind}"
            first = self._rule(f"{one} {behind}" if is_required else f"({one} {behind} | {first})")
            behind = self._rule(more if is_required else f"({more} | {behind})")
        return first

    def _beginning_or(self, part: dict[str, Any], depth: int) -> str:
        """What begins with a text of one of these patterns has the content behind it, anything else is of the other format."""
        found = []
        for one in _list(part, "beginnings", 1):
            begin = self._rule(_regex(_string(one, "pattern")), "[lazy]")
            found.append(f"{begin} {self._content(one, depth)}")
        return f"({' | '.join(found)} | {self._format(part.get('otherwise'), depth)})"


def _of_structures(given: dict[str, Any]) -> dict[str, Any]:
    tags = []
    for tag in _list(given, "structures", 1):
        begin, end, schema = _string(tag, "begin"), _string(tag, "end"), tag.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": _list(given, "triggers", 1), "tags": tags}


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _regex(pattern: str) -> str:
    return "/" + re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL) + "/"


def _string(part: Any, name: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise GrammarError(f"{name} must be a text")
    return value


def _flag(part: dict[str, Any], name: str) -> bool:
    if not isinstance(value := part.get(name), bool | None):
        raise GrammarError(f"{name} must be true or false")
    return value is True


def _list(part: dict[str, Any], name: str, least: int = 0) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or len(value) < least:
        raise GrammarError(f"{name} must be a list{' with one entry at least' if least else ''}")
    return value


def _refuse(part: dict[str, Any], *names: str) -> None:
    for name in names:
        if part.get(name):
            raise GrammarError(f"{part.get('type')}: {name} is not supported")
