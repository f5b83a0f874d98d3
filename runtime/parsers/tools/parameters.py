"""Calls whose parameters stand between tags, each with its key: `<function=name><parameter=key>value</parameter> ... </function>`."""

import re

from msgspec.structs import replace

from meshlm.runtime.parsers.parameter_calls import Parameter, ParameterForm
from meshlm.runtime.parsers.streamed_calls import Form, parser
from meshlm.runtime.parsers.structures import ParameterStructure

# Qwen3-Coder; the tags around a call are text: models may leave them out.
QWEN3_CODER = ParameterForm(
    close="</function>", parameter="<parameter=", key_end=">", parameter_close="</parameter>", after="</tool_call>"
)
_QWEN = ParameterStructure("<function=", "<function=NAME>", "</function>", "<parameter=KEY>\n", "\n</parameter>")
QWEN = parser(Form(QWEN3_CODER.body, opens=("<function=",), wrappers=("<tool_call>", "</tool_call>")), structure=_QWEN)
SEED_OSS = replace(QWEN3_CODER, after="</seed:tool_call>")

MINICPM5 = ParameterForm(
    close="</function>", parameter="<param name=", key_end=">", parameter_close="</param>", cdata=True
)
MINIMAX_M2 = ParameterForm(close="</invoke>", parameter="<parameter name=", key_end=">", parameter_close="</parameter>")

STEP3 = ParameterForm(
    close="</steptml:invoke>", parameter="<steptml:parameter name=", key_end=">", parameter_close="</steptml:parameter>"
)
STEP3_OPEN, STEP3_SEPARATOR, STEP3_CLOSE = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"

# GLM 4.5 to 4.7 and Laguna (poolside), and Hunyuan 3: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
GLM45 = ParameterForm(
    name_end="",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    parameter_close="</arg_value>",
    close="</tool_call>",
    trims=False,
    known_if_empty=True,
)
HY_V3 = replace(GLM45, name_end="<tool_sep>", known_if_empty=False)
ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM = ParameterStructure(
    "<tool_call>", "<tool_call>NAME", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"
)
GLM = parser(Form(GLM45.body, opens=("<tool_call>",)), "</tool_call>", *ARGUMENT_TAGS, structure=_GLM)

_DEEPSEEK_KEY = re.compile(r'\s*"([^"]+)"(?:\s+string="(true|false)")?\s*')
_NOT_TEXT = frozenset({"object", "array", "integer", "number", "boolean", "null"})


def deepseek_key(text: str) -> Parameter | None:
    """`"name" string="true"`; without a word of it the tool's schema says the type."""
    found = _DEEPSEEK_KEY.fullmatch(text)
    if found is None:
        return None
    return Parameter(found[1], {"true": frozenset(), "false": _NOT_TEXT}.get(found[2] or ""))


DEEPSEEK_V32 = ParameterForm(
    close="</｜DSML｜invoke>",
    parameter="<｜DSML｜parameter name=",
    key_end=">",
    parameter_close="</｜DSML｜parameter>",
    trims=False,
    key=deepseek_key,
)
_DEEPSEEK = ParameterStructure(
    "<｜DSML｜invoke name=",
    '<｜DSML｜invoke name="NAME">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="KEY" string="false">',
    "</｜DSML｜parameter>",
    '<｜DSML｜parameter name="KEY" string="true">',
)


def deepseek(around: str) -> Form:
    """Calls between tags of this name."""
    wrappers = (f"<｜DSML｜{around}>", f"</｜DSML｜{around}>")
    return Form(DEEPSEEK_V32.body, opens=("<｜DSML｜invoke name=",), wrappers=wrappers)


PARSERS = {
    "deepseek_v32": parser(deepseek("function_calls"), "｜DSML｜", structure=_DEEPSEEK),
    "deepseek_v4": parser(deepseek("tool_calls"), "｜DSML｜", structure=_DEEPSEEK),
    "glm45": GLM,
    "glm47": GLM,
    "hy_v3": parser(
        Form(HY_V3.body, opens=("<tool_call>",), wrappers=("<tool_calls>", "</tool_calls>")),
        "</tool_call>",
        "<tool_sep>",
        *ARGUMENT_TAGS,
        structure=replace(_GLM, begin="<tool_call>NAME<tool_sep>"),
    ),
    "mimo": QWEN,
    "minicpm5": parser(
        Form(MINICPM5.body, opens=("<function name=",)),
        structure=ParameterStructure(
            "<function name=", '<function name="NAME">', "</function>", '<param name="KEY">', "</param>"
        ),
    ),
    "minimax_m2": parser(
        Form(MINIMAX_M2.body, opens=("<invoke name=",), wrappers=("<minimax:tool_call>", "</minimax:tool_call>")),
        structure=ParameterStructure(
            "<invoke name=", '<invoke name="NAME">', "</invoke>", '<parameter name="KEY">', "</parameter>"
        ),
    ),
    "poolside_v1": GLM,
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": parser(
        Form(SEED_OSS.body, opens=("<function=",), wrappers=("<seed:tool_call>", "</seed:tool_call>")), structure=_QWEN
    ),
    "step3": parser(
        Form(
            STEP3.body,
            opens=("<steptml:invoke name=",),
            wrappers=(
                *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
                *(f"{STEP3_OPEN}function{STEP3_SEPARATOR}", STEP3_CLOSE),
            ),
        ),
        STEP3_OPEN,
        STEP3_SEPARATOR,
        structure=ParameterStructure(
            "<steptml:invoke name=",
            '<steptml:invoke name="NAME">',
            "</steptml:invoke>",
            '<steptml:parameter name="KEY">',
            "</steptml:parameter>",
        ),
    ),
    "step3p5": QWEN,
}
