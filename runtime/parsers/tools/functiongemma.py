"""`<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>` of FunctionGemma."""

from meshlm.runtime.parsers.gemma_calls import gemma_calls
from meshlm.runtime.parsers.gemma_structure import GemmaStructure
from meshlm.runtime.parsers.streamed_calls import Form, parser

OPEN, CLOSE, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
FORM = Form(gemma_calls(ESCAPE, CLOSE), opens=(OPEN,), closes=(CLOSE,))
PARSER = parser(FORM, ESCAPE, structure=GemmaStructure(OPEN, CLOSE, ESCAPE))
