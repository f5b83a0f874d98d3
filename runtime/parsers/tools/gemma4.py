"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>` of Gemma 4."""

from meshlm.runtime.parsers.gemma_calls import gemma_calls
from meshlm.runtime.parsers.gemma_structure import GemmaStructure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE, ESCAPE = "<|tool_call>", "<tool_call|>", '<|"|>'
FORM = Form(gemma_calls(ESCAPE, CLOSE), opens=(OPEN,), closes=(CLOSE,))
PARSER = parser(FORM, ESCAPE, structure=GemmaStructure(OPEN, CLOSE, ESCAPE))
