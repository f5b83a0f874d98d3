"""What a client asks of the text's form, in the language of the library that matches it: llguidance's.

Called by grammar_child.py, in a process that may die of it (grammar_cache.py): the library recurses as deep as a schema's references
and a grammar's rules do, and takes as long as they want.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from meshlm.detokenizer import json_schemas
from meshlm.detokenizer.structural_tags import GrammarError, StructuralTag, to_lark
from meshlm.protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from meshlm.runtime.grammars import limits


class Grammars:
    """`translated` is what its name says, in this process."""

    def __init__(
        self, special: dict[str, int], *, may_end: bool = True, can_write: Callable[[str], bool] = lambda text: True
    ) -> None:
        """special: the ids of special tokens by their text. may_end: the model has a token that ends its text. can_write: its tokens
        make up this text."""
        self._special, self._may_end, self._can_write = special, may_end, can_write

    def translated(self, grammar: Grammar) -> tuple[str, str]:
        """The library's text, or what is wrong with the grammar."""
        from llguidance import LLMatcher

        if not self._may_end:
            return "", "this model has no end-of-sequence token, so no text of it can end where a grammar does"
        if (size := len(grammar.text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
            return "", f"{size} bytes; at most {MAX_GRAMMAR_BYTES} in one grammar"
        try:
            text = self._text(grammar)
            if grammar.opens_with:
                text = self._tags(grammar).behind_optional(grammar.opens_with, grammar.begins_after, text)
        except GrammarError as error:
            return "", str(error)
        except RecursionError:
            return "", "the grammar is nested too deeply"
        wrong = LLMatcher.validate_grammar(text, None, limits=limits())
        return ("", _told(wrong)) if wrong and not wrong.startswith("WARNING") else (text, "")

    def _text(self, grammar: Grammar) -> str:
        """GrammarError for what is no such grammar."""
        from llguidance import LLMatcher

        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(json.dumps(self._schema(grammar, _parsed(grammar.text))))
            case GrammarKind.JSON_OBJECT:
                return LLMatcher.grammar_from_json_schema(json.dumps(self._schema(grammar, {"type": "object"})))
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                given = json.loads(grammar.text)
                if not (choices := list(filter(self._can_write, given))):
                    raise _unwritable(json.dumps(given[0]))
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
            case GrammarKind.GRAMMAR:
                return LLMatcher.grammar_from_lark(to_lark(grammar.text))
            case GrammarKind.STRUCTURAL_TAG:
                return self._tags(grammar).translate(grammar.text)
            case GrammarKind.COMPILED | GrammarKind.FREE:
                return grammar.text

    def _schema(self, grammar: Grammar, schema: Any) -> dict[str, Any]:
        """GrammarError where nothing fits it but texts that the model cannot write."""
        made = _schema(grammar, schema)
        if not grammar.strict and '"pattern"' in grammar.text and _refused(made):
            json_schemas.leave_out_patterns(made, lambda pattern: not _refused({"type": "string", "pattern": pattern}))
        if (left_out := json_schemas.leave_out(made, self._can_write)) and _refused(made).startswith("Unsatisfiable"):
            raise _unwritable(left_out)
        return made

    def _tags(self, grammar: Grammar) -> StructuralTag:
        return StructuralTag(self._special, lambda schema: self._schema(grammar, schema))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None


def _schema(grammar: Grammar, schema: Any) -> dict[str, Any]:
    """The schema with the options of the library, which it reads from a key of its own."""
    if isinstance(schema, bool):
        if not schema:
            raise GrammarError("no JSON fits the schema false")
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object, or true")
    if not json_schemas.has_end(schema):
        raise GrammarError("the schema requires itself without end: no finite JSON fits it")
    json_schemas.count_in_integers(schema)
    json_schemas.leave_out_idle(schema)
    if not grammar.additional_properties:
        json_schemas.close_objects(schema)
    options: dict[str, Any] = {"lenient": not grammar.strict, "coerce_one_of": not grammar.strict}
    if grammar.whitespace_pattern:
        options["whitespace_pattern"] = grammar.whitespace_pattern
    else:
        options["whitespace_flexible"] = grammar.any_whitespace
    return {**schema, "x-guidance": options}


def _refused(schema: dict[str, Any]) -> str:
    """What the library has against the schema; "" where there is nothing."""
    from llguidance import LLMatcher

    wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), None, limits=limits())
    return "" if wrong.startswith("WARNING") else wrong


def _unwritable(text: str) -> GrammarError:
    return GrammarError(f"this model's vocabulary has no tokens that write {text[:80]}")


def _told(error: str) -> str:
    """The library's words, for a client. Of a schema within a structural tag it quotes the whole grammar behind them."""
    if (within := re.match(r"at \d+\(\d+\): failed to compile JSON schema: (.*)", error)) is not None:
        error = within[1]
    if error.startswith("Unimplemented keys: "):
        return f"these keywords of the schema cannot be enforced: {error.partition(': ')[2]}"
    if (format_name := error.removeprefix("Unknown format: ")) != error:
        return f"the format {format_name[:80]!r} of the schema cannot be enforced"
    if (outside := re.match(r"Resource '([^']*)' is not present in a registry", error)) is not None:
        return f"what a $ref of the schema names is read within the schema alone, and {outside[1][:200]!r} is not there"
    if error.startswith("oneOf constraints"):
        return "oneOf can only be enforced where its schemas exclude one another; anyOf can always"
    return error.removesuffix("<non-verbose/>").strip()[:500]
