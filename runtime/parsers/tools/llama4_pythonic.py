"""The calls of pythonic.py, which Llama 4 may write between tags."""

from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.tools import pythonic
from meshlm.runtime.parsers.whole_calls import WholeCalls, WholeForm

BEGIN, END = "<|python_start|>", "<|python_end|>"


def read(text: str, tools: Tools) -> list[Call]:
    """The calls of a whole answer."""
    return pythonic.read(text.removeprefix(BEGIN).removesuffix(END).strip(), tools)


FORM = WholeForm(read, starts=("[", BEGIN))
PARSER = ToolParser(lambda tools: WholeCalls(FORM, tools), tags=(BEGIN, END))
