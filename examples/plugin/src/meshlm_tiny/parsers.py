"""Parsers: tool calls between <tiny_call> tags as Qwen3-Coder writes them, reasoning between <tiny> tags."""

import msgspec

from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.tools.parameters import QWEN3_CODER

TINY = msgspec.structs.replace(QWEN3_CODER, after="</tiny_call>")
TINY_CALLS = parser(Form(TINY.body, opens=("<function=",), wrappers=("<tiny_call>", "</tiny_call>")))
TINY_THOUGHTS = ReasoningParser("<tiny>", "</tiny>")
