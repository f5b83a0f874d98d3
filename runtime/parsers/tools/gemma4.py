"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>` of Gemma 4."""

from meshlm.runtime.parsers.gemma_calls import gemma_calls
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE, ESCAPE = "<|tool_call>", "<tool_call|>", '<|"|>'
PARSER = parser(Form(gemma_calls(ESCAPE, CLOSE), opens=(OPEN,), closes=(CLOSE,)), ESCAPE)
