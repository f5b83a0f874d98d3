"""The grammar that a request's text keeps to, on its way from the frontend to the worker's matcher.

The frontend says it in the client's words; the detokenizer translates it once (detokenizer/grammars.py) into the language of the
library whose matcher stands beside the sampler (`COMPILED`), and that text is what schedulers and workers carry.
"""

from enum import Enum
from typing import ClassVar

from msgspec import Struct

from meshlm.protocol.extra_kind import ExtraKind

MAX_GRAMMAR_BYTES = 1 << 18  # of one grammar, as the client says it


class GrammarKind(Enum):
    """The language in which `Grammar.text` is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; no text
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts
    GRAMMAR = "grammar"  # EBNF (GBNF) or Lark
    STRUCTURAL_TAG = "structural_tag"  # JSON: free text in which tags have contents with grammars of their own
    FREE = "free"  # any text; for what else a Grammar holds
    COMPILED = "compiled"  # the library's own; empty: any text


class ThinkingBudget(Struct, frozen=True, omit_defaults=True):
    """The most tokens that an answer's reasoning has: behind them its closing text is forced."""

    num_tokens: int
    close: str
    open: str = ""  # stands before the reasoning
    assumed: bool = True  # an answer without it is reasoning, too; else it has none
    in_prompt: bool = False  # the detokenizer sees in the prompt's text whether it stands there already


class Grammar(ExtraKind, frozen=True, tag="grammar", omit_defaults=True):
    """One constraint. Equal ones are translated and compiled once."""

    kind: GrammarKind
    text: str = ""
    param: str = ""  # the client's field, which errors name
    strict: bool = True  # what cannot be enforced of a JSON schema is refused; else it does not constrain
    any_whitespace: bool = True  # JSON may have white space between its tokens
    whitespace_pattern: str = ""  # that white space, where it is not to be any
    additional_properties: bool = True  # objects that name properties may have others, where their schema does not say
    begins_after: str = ""  # the constraint begins behind this text (the end of reasoning); empty: at once
    opens_with: str = ""  # with begins_after: only where the text opens with this one; else at once
    thinking: ThinkingBudget | None = None  # of the reasoning before the constraint begins
    calls: str = ""  # a tool parser: a call of its form ends that reasoning too, where it is one of `tools`
    tools: tuple[str, ...] = ()  # the names that the request has
    is_prepared: ClassVar[bool] = True

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    @property
    def constraint(self) -> str:
        return self.param
