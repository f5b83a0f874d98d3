"""`<minimax:tool_call><invoke name="..."><parameter name="key">value</parameter> ... </invoke></minimax:tool_call>` of MiniMax-M2."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.quoting import BetweenTags
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")
_BODY = re.compile(r"""["']?([^"'<>\s]+)["']?>(.*)""", re.DOTALL)
_PARAMETER = re.compile(
    r"""\s*<parameter name=["']?([^"'>\n]+)["']?>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter name=|\Z))\s*""", re.DOTALL
)


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body: a name, and values with the types of the tool's schema."""
    return json_calls.named_parameters(_BODY.fullmatch(body), _PARAMETER, tools)


FORM = TaggedForm(
    read,
    opens=("<invoke name=",),
    close="</invoke>",
    quoting=lambda: BetweenTags("<parameter name=", "</parameter>"),
    needs_close=True,
    wrappers=AROUND,
)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=AROUND, around=AROUND)
