"""Each format of tool calls by example: what the model writes, and what a client gets."""

from typing import Any

from meshlm.runtime.parsers.calls import Call

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "share": {"type": "number"},
            "ids": {"$ref": "#/$defs/ids"},
        },
    },
    "time": {},
}
BERN, NOW = '{"city": "Bärn"}', "{}"
CITY, CLOCK = Call("weather", BERN), Call("time", NOW)
JSON_BERN, JSON_NOW = f'{{"name": "weather", "arguments": {BERN}}}', '{"name": "time", "arguments": {}}'
# What closing and opening tags look like is text within a string.
HARD = '{"city": "</tool_call>]\\n\\"}<tool_call><|tool_call_end|></tool_calls>"}'
JSON_HARD = f'{{"name": "weather", "arguments": {HARD}}}'
HARD_CITY = Call("weather", HARD)
DS, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_SEP, DS_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _v3(name: str, arguments: str) -> str:
    return f"{DS_CALL}function{DS_SEP}{name}\n```json\n{arguments}\n```{DS_CLOSE}"


def _v31(name: str, arguments: str) -> str:
    return f"{DS_CALL}{name}{DS_SEP}{arguments}{DS_CLOSE}"


def _kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _qwen(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def _of_qwen(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def _invoke(name: str, *parameters: str) -> str:
    return f'<invoke name="{name}">\n{"".join(parameters)}</invoke>\n'


def _of_invoke(name: str, value: str) -> str:
    return f'<parameter name="{name}">{value}</parameter>\n'


def _glm(name: str, *arguments: str) -> str:
    return f"<tool_call>{name}\n{''.join(arguments)}</tool_call>"


def _of_glm(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


TYPED = [
    ("city", "5"),
    ("days", "3"),
    ("exact", "True"),
    ("where", '{"lat": 46.90}'),
    ("share", "0.50"),
    ("ids", "[1, 2]"),
    ("unknown", "7"),
]
TYPED_CALL = Call(
    "weather", '{"city":"5","days":3,"exact":true,"where":{"lat": 46.90},"share":0.50,"ids":[1, 2],"unknown":"7"}'
)
NULLS = [("city", "null"), ("days", "many"), ("exact", "null"), ("where", "None")]
NULLS_CALL = Call("weather", '{"city":"null","days":"many","exact":null,"where":null}')
COMPACT = Call("weather", '{"city":"Bärn"}')
MINI_HARD = Call("weather", '{"city":"</function> </invoke> </tool_call> {\\"a"}')
HARD_VALUE = '</function> </invoke> </tool_call> {"a'

FORMATS: dict[str, list[tuple[str, str, list[Call]]]] = {
    "hermes": [
        (f"Hm.\n<tool_call>\n{JSON_BERN}\n</tool_call>\n<tool_call>{JSON_NOW}</tool_call>", "Hm.\n", [CITY, CLOCK]),
        (f"<tool_call>{JSON_HARD}</tool_call> So.", " So.", [HARD_CITY]),
        ('<tool_call>{"name": "x</tool_call> yes', '<tool_call>{"name": "x</tool_call> yes', []),
        (
            f'<tool_call>{{"a": "</tool_call><tool_call>{JSON_NOW}</tool_call>',
            '<tool_call>{"a": "</tool_call>',
            [CLOCK],
        ),
    ],
    "longcat": [(f"Hm.<longcat_tool_call>{JSON_BERN}</longcat_tool_call>!", "Hm.!", [CITY])],
    "jamba": [
        (f"Hm.<tool_calls>[\n{JSON_BERN},\n{JSON_NOW}]</tool_calls>", "Hm.", [CITY, CLOCK]),
        (f"<tool_calls>[{JSON_HARD}]</tool_calls> So.", " So.", [HARD_CITY]),
        (f"<tool_calls>\n{JSON_BERN}\n{JSON_NOW}\n</tool_calls>", "", [CITY, CLOCK]),  # MiniMax-M1
        ('<tool_calls>[{"name": "time"}]</tool_calls>', '<tool_calls>[{"name": "time"}]</tool_calls>', []),
    ],
    "granite": [
        (f"<|tool_call|>[{JSON_BERN}, {JSON_NOW}] So.", " So.", [CITY, CLOCK]),
        (f"Hm.<tool_call>[{JSON_HARD}]", "Hm.", [HARD_CITY]),
        ("<|tool_call|>[no]", "<|tool_call|>[no]", []),
    ],
    "granite-20b-fc": [
        (f"<function_call> {JSON_BERN}\n<function_call> {JSON_NOW} So.", " So.", [CITY, CLOCK]),
        ('<function_call> {"a": <function_call> {}', '<function_call> {"a": <function_call> {}', []),
    ],
    "phi4_mini_json": [
        (f"Hm. functools[{JSON_BERN}, {JSON_NOW}] So.", "Hm.  So.", [CITY, CLOCK]),
        (f"functools[{JSON_HARD}]", "", [HARD_CITY]),
        ("import functools; functools[0]", "import functools; functools[0]", []),
    ],
    "internlm": [
        (f'Hm.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {BERN}}}<|action_end|>\n', "Hm.", [CITY]),
        ("<|action_start|><|interpreter|>1<|action_end|>", "<|action_start|><|interpreter|>1<|action_end|>", []),
    ],
    "mistral": [
        (f"Hm.[TOOL_CALLS][{JSON_BERN}, {JSON_NOW}]", "Hm.", [CITY, CLOCK]),
        (f"[TOOL_CALLS]weather[ARGS]{BERN}[TOOL_CALLS]time[ARGS]{NOW}", "", [CITY, CLOCK]),
        (f"[TOOL_CALLS]weather{HARD} So.", " So.", [HARD_CITY]),
        (f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{BERN}", "", [CITY]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "B', "", [Call("weather", '{"city": "B')]),
        ("[TOOL_CALLS]weather[ARGS]no", "[TOOL_CALLS]weather[ARGS]no", []),
    ],
    "deepseek_v3": [
        (f"Hm.{DS}{_v3('weather', BERN)}\n{_v3('time', NOW)}{DS_END}", "Hm.", [CITY, CLOCK]),
        (f"{DS}{_v3('weather', HARD)}{DS_END} So.", " So.", [HARD_CITY]),
        (f"{DS}{_v3('weather', 'no')}{DS_END}", f"{DS}{_v3('weather', 'no')}{DS_END}", []),
        (f"{DS}\n", f"{DS}\n", []),
    ],
    "deepseek_v31": [
        (f"Hm.{DS}{_v31('weather', BERN)}{_v31('time', NOW)}{DS_END}", "Hm.", [CITY, CLOCK]),
        (f"{DS}{_v31('weather', HARD)}{DS_END} So.", " So.", [HARD_CITY]),
        (f"{DS}{_v31('weather', '[]')}", f"{DS}{_v31('weather', '[]')}", []),
    ],
    "kimi_k2": [
        (
            f"Hm.{KIMI}{_kimi('weather', 0, BERN)}{_kimi('time', 1, NOW)}{KIMI_END}",
            "Hm.",
            [Call("weather", BERN, "functions.weather:0"), Call("time", NOW, "functions.time:1")],
        ),
        (f"{KIMI}{_kimi('weather', 0, HARD)}{KIMI_END} So.", " So.", [Call("weather", HARD, "functions.weather:0")]),
        (f"{KIMI}{_kimi('weather', 0, '{')}", "", [Call("weather", "{", "functions.weather:0")]),
        (f"{KIMI}{_kimi('weather', 0, 'no')}", f"{KIMI}{_kimi('weather', 0, 'no')}", []),
    ],
    "qwen3_coder": [
        (f"Hm.\n{_qwen('weather', _of_qwen('city', 'Bärn'))}\n{_qwen('time')}\n", "Hm.\n", [COMPACT, CLOCK]),
        (_qwen("weather", *(_of_qwen(*pair) for pair in TYPED)), "", [TYPED_CALL]),
        (_qwen("weather", *(_of_qwen(*pair) for pair in NULLS)), "", [NULLS_CALL]),
        (f"{_qwen('weather', _of_qwen('city', HARD_VALUE))} So.", " So.", [MINI_HARD]),
        ("<function=time>\n</function>", "", [CLOCK]),  # without the outer tags
        (  # without the closing tags of parameters
            "<tool_call>\n<function=weather>\n<parameter=city>\n5\n<parameter=other>\n<parameter=days>\n3\n</function>\n</tool_call>",
            "",
            [Call("weather", '{"city":"5\\n<parameter=other>","days":3}')],
        ),
        ("<function=time>\n<parameter=a>", "", [Call("time", '{"a":"')]),
        ("<function=time>\n", "<function=time>\n", []),  # arguments may be missing
        (_qwen("time", "what?"), _qwen("time", "what?"), []),
    ],
    "minimax_m2": [
        (
            "Hm.<minimax:tool_call>\n"
            + _invoke("weather", _of_invoke("city", "Bärn"))
            + _invoke("time")
            + "</minimax:tool_call>",
            "Hm.",
            [COMPACT, CLOCK],
        ),
        (_invoke("weather", *(_of_invoke(*pair) for pair in TYPED)), "", [TYPED_CALL]),
        (_invoke("weather", _of_invoke("city", HARD_VALUE)) + "So.", "\nSo.", [MINI_HARD]),
        ('<invoke name="time">', '<invoke name="time">', []),
    ],
    "glm45": [
        (f"Hm.{_glm('weather', _of_glm('city', 'Bärn'))}\n{_glm('time')}", "Hm.", [COMPACT, CLOCK]),
        (_glm("weather", *(_of_glm(*pair) for pair in TYPED)), "", [TYPED_CALL]),
        (_glm("weather", _of_glm("city", HARD_VALUE)) + " So.", " So.", [MINI_HARD]),
        ("<tool_call>hm</tool_call>", "<tool_call>hm</tool_call>", []),
        ("<tool_call>time", "<tool_call>time", []),
    ],
    "functiongemma": [
        (
            "Hm.<start_function_call>call:weather{city:<escape>Bärn<escape>,days:3}<end_function_call>"
            "<start_function_call>call:time{}<end_function_call>",
            "Hm.",
            [Call("weather", '{"city":"Bärn","days":3}'), CLOCK],
        ),
        (
            '<start_function_call>call:f{a:{b:[<escape>{x:"<end_function_call><escape>]}}<end_function_call> So.',
            " So.",
            [Call("f", '{"a":{"b":["{x:\\"<end_function_call>"]}}')],
        ),
        ("<start_function_call>call:f{a:no}", "", [Call("f", '{"a":"no"}')]),
        ("<start_function_call>call:f(a)", "<start_function_call>call:f(a)", []),
    ],
    "llama3_json": [
        (f'<|python_tag|>{{"name": "weather", "parameters": {BERN}}}; {JSON_NOW}', "", [CITY, CLOCK]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ],
    "xlam": [
        (f"[{JSON_BERN}, {JSON_NOW}]", "", [CITY, CLOCK]),
        (f"```json\n[{JSON_HARD}]\n```", "", [HARD_CITY]),
        (f"<tool_call>[{JSON_BERN}]</tool_call>", "", [CITY]),
        (f"[TOOL_CALLS][{JSON_BERN}]", "", [CITY]),
        ("[1, 2]", "[1, 2]", []),
        ("```python\nx\n```", "```python\nx\n```", []),
    ],
    "pythonic": [
        ("[weather(city='Bärn'), time()]\n", "", [COMPACT, CLOCK]),
        (
            '[weather(city="]\\n)", days=-3, exact=true, where={"a": [1.5, None, null]})]',
            "",
            [Call("weather", '{"city":"]\\n)","days":-3,"exact":true,"where":{"a":[1.5,null,null]}}')],
        ),
        ("[other()]", "[other()]", []),
        ("[weather('Bärn')]", "[weather('Bärn')]", []),
        ("[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
        ("[weather(city=1e999)]", "[weather(city=1e999)]", []),
        ("[1] says", "[1] says", []),
        ("[weather(city='B", "", [Call("weather", '{"city":"B')]),
        ("[" * 100_000, "[" * 100_000, []),
        ("[time(" + "-" * 100_000 + "1)]", "[time(" + "-" * 100_000 + "1)]", []),
    ],
    "llama4_pythonic": [
        ("<|python_start|>[weather(city='Bärn'), time()]<|python_end|>", "", [COMPACT, CLOCK]),
        ("[time()]", "", [CLOCK]),
        ("<|python_start|>x = 1<|python_end|>", "<|python_start|>x = 1<|python_end|>", []),
    ],
    "apertus": [
        (f'Hm.<|tools_prefix|>[{{"weather": {BERN}}}, {{"time": {NOW}}}]<|tools_suffix|>', "Hm.", [CITY, CLOCK]),
        (f'<|tools_prefix|>[{{"weather": {HARD}}}]<|tools_suffix|> So.', " So.", [HARD_CITY]),
        ("<|tools_prefix|>[1]<|tools_suffix|>", "<|tools_prefix|>[1]<|tools_suffix|>", []),
    ],
    "cohere_command3": [
        (
            f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "weather", "parameters": {BERN}}},\n'
            f'{{"tool_call_id": "1", "tool_name": "time", "parameters": {NOW}}}\n]<|END_ACTION|>',
            "",
            [CITY, CLOCK],
        ),
        ("<|START_ACTION|>hm<|END_ACTION|>", "<|START_ACTION|>hm<|END_ACTION|>", []),
    ],
    "deepseek_v32": [
        (
            f'Hm.<{DSML}function_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">5'
            f'</{DSML}parameter>\n<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
            f'<{DSML}invoke name="time">\n</{DSML}invoke>\n</{DSML}function_calls>',
            "Hm.",
            [Call("weather", '{"city":"5","days":3}'), CLOCK],
        ),
        (f"<{DSML}invoke name=", f"<{DSML}invoke name=", []),
    ],
    "deepseek_v4": [
        (
            f'<{DSML}tool_calls><{DSML}invoke name="weather"><{DSML}parameter name="city" string="false">Bärn'
            f"</{DSML}parameter></{DSML}invoke></{DSML}tool_calls>",
            "",
            [COMPACT],
        )
    ],
    "gemma": [
        ("Hm.\n```tool_code\nweather(city='Bärn')\n```\nSo.", "Hm.\n\nSo.", [COMPACT]),
        ("<start_function_call>call:time{}<end_function_call>", "", [CLOCK]),
        ("```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
    ],
    "gemma4": [
        (
            'Hm.<|tool_call>call:weather{city:<|"|>Bärn<|"|>,days:3}<tool_call|><|tool_call>call:time{}<tool_call|>',
            "Hm.",
            [Call("weather", '{"city":"Bärn","days":3}'), CLOCK],
        ),
        ("<|tool_call>call:<tool_call|>", "<|tool_call>call:<tool_call|>", []),
    ],
    "gigachat3": [
        (f"Hm.<|function_call|>{JSON_BERN}", "Hm.", [CITY]),
        (f"Hm.function call<|role_sep|>\n{JSON_HARD}", "Hm.", [HARD_CITY]),
        ("a function call <|function_call|>", "a function call <|function_call|>", []),
    ],
    "hy_v3": [
        (
            "Hm.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bärn</arg_value>\n"
            "</tool_call>\n<tool_call>time<tool_sep>\n</tool_call>\n</tool_calls>",
            "Hm.",
            [COMPACT, CLOCK],
        ),
        ("<tool_calls><tool_call>time</tool_call>", "<tool_calls><tool_call>time</tool_call>", []),
    ],
    "lfm2": [
        ("Hm.<|tool_call_start|>[weather(city='Bärn'), time()]<|tool_call_end|>\nSo.", "Hm.\nSo.", [COMPACT, CLOCK]),
        ("<|tool_call_start|>[other()]<|tool_call_end|>", "<|tool_call_start|>[other()]<|tool_call_end|>", []),
    ],
    "minicpm5": [
        (
            'Hm.<function name="weather"><param name="city"><![CDATA[</param> & \n]]></param>'
            '<param name="days">3</param></function>\n<function name="time"></function>',
            "Hm.",
            [Call("weather", '{"city":"</param> & \\n","days":3}'), CLOCK],
        ),
        ('<function name="time">', '<function name="time">', []),
    ],
    "olmo3": [
        ("Hm.<function_calls>weather(city='Bärn')\ntime()</function_calls> So.", "Hm. So.", [COMPACT, CLOCK]),
        ("<function_calls>x</function_calls>", "<function_calls>x</function_calls>", []),
    ],
    "seed_oss": [
        (
            "Hm.<seed:tool_call>\n<function=weather>\n<parameter=city>Bärn</parameter>\n</function>\n</seed:tool_call>",
            "Hm.",
            [COMPACT],
        ),
        ("<seed:tool_call>\n", "<seed:tool_call>\n", []),
    ],
    "step3": [
        (
            "Hm.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="weather"><steptml:parameter name="city">Bärn</steptml:parameter></steptml:invoke>'
            "<｜tool_call_end｜><｜tool_calls_end｜>",
            "Hm.",
            [COMPACT],
        ),
        ("<｜tool_calls_begin｜>hm", "<｜tool_calls_begin｜>hm", []),
    ],
    "openai": [
        (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{HARD}<|call|>", "", [HARD_CITY]),
        (
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.time<|message|>{NOW}",
            "Hm.",
            [CLOCK],
        ),
        ("<|channel|>final<|message|>So.<|return|>", "So.", []),
    ],
}
SAME_AS = {
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "hunyuan_a13b": "jamba",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "step3p5": "qwen3_coder",
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "minimax": "jamba",
    "qwen3_xml": "qwen3_coder",
}
