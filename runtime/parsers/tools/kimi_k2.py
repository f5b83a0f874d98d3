"""Kimi K2: between tags of its own an id that holds the name, `functions.name:0`, and the arguments."""

import re

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.scan import Steps, Tags
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, SEPARATOR, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+):\d+")


def head(answer: Answer) -> Steps[tuple[str, str]]:
    """The call's name, and the model's id: its template shows it again beside the tool's answer."""
    written, _ = yield from answer.upto(Tags(SEPARATOR))
    found = _ID.fullmatch(written.strip())
    return (found[1], found[0]) if found else ("", "")


FORM = Form(json_calls.named(head), opens=(OPEN,), closes=(CLOSE,), wrappers=(BEGIN, END))
PARSERS = {"kimi_k2": parser(FORM, SEPARATOR, structure=Structure(OPEN, f"{OPEN}functions.NAME:", CLOSE, SEPARATOR))}
