"""DeepSeek V3.2: calls in tags of their own, whose parameters say whether they are strings."""

import re

from meshlm.runtime.parsers.parameter_calls import Parameter, ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

_KEY = re.compile(r'\s*"([^"]+)"(?:\s+string="(true|false)")?\s*')
_NOT_TEXT = frozenset({"object", "array", "integer", "number", "boolean", "null"})


def key(text: str) -> Parameter | None:
    """`"name" string="true"`; without a word of it the tool's schema says the type."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    return Parameter(found[1], {"true": frozenset(), "false": _NOT_TEXT}.get(found[2] or ""))


CALL = ParameterForm(
    close="</｜DSML｜invoke>",
    parameter="<｜DSML｜parameter name=",
    key_end=">",
    parameter_close="</｜DSML｜parameter>",
    trims=False,
    key=key,
)


def form(around: str) -> Form:
    """Calls between tags of this name."""
    return Form(CALL.body, opens=("<｜DSML｜invoke name=",), wrappers=(f"<｜DSML｜{around}>", f"</｜DSML｜{around}>"))


STRUCTURE = ParameterStructure(
    "<｜DSML｜invoke name=",
    '<｜DSML｜invoke name="NAME">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="KEY" string="false">',
    "</｜DSML｜parameter>",
    '<｜DSML｜parameter name="KEY" string="true">',
)
PARSER = parser(form("function_calls"), "｜DSML｜", structure=STRUCTURE)
