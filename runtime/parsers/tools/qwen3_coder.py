"""`<tool_call><function=name><parameter=key>value</parameter> ... </function></tool_call>` of Qwen3-Coder.

The outer tags may be missing.
"""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.quoting import BetweenTags
from meshlm.runtime.parsers.tagged_calls import TaggedCalls, TaggedForm

AROUND = ("<tool_call>", "</tool_call>")
_BODY = re.compile(r"([^<>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))\s*", re.DOTALL)


def read(body: str, tools: Tools) -> list[Call]:
    """The call of one body: a name, and values with the types of the tool's schema."""
    return json_calls.named_parameters(_BODY.fullmatch(body), _PARAMETER, tools)


FORM = TaggedForm(
    read,
    opens=("<function=",),
    close="</function>",
    quoting=lambda: BetweenTags("<parameter=", "</parameter>"),
    needs_close=True,
    wrappers=AROUND,
)
PARSER = ToolParser(lambda tools: TaggedCalls(FORM, tools), tags=AROUND, around=AROUND)
