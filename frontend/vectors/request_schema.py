"""The JSON schema of bodies for vectors and scores, where their types do not say it. Called by frontend/routes/request_schema.py."""

from itertools import chain
from typing import Any

from meshlm.frontend.openai.prompts import MAX_PROMPTS
from meshlm.frontend.vectors.parse import MAX_PAIRS, PAIRS
from meshlm.protocol.pooling import PoolingSpec

Json = dict[str, Any]
OF_INPUTS = ("EmbeddingRequest", "PoolingRequest", "ClassificationRequest")
OF_PAIRS = ("ScoreRequest", "RerankRequest")
TOKENLESS = "Text of which the tokenizer makes no token is refused."  # it alone knows which: JSON schema cannot say it
_NULL: Json = {"type": "null"}
_STRING: Json = {"type": "string"}


def of_bodies(message: Json) -> dict[str, Json]:
    """The fields of each body. message: the schema of one of a conversation."""
    conversation = _some(message, MAX_PROMPTS)
    messages = {"anyOf": [conversation, _some(conversation, MAX_PROMPTS), _NULL]}
    texts = {"description": TOKENLESS, "anyOf": [_STRING, _some(_STRING, MAX_PAIRS), _NULL]}
    document = {"anyOf": [_STRING, _object(text=_STRING)]}
    documents = {"description": TOKENLESS, "anyOf": [_STRING, _some(document, MAX_PAIRS)]}
    content = _object(content=_some(_object(text=_STRING), MAX_PROMPTS))
    return {
        **{name: {"messages": messages} for name in OF_INPUTS},
        "ScoreRequest": dict.fromkeys(chain(*PAIRS), texts),
        "RerankRequest": {"documents": documents},
        "CohereEmbedRequest": {
            "texts": {"description": TOKENLESS, "anyOf": [_some(_STRING, MAX_PROMPTS), _NULL]},
            "inputs": {"anyOf": [_some(content, MAX_PROMPTS), _NULL]},
            "images": _NULL,
        },
    }


def of_model(spec: PoolingSpec, max_model_len: int) -> dict[str, Json]:
    """The fields of each body that the model decides."""
    sizes: Json = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": spec.size}, _NULL]}
    if spec.matryoshka_dimensions:
        sizes = {"enum": [*spec.matryoshka_dimensions, None]}
    dimensions = sizes if spec.matryoshka else _NULL
    kept = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": max_model_len}, _NULL]}
    of_each: Json = {"type": "integer", "minimum": 0, "maximum": max_model_len - 1}
    each = of_each if spec.scores_by == "classify" else {"const": 0}
    common = {"dimensions": dimensions, "truncate_prompt_tokens": kept, "task": {"enum": [*spec.tasks, None]}}
    pairs = {"truncate_prompt_tokens": kept, "max_tokens_per_query": each, "max_tokens_per_doc": each}
    cohere = {"output_dimension": dimensions, "input_type": {"enum": [*spec.prompts, None]}}
    return {**dict.fromkeys(OF_INPUTS, common), **dict.fromkeys(OF_PAIRS, pairs), "CohereEmbedRequest": cohere}


def conditions(name: str) -> Json:
    """What a body's fields must be together: keywords of its schema."""
    match name:
        case "ScoreRequest":
            text = "There is one of the first for all of the second, or one for each."
            return {"description": text, "anyOf": [_given(*pair) for pair in PAIRS]}
        case "CohereEmbedRequest":
            return {"oneOf": [_given("texts", without="inputs"), _given("inputs", without="texts")]}
        case _ if name in OF_INPUTS:
            return {"oneOf": [_given("input", without="messages"), _given("messages", without="input")]}
    return {}


def _given(*names: str, without: str = "") -> Json:
    absent = {without: _NULL} if without else {}
    return {"required": list(names), "properties": {name: {"not": _NULL} for name in names} | absent}


def _some(items: Json, most: int) -> Json:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}
