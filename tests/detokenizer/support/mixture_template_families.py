"""Chat templates in the manner of large mixtures of experts: short, but with the Jinja that theirs need."""
# ruff: noqa: E501

GPT_OSS = """{%- macro typescript(spec, required) -%}
    {%- if spec.type == "array" -%}
        {{- typescript(spec['items'], false) if spec['items'] else "any" }}{{ "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.type == "object" -%}
        {{- "{" }}{% for name, inner in spec.get('properties', {}).items() -%}
            {{- name }}{% if name not in (spec.required or []) %}?{% endif %}: {{ typescript(inner, spec.required) }}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor %}{{ "}" }}
    {%- else -%}{{- spec.type or "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro tools_of(tools) -%}
    {{- "namespace functions {\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + (tool.description or "") + "\\ntype " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}{{ "(_: " + typescript(tool.parameters, none) + ") => any;\\n" }}
        {%- else %}{{ "() => any;\\n" }}{%- endif %}
    {%- endfor %}
    {{- "} // namespace functions" }}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{{- "<|start|>system<|message|>" + model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") }}
{{- "\\n\\nReasoning: " + reasoning_effort + "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message }}
    {%- if tools %}{{- "\\n\\n# Tools\\n\\n" }}{{- tools_of(tools) }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and ("<|channel|>analysis<|message|>" in message.content) %}
            {{- raise_exception("The message has channel tags in its content.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future_final_message = namespace(found=false) %}
            {%- for future_message in loop_messages[loop.index:] %}
                {%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
                    {%- set future_final_message.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.thinking and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("A tool's message follows no call.") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
GLM = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}{{ '\\n<think>' + reasoning_content.strip() + '</think>'}}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
KIMI = """{%- macro render_content(msg) -%}
    {%- set c = msg.get('content') -%}
    {%- if c is string -%}{{ c }}
    {%- elif c is not none -%}{% for content in c -%}{{ content['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
  {%- endif -%}
  {%- set role_name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{role_name}}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{role_name}}<|im_middle|>
  {%- else -%}<|im_system|>{{role_name}}<|im_middle|>{%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
{{render_content(message)}}<|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
      {%- set formatted_id = tool_call['id'] -%}
<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>
      {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}
      {%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}
<|tool_call_end|>
    {%- endfor -%}
<|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}
{% set tool_call_id = message.tool_call_id %}## Return of {{ tool_call_id }}
{{render_content(message)}}
  {%- else -%}{{render_content(message)}}{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
MINIMAX = """{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- macro render_tool_namespace(namespace_name, tool_list) -%}
{%- for tool in tool_list -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}
{%- endmacro -%}
{%- set system_message = messages[0].content if messages and messages[0].role == 'system' else none -%}
{%- set conversation_messages = messages[1:] if system_message is not none else messages -%}
{{- ']~!b[]~b]system' ~ '\\n' ~ (system_message or 'You are helpful.') }}
{%- if tools -%}
    {{- '\\n\\n' ~ '# Tools' ~ '\\n<tools>\\n' }}{{- render_tool_namespace("functions", tools) }}{{- '</tools>' }}
{%- endif -%}
{{- '[e~[\\n' }}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in conversation_messages -%}
    {%- if message.role == 'assistant' -%}
        {{- ']~b]ai' ~ '\\n' }}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' -%}
        {%- if reasoning_content -%}{{- '<think>' ~ '\\n' ~ reasoning_content ~ '\\n' ~ '</think>' ~ '\\n\\n' }}{%- endif -%}
        {%- if message.content -%}{{- message.content }}{%- endif -%}
        {%- if message.tool_calls -%}
            {{- '\\n' ~ toolcall_begin_token ~ '\\n' }}
            {%- for tool_call in message.tool_calls -%}
                {%- set tool_call = tool_call.function if tool_call.function else tool_call -%}
                {{- '<invoke name="' + tool_call.name + '">' }}
                {%- for k, v in tool_call.arguments.items() %}
                {{- '<parameter name="' + k + '">' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>' }}
                {%- endfor %}
                {{- '</invoke>' ~ '\\n' }}
            {%- endfor -%}
            {{- '</minimax:tool_call>' }}
            {%- set last_tool_call.name = message.tool_calls[-1].name -%}
        {%- else -%}{%- set last_tool_call.name = none -%}{%- endif -%}
        {{- '[e~[' ~ '\\n' }}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or (conversation_messages[loop.index0 - 1].role != 'tool') -%}{{- ']~b]tool' }}{%- endif -%}
        {{- '\\n<response>' ~ message.content ~ '</response>' }}
        {%- if loop.last or (conversation_messages[loop.index0 + 1].role != 'tool') -%}{{- '[e~[\\n' -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- ']~b]user' ~ '\\n' ~ message.content ~ '[e~[' ~ '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}"""
DEEPSEEK_V31 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}
{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- set ns.is_first_sp = false %}
{%- else %}{%- set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_last_user = true -%}
{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- if ns.is_last_user %}{{'<｜Assistant｜></think>'}}{%- endif %}{%- set ns.is_last_user = false -%}{%- set ns.is_first = false %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'
 + tool['function']['arguments']|tojson + '<｜tool▁call▁end｜>'}}{%- set ns.is_first = true -%}
{%- else %}{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']|tojson
 + '<｜tool▁call▁end｜>'}}{%- endif %}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
{%- if ns.is_last_user %}{{'<｜Assistant｜>'}}
{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{'<think>'}}{%- else %}{{'</think>'}}{%- endif %}{%- endif %}
{%- set ns.is_last_user = false -%}
{%- set content = message['content'] -%}
{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
{{- content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}
{{- '<｜tool▁output▁begin｜>'+message['content']+'<｜tool▁output▁end｜>'}}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{'<｜Assistant｜>'}}
{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{% endif %}"""
