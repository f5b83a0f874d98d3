"""What the types of schema.py do not say of a body, in JSON schema: shapes of messages and tools, limits, and what this server has.

Called by openapi.py. What parse.py, messages.py and prompts.py check is written down here again for readers; the test with schemathesis
holds that requests made from it are served.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from msgspec import Struct

from meshlm.frontend.messages import request_schema as anthropic
from meshlm.frontend.openai.prompts import MAX_PROMPTS
from meshlm.frontend.openai.schema import MAX_BAD_WORDS, MAX_LOGPROB_IDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TOKENS
from meshlm.frontend.responses_api import request_schema as responses_api
from meshlm.frontend.vectors import request_schema as vectors
from meshlm.frontend.vectors.request_schema import TOKENLESS
from meshlm.protocol.pooling import PoolingSpec
from meshlm.runtime.mesh.messages import NEED_CONTENT, PARTS
from meshlm.runtime.structured_outputs import MAX_CHOICES as MAX_CHOICES_OF_TEXT

Json = dict[str, Any]
FORMS = {"TranscriptionRequest", "TranslationRequest"}
OF_TOKENS = ("GenerateRequest", "DerenderChatRequest", "DerenderCompletionRequest")
_TEXT: Json = {"type": "string", "minLength": 1}
_NULL: Json = {"type": "null"}
_STRING: Json = {"type": "string"}
_CHOICE: Json = {"type": "array", "items": _STRING, "minItems": 1, "maxItems": MAX_CHOICES_OF_TEXT}
GOES_ON = ("input", "previous_response_id", "conversation")  # of which a body has one

OF_MEDIA = ("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids")  # of a model that takes text alone, empty


class Served(Struct, frozen=True):
    """The features of this server that the schema depends on."""

    names: tuple[str, ...]
    vocab_size: int
    max_logprobs: int
    takes_tools: bool
    takes_templates: bool
    takes_priorities: bool
    tells_reasoning: bool = False
    takes_embeds: bool = False
    most_drafts: int = 0
    is_deterministic: bool = False
    pooling: PoolingSpec | None = None
    max_model_len: int = 0
    sees: bool = False


def refine(schemas: Json, served: Served) -> None:
    """Say it of the bodies among these schemas."""
    refined = {
        name: _fields(served)
        for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", *OF_TOKENS)
    }
    refined["BatchChatRequest"] = _fields(served) | {
        "messages": _list(_list(_message(), minItems=1), minItems=1), "tools": _NULL, "prompt_logprobs": _NULL
    }  # fmt: skip
    without_budget = ("CompletionRequest", *(() if served.tells_reasoning else ("ChatRequest", "BatchChatRequest")))
    for name in without_budget:
        refined[name] |= {"thinking_token_budget": {"enum": [-1, None]}}
    refined["CompletionRequest"] |= {"prompt": _prompt(served), "logprobs": _up_to(served.max_logprobs)}
    if served.takes_embeds:
        refined["ChatRequest"]["messages"] = _list(_message(takes_embeds=True), minItems=1)
    else:
        refined["CompletionRequest"]["prompt_embeds"] = _NULL
    of_messages = anthropic.fields(
        served.names,
        takes_tools=served.takes_tools,
        tells_reasoning=served.tells_reasoning,
        takes_priorities=served.takes_priorities,
    )
    refined |= {"MessagesRequest": of_messages, "CountTokensRequest": of_messages}
    refined |= responses_api.of_bodies(
        served.names, served.max_logprobs, takes_tools=served.takes_tools, takes_priorities=served.takes_priorities
    )
    _refine_forms(schemas, served)
    refined["ResponsesRequest"]["structured_outputs"] = _or_null(*_constraints())
    either: Json = {"anyOf": [_TEXT, _ids(served, minItems=1)]}
    maybe_empty: Json = {"anyOf": [_STRING, _ids(served)]}
    items = partial(_list, minItems=1, maxItems=MAX_PROMPTS)
    prompts = "The query and an item are a prompt. " + TOKENLESS
    refined["GenerativeScoringRequest"] = _fields(served) | {
        "query": {"description": prompts, **maybe_empty},
        "items": {"description": prompts, **items(maybe_empty)},
        "label_token_ids": _ids(served, minItems=1, maxItems=MAX_LOGPROB_IDS),
    }
    of_model = vectors.of_model(served.pooling, served.max_model_len) if served.pooling else {}
    for name, of_body in vectors.of_bodies(_message()).items():
        refined[name] = _fields(served) | {"input": _prompt(served)} | of_body | of_model.get(name, {})
        if name in schemas:
            schemas[name] |= vectors.conditions(name)
    for name, fields in refined.items():
        if name in schemas:
            properties = schemas[name]["properties"]
            every = fields | {"num_speculative_tokens": _up_to(served.most_drafts)}
            if not served.is_deterministic:
                every["deterministic"] = {"enum": [False, None]}
            if not served.sees:
                every |= {name: {"enum": [{}, None]} for name in OF_MEDIA}
            properties.update({field: schema for field, schema in every.items() if field in properties})
    if "ChatRequest" in schemas:
        text = "stream_options needs stream: true; top_logprobs and logprob_token_ids need logprobs: true."
        _describe(schemas["ChatRequest"], text)
    if "CompletionRequest" in schemas:
        schemas["CompletionRequest"]["required"] = [] if served.takes_embeds else ["prompt"]
        text = "stream_options needs stream: true; max_tokens 0 needs echo: true; best_of is at least n"
        _describe(schemas["CompletionRequest"], f"{text}; logprob_token_ids needs logprobs.")
    if "GenerativeScoringRequest" in schemas:
        filled = [{"properties": {"query": either}}, {"properties": {"items": items(either)}}]  # no prompt is empty
        schemas["GenerativeScoringRequest"]["anyOf"] = filled
    if "ResponsesRequest" in schemas:
        schemas["ResponsesRequest"]["required"] = ["input"]
        for name in ("InputTokensRequest", "CompactRequest"):  # which may go on with a conversation without more input
            goes_on = [field for field in GOES_ON if field in schemas[name]["properties"]]
            schemas[name]["anyOf"] = [{"required": [field], "properties": {field: {"not": _NULL}}} for field in goes_on]
    if "TokenizeRequest" in schemas:
        schemas["TokenizeRequest"]["oneOf"] = [_given("prompt", "messages"), _given("messages", "prompt")]
    if "DetokenizeRequest" in schemas:
        schemas["DetokenizeRequest"]["properties"]["tokens"] = _ids(served)


def _refine_forms(schemas: Json, served: Served) -> None:
    """Say it of the forms for audio: `file` is binary, and a list has [] behind its name."""
    for name in FORMS & schemas.keys():
        fields = schemas[name]["properties"]
        fields["file"] = {"type": "string", "format": "binary", "description": "wav, mp3, flac, ogg, webm, m4a or mp4"}
        fields["model"] = {"anyOf": [{"enum": list(served.names)}, _NULL]}
        fields["timestamp_granularities[]"] = fields.pop("timestamp_granularities") | {"items": {"enum": ["segment"]}}
        if not served.takes_priorities:
            fields["priority"] = {"const": 0}
        if "to_language" in fields:
            fields["to_language"] = {"enum": ["en", None]}


def _describe(schema: Json, text: str) -> None:
    schema["description"] = f"{schema.get('description', '')} {text}".strip()


def _given(name: str, other: str) -> Json:
    return {"required": [name], "properties": {name: {"not": _NULL}, other: _NULL}}


def _or_null(*kinds: Json) -> Json:
    return {"anyOf": [*kinds, _NULL]}


def _list(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


def _object(required: Iterable[str], properties: Json, **more: Any) -> Json:
    return {"type": "object", "required": list(required), "properties": properties, **more}


def _fields(served: Served) -> Json:
    """The schemas of fields by name, the same in all bodies that have them."""
    stop = {**_TEXT, "maxLength": MAX_STOP_LENGTH}
    bias = {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,4}$"}, "additionalProperties": {"type": "number"}}
    truncation = {"type": "integer", "minimum": -1, "maximum": MAX_TOKENS, "not": {"const": 0}}
    found: Json = {
        "model": {"enum": [*served.names, None]},
        "messages": _list(_message(), minItems=1),
        "tools": _or_null(_list(_tool())) if served.takes_tools else {"enum": [[], None]},
        "response_format": _or_null(*_formats()),
        "structured_outputs": _or_null(*_constraints()),
        "guided_choice": _or_null(_CHOICE),
        "guided_decoding_backend": {"enum": ["auto", "guidance", "", None]},
        "modalities": _or_null(_list({"const": "text"})),
        "stop": _or_null(stop, _list(stop, maxItems=MAX_STOP_STRINGS)),
        "stop_token_ids": _or_null(_ids(served)),
        "allowed_token_ids": _or_null(_ids(served, minItems=1)),
        "logit_bias": _or_null(bias),
        "truncate_prompt_tokens": _or_null(truncation),
        "prompt_logprobs": _up_to(served.max_logprobs),
        "top_logprobs": _up_to(served.max_logprobs),
        "bad_words": _or_null(_list({**stop, "pattern": "[!-~]"}, maxItems=MAX_BAD_WORDS)),
        "logprob_token_ids": _or_null(_ids(served, maxItems=MAX_LOGPROB_IDS)),
    }
    if not served.takes_priorities:
        found["priority"] = {"const": 0}
    if not served.takes_templates:
        found["chat_template"] = {"enum": ["", None]}
    return found


def _formats() -> list[Json]:
    schema: Json = {"type": "object", "description": "A JSON schema."}
    named: Json = {"name": _STRING, "schema": schema, "strict": _or_null({"type": "boolean"})}
    kinds: list[Json] = [
        {"type": {"const": "json_schema"}, "json_schema": _object(["name", "schema"], named)},
        {"type": {"const": "json_object"}, "schema": schema},
        {"type": {"const": "json_object"}, "value": schema},
        {"type": {"const": "regex"}, "value": _STRING},
        {"type": {"const": "grammar"}, "grammar": _STRING},
    ]
    alone = ("text", "json_object")
    plain = [_object(["type"], {"type": {"const": kind}}, additionalProperties=_NULL) for kind in alone]
    return plain + [_object(kind, kind) for kind in kinds]


def _constraints() -> list[Json]:
    """structured_outputs has one kind, and options."""
    kinds: Json = {
        "json": {"type": ["object", "string"], "description": "A JSON schema."},
        "regex": _STRING,
        "choice": _CHOICE,
        "grammar": {"type": "string", "description": "EBNF or Lark."},
        "json_object": {"const": True},
        "structural_tag": {"type": ["object", "string"]},
    }
    options: Json = {
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean"},
        "strict": {"type": "boolean"},
        "whitespace_pattern": _or_null(_STRING),
    }
    return [_object([name], {name: kind, **options}, additionalProperties=False) for name, kind in kinds.items()]


def _up_to(most: int) -> Json:
    limits = {"minimum": -1} if most == -1 else {"minimum": 0, "maximum": most}
    return _or_null({"type": "integer", **limits})


def _ids(served: Served, **limits: int) -> Json:
    return _list({"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}, **limits)


def _prompt(served: Served) -> Json:
    ids = _ids(served, minItems=1)
    several = [_list(kind, minItems=1, maxItems=MAX_PROMPTS) for kind in (_TEXT, ids)]
    return {"description": f"Text, token ids, or a list of either. {TOKENLESS}", "anyOf": [_TEXT, ids, *several]}


def _message(*, takes_embeds: bool = False) -> Json:
    parts = [_object(["type", key], {"type": {"const": kind}, key: _STRING}) for kind, key in PARTS.items()]
    if takes_embeds:
        data = {"type": "string", "description": "A saved tensor, base64"}
        parts.append(_object(["type", "data"], {"type": {"const": "prompt_embeds"}, "data": data}))
    content = {"anyOf": [_STRING, _list({"anyOf": parts}, minItems=1)]}
    roles = [role for role in NEED_CONTENT if role != "tool"]
    others: Json = {"role": {"enum": ["assistant", *roles]}, "content": content, "name": _or_null(_STRING)}
    tool: Json = {"role": {"const": "tool"}, "content": content, "tool_call_id": _TEXT}
    function = _object(["name"], {"name": _STRING, "arguments": _STRING})
    call = _object(["id", "function"], {"id": _STRING, "type": {"const": "function"}, "function": function})
    calls = _list(call, minItems=1)
    assistant: Json = {"role": {"const": "assistant"}, "content": _or_null(content), "tool_calls": calls}
    return {
        "anyOf": [
            _object(["role", "content"], others),
            _object(["role", "content", "tool_call_id"], tool),
            _object(["role", "tool_calls"], assistant),
        ]
    }


def _tool() -> Json:
    fields = {
        "name": _TEXT,
        "description": _or_null(_STRING),
        "parameters": _or_null({"type": "object"}),
        "strict": {"enum": [False, None]},
    }
    return _object(["function"], {"type": {"const": "function"}, "function": _object(["name"], fields)})
