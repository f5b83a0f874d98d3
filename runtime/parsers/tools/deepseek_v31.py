"""DeepSeek V3.1: between the tags of V3 the name and the arguments."""

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.scan import Steps, Tags
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser
from meshlm.runtime.parsers.tools.deepseek_v3 import BEGIN, CLOSE, END, OPEN, SEPARATOR


def head(answer: Answer) -> Steps[tuple[str, str]]:
    """The call's name."""
    name, _ = yield from answer.upto(Tags(SEPARATOR))
    return name.strip(), ""


FORM = Form(json_calls.named(head), opens=(OPEN,), closes=(CLOSE,), wrappers=(BEGIN, END))
PARSER = parser(FORM, SEPARATOR, structure=Structure(OPEN, f"{OPEN}NAME{SEPARATOR}", CLOSE))
