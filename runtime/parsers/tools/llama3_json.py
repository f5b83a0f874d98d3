"""`{"name": ..., "parameters": {...}}`, or several with `;` between, as Llama 3's templates ask for."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Call, ToolParser, Tools
from meshlm.runtime.parsers.whole_calls import WholeCalls, WholeForm

PYTHON_TAG = "<|python_tag|>"


def read(text: str, tools: Tools) -> list[Call]:
    """The calls of a whole answer."""
    return json_calls.several(text.removeprefix(PYTHON_TAG), tools)


FORM = WholeForm(read, starts=("{", PYTHON_TAG))
PARSER = ToolParser(lambda tools: WholeCalls(FORM, tools), tags=(PYTHON_TAG,))
