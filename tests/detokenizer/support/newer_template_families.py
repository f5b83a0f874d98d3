"""More chat templates in the manner of well-known model families: short, but with the Jinja that theirs need."""
# ruff: noqa: E501

from mixture_template_families import DEEPSEEK_V31, GLM, GPT_OSS, KIMI, MINIMAX

SEED = """{%- set eos_token = eos_token or "<seed:eos>" -%}
{%- macro py_type(t) -%}
    {%- if t == "string" -%}str{%- elif t in ("number", "integer") -%}int{%- elif t == "array" -%}list{%- else -%}Any{%- endif -%}
{%- endmacro -%}
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined or tools is none %}{%- set tools = [] %}{%- endif %}
{%- set budget_reflections_v05 = {0: 0, 512: 128, 1024: 256} -%}
{%- if thinking_budget is defined %}
    {%- for k, v in budget_reflections_v05 | dictsort %}{%- if thinking_budget <= k %}{{ v }}{% break %}{%- endif %}{%- endfor %}
{%- endif %}
{%- if system_message is defined %}{{ bos_token + "system\\n" + system_message }}
{%- elif tools is iterable and tools | length > 0 %}{{ bos_token + "system\\nYou have tools." }}{%- endif %}
{%- for item in tools %}
{%- if item.type == "function" %}
Function:
def {{ item.function.name }}(
{%- for name, spec in (item.function.parameters.properties or {}).items() | sort(attribute='0') %}
{{- name }}: {{ py_type(spec.type) }}{% if name in (item.function.parameters.required | default([])) %} [required]{% endif %}
{{- ", " if not loop.last }}{% endfor %}):
{%- endif %}
{%- endfor %}
{%- if system_message is defined or tools %}{{ eos_token }}{%- endif %}
{%- for message in loop_messages %}
{%- if message.role == "user" or message.role == "tool" %}
{{- bos_token + message.role + "\\n" + (message.content | string) + eos_token }}
{%- elif message.role == "assistant" %}
{{- bos_token + message.role }}
{%- if message.reasoning_content is defined and message.reasoning_content is string and message.reasoning_content | trim | length > 0 %}
{{- "\\n<seed:think>" + message.reasoning_content | trim + "</seed:think>" }}{%- endif %}
{%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
{{- "\\n" + message.content | trim + "\\n" }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
<seed:tool_call>
<function={{ tool_call.name }}>
{%- for arg_name, arg_value in tool_call.arguments | items %}
<parameter={{ arg_name }}>{%- set arg_value = arg_value if arg_value is string else arg_value | string %}{{ arg_value }}</parameter>
{%- endfor %}
</function>
</seed:tool_call>
{%- endfor %}
{{- eos_token }}
{%- else %}{{ bos_token + message.role + "\\n" + message.content + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token + "assistant\\n" }}{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}{%- endif %}"""
PHI4_MINI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{
 '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{
 '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{
 '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
GRANITE = """{%- if messages[0]['role'] == 'system' %}
     {%- set system_message = messages[0]['content'] %}
     {%- set loop_messages = messages[1:] %}
 {%- else %}
     {%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
     {%- if tools and documents %}{%- set system_message = system_message + " tools and documents" %}
     {%- elif tools %}{%- set system_message = system_message + " tools" %}
     {%- elif thinking %}{%- set system_message = system_message + " think" %}{%- endif %}
     {%- if 'citations' in controls and documents %}{%- set system_message = system_message + " cite" %}{%- endif %}
     {%- set loop_messages = messages %}
 {%- endif %}
 {{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
 {%- if tools %}
     {{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}
 {%- endif %}
 {%- if documents %}
     {{- '<|start_of_role|>documents<|end_of_role|>' }}
     {%- for document in documents %}
         {{- 'Document ' + (loop.index0 | string) + '\\n' + document['text'] }}{%- if not loop.last %}{{- '\\n\\n'}}{%- endif %}
     {%- endfor %}
     {{- '<|end_of_text|>\\n' }}
 {%- endif %}
 {%- for message in loop_messages %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
     {%- if loop.last and add_generation_prompt %}
         {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}{{- '<|end_of_role|>' }}
     {%- endif %}
 {%- endfor %}"""
LFM2 = """{{- bos_token -}}
{%- set system_prompt = "" -%}
{%- set ns = namespace(system_prompt="", last_assistant_index=-1) -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns.system_prompt else "") + "List of tools: [" -%}
    {%- for tool in tools -%}
        {%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
        {%- set ns.system_prompt = ns.system_prompt + tool -%}
        {%- if not loop.last -%}{%- set ns.system_prompt = ns.system_prompt + ", " -%}{%- endif -%}
    {%- endfor -%}
    {%- set ns.system_prompt = ns.system_prompt + "]" -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- "<|im_start|>system\\n" + ns.system_prompt + "<|im_end|>\\n" -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- set content = message["content"] -%}
    {%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- elif message["role"] == "assistant" and message.tool_calls -%}
        {%- set calls = namespace(texts=[]) -%}
        {%- for call in message.tool_calls -%}
            {%- set arguments = namespace(texts=[]) -%}
            {%- for key, value in call.function.arguments.items() -%}
                {%- set arguments.texts = arguments.texts + ['%s=%s' % (key, value | tojson)] -%}
            {%- endfor -%}
            {%- set calls.texts = calls.texts + [call.function.name + '(' + arguments.texts | join(', ') + ')'] -%}
        {%- endfor -%}
        {%- set content = content + "<|tool_call_start|>[" + calls.texts | join(", ") + "]<|tool_call_end|>" -%}
    {%- endif -%}
    {{- content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""
NEMOTRON = """{%- set ns = namespace(enable_thinking = true) -%}
{%- for message in messages -%}
    {%- set content = message['content'] -%}
    {%- if message['role'] in ['user', 'system'] -%}
        {%- if '/think' in content.replace('</think>', '') -%}{%- set ns.enable_thinking = true -%}
        {%- elif '/no_think' in content -%}{%- set ns.enable_thinking = false -%}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- if messages[0]['role'] != 'system' -%}{{- '<SPECIAL_10>System\\n' -}}
{%- else -%}{{- '<SPECIAL_10>System\\n' + messages[0]['content'].replace('/no_think', '').replace('/think', '').strip() }}{%- endif -%}
{%- for tool in tools or [] -%}{{- '\\n<AVAILABLE_TOOL>' + (tool.function if 'function' in tool else tool) | string + '</AVAILABLE_TOOL>' -}}{%- endfor -%}
{{- '\\n' -}}
{%- set messages = messages[1:] if messages[0]['role'] == 'system' else messages -%}
{%- if messages[-1]['role'] == 'assistant' -%}
    {%- set ns.last_turn_assistant_content = messages[-1]['content'].strip() -%}
    {%- set messages = messages[:-1] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message['content'] -%}
    {%- if message['role'] == 'user' -%}{{- '<SPECIAL_11>User\\n' + content.strip() + '\\n' -}}
    {%- elif message['role'] == 'tool' -%}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') -%}{{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' -}}{%- endif -%}
        {{- message['content'] -}}
        {{- ', ' if not loop.last and (messages[loop.index0 + 1].role == 'tool') else '' -}}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') -%}{{- ']</TOOL_RESPONSE>\\n' -}}{%- endif -%}
    {%- elif message['role'] == 'assistant' -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[1].strip() %}{%- endif -%}
        {{- '<SPECIAL_11>Assistant\\n' + content.strip() -}}
        {%- if message.tool_calls -%}
            {{- '<TOOLCALL>[' -}}
            {%- for call in message.tool_calls -%}
                {%- set fn = call.function if call.function is defined else call -%}
                {{- '{"name": "' + fn.name + '", "arguments": ' -}}
                {%- if fn.arguments is string -%}{{- fn.arguments -}}{%- else -%}{{- fn.arguments | tojson -}}{%- endif -%}
                {{- '}' + (', ' if not loop.last else '') -}}
            {%- endfor -%}
            {{- ']</TOOLCALL>' -}}
        {%- endif -%}
        {{- '\\n<SPECIAL_12>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<SPECIAL_11>Assistant\\n' -}}
    {%- if ns.enable_thinking is defined and ns.enable_thinking is false -%}{{- '<think></think>' -}}{%- else -%}{{- '<think>\\n' -}}{%- endif -%}
    {%- if ns.last_turn_assistant_content is defined and ns.last_turn_assistant_content != '' -%}
        {{- ns.last_turn_assistant_content -}}
    {%- endif -%}
{%- else -%}
    {%- if ns.last_turn_assistant_content is defined and ns.last_turn_assistant_content != '' -%}
        {{- '<SPECIAL_11>Assistant\\n' + ns.last_turn_assistant_content + '\\n<SPECIAL_12>\\n' -}}
    {%- endif -%}
{%- endif -%}"""
SMOLLM3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}
  {%- elif "/think" in system_message -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if "/system_override" in system_message -%}
  {{- custom_instructions.replace("/system_override", "").rstrip() -}}
{%- else -%}
  {{- "## Metadata\\n\\nToday Date: " -}}
  {%- set today = strftime_now("%d %B %Y") -%}
  {{- today ~ "\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
  {%- if custom_instructions -%}{{- custom_instructions + "\\n\\n" -}}{%- endif -%}
  {%- if xml_tools or python_tools or tools -%}
    {{- "### Tools\\n\\n" -}}
    {%- set ns = namespace(xml_tool_string="<tools>\\n") -%}
    {%- for tool in (xml_tools or tools)[:] -%}
      {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool.function | string) ~ "\\n" -%}
    {%- endfor -%}
    {{- ns.xml_tool_string + "</tools>" -}}
  {%- endif -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}{%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>" + "user\\n" + message.content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}
    {%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}"""
OLMO3 = """{%- set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 -%}
{%- if not has_system -%}{{ '<|im_start|>system\\nYou are Olmo. ' }}
{%- if tools is none or (tools | length) == 0 -%}{{ 'You have no functions. <functions></functions><|im_end|>\\n' }}
{%- else -%}{{ '<functions>' + (tools | tojson) + '</functions><|im_end|>\\n' }}{%- endif -%}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ '<|im_start|>system\\n' + message['content'] }}
{%- if tools is not none -%}{{ '<functions>' + tools|tojson + '</functions>' }}
{%- elif message.get('functions', none) is not none -%}{{ '<functions>' + message['functions'] + '</functions>' }}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- elif message['role'] == 'user' -%}{{ '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ '<|im_start|>assistant\\n' }}
{%- if message.get('content', none) is not none -%}{{ message['content'] }}{%- endif -%}
{%- if message.get('tool_calls', none) is not none -%}{{ '<function_calls>' }}
{%- for tool_call in message['tool_calls'] -%}
{%- if tool_call is mapping and tool_call.get('function', none) is not none -%}
{%- set ns = namespace(arguments_list=[]) -%}
{%- set func = tool_call['function'] -%}
{%- for arg_name in func.get('arguments') -%}
{%- set ns.arguments_list = ns.arguments_list + [arg_name ~ '=' ~ (func.arguments[arg_name] | tojson)] -%}{%- endfor -%}
{{ func['name'] + '(' + ns.arguments_list | join(', ') + ')' }}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
{%- endif -%}{%- endfor -%}{{ '</function_calls>' }}{%- endif -%}
{%- if not loop.last -%}{{ '<|im_end|>' + '\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
{%- elif message['role'] in ['environment', 'tool'] -%}{{ '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>' }}{%- endif -%}
{%- endfor -%}"""
NEWER = {
    "deepseek v3.1": DEEPSEEK_V31,
    "glm": GLM,
    "gpt-oss": GPT_OSS,
    "granite": GRANITE,
    "kimi": KIMI,
    "lfm2": LFM2,
    "minimax": MINIMAX,
    "nemotron": NEMOTRON,
    "olmo3": OLMO3,
    "phi4 mini": PHI4_MINI,
    "seed": SEED,
    "smollm3": SMOLLM3,
}
