"""The calls of Gemma's models: FunctionGemma's form, or Python's calls in a block of `tool_code`, as Gemma 3's guide asks for."""

from meshlm.runtime.parsers import pythonic_calls
from meshlm.runtime.parsers.gemma_calls import gemma_calls
from meshlm.runtime.parsers.gemma_structure import GemmaStructure
from meshlm.runtime.parsers.scan import Steps
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser
from meshlm.runtime.parsers.structures import PythonStructure
from meshlm.runtime.parsers.tools.functiongemma import CLOSE, ESCAPE, OPEN

_of_functiongemma = gemma_calls(ESCAPE, CLOSE)


def body(answer: Answer) -> Steps[None]:
    """The calls of either form."""
    yield from answer.blanks()
    own = yield from answer.ahead("call:")
    yield from (_of_functiongemma if own else pythonic_calls.calls)(answer)


_PYTHON = PythonStructure("```tool_code", "```", lines=True)
PARSER = parser(
    Form(body, opens=(OPEN, _PYTHON.open), closes=(CLOSE, _PYTHON.close)),
    ESCAPE,
    structure=GemmaStructure(OPEN, CLOSE, ESCAPE, _PYTHON),
)
