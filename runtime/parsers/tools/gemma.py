"""The calls of Gemma's models: `call:name{key:"text",other:1}` between tags, with a tag as the mark around texts.

"gemma" reads FunctionGemma's form and Python's calls in a block of `tool_code`, as Gemma 3's guide asks for.
"""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.gemma_calls import gemma_calls
from meshlm.runtime.parsers.gemma_structure import GemmaStructure
from meshlm.runtime.parsers.scan import Steps
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser
from meshlm.runtime.parsers.structures import PythonStructure

OPEN, CLOSE, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_PYTHON = PythonStructure("```tool_code", "```", lines=True)
_functiongemma = gemma_calls(ESCAPE, CLOSE)


def body(answer: Answer) -> Steps[None]:
    """The calls of either form."""
    yield from answer.blanks()
    own = yield from answer.ahead("call:")
    yield from (_functiongemma if own else pythonic_calls.calls)(answer)


def between(open_: str, close: str, escape: str) -> ToolParser:
    """The parser of calls between these tags."""
    form = Form(gemma_calls(escape, close), opens=(open_,), closes=(close,))
    return parser(form, escape, structure=GemmaStructure(open_, close, escape))


PARSERS = {
    "functiongemma": between(OPEN, CLOSE, ESCAPE),
    "gemma": parser(
        Form(body, opens=(OPEN, _PYTHON.open), closes=(CLOSE, _PYTHON.close)),
        ESCAPE,
        structure=GemmaStructure(OPEN, CLOSE, ESCAPE, _PYTHON),
    ),
    "gemma4": between("<|tool_call>", "<tool_call|>", '<|"|>'),
}
