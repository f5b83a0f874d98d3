"""DeepSeek V3 and R1: between tags of their own "function", the name, and the arguments as a block of JSON. V3.1: no type."""

from msgspec.structs import replace

from meshlm.runtime.parsers import json_calls
from meshlm.runtime.parsers.calls import Structure
from meshlm.runtime.parsers.scan import Steps, Tags
from meshlm.runtime.parsers.streamed_calls import Answer, Form, parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_LINE = Tags("\n```json\n")


def head(answer: Answer) -> Steps[tuple[str, str]]:
    """The type of the call, which is always a function, and its name."""
    kind, separator = yield from answer.upto(Tags(SEPARATOR))
    if not separator or kind.strip() not in ("", "function"):
        return "", ""
    name, _ = yield from answer.upto(_LINE)
    return name.strip(), ""


def head_v31(answer: Answer) -> Steps[tuple[str, str]]:
    """The call's name."""
    name, _ = yield from answer.upto(Tags(SEPARATOR))
    return name.strip(), ""


FORM = Form(json_calls.named(head, behind="\n```"), opens=(OPEN,), closes=(CLOSE,), wrappers=(BEGIN, END))
PARSERS = {
    "deepseek_v3": parser(
        FORM, SEPARATOR, structure=Structure(OPEN, f"{OPEN}function{SEPARATOR}NAME\n```json\n", f"\n```{CLOSE}")
    ),
    "deepseek_v31": parser(
        replace(FORM, body=json_calls.named(head_v31)),
        SEPARATOR,
        structure=Structure(OPEN, f"{OPEN}NAME{SEPARATOR}", CLOSE),
    ),
}
