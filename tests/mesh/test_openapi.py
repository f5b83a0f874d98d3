"""Every route does what /openapi.json says: schemathesis makes requests of it, right ones and wrong ones, and looks at the answers."""

import itertools
import json
from typing import Any

import httpx
import pytest
import schemathesis
from http_clients import AUTH, FLAGS
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from serving import Serving, serving

from meshlm.frontend.http.answer_fields import OF_ANSWER, OF_PROMPT, OF_VECTORS
from meshlm.frontend.http.operation import Group
from meshlm.frontend.openai.schema import MAX_TOKENS
from meshlm.frontend.openai.structured import PLAIN
from meshlm.frontend.routes.application import OPERATIONS, served

pytestmark = pytest.mark.mesh

EXAMPLES = {"post": 15, "get": 2, "delete": 2}  # right and wrong ones of a route each
MOST = {"max_tokens": 4, "max_output_tokens": 4, "max_completion_tokens": 4, "min_tokens": 0, "n": 2, "best_of": 2}
GENERATION = ("/v1/completions", "/v1/chat/completions")
LONG_CHAT = 2048  # bytes; a token may be one
FEW = 3  # of routes whose bodies are another's
LIKE_CHATS = ("/v1/chat/completions/render", "/v1/chat/completions/batch", "/invocations")
LIKE_THEM = ("/v1/completions/render", *LIKE_CHATS)
RARE = (*LIKE_THEM, "/scale_elastic_ep")
RESPONSES = "/v1/responses"
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.positive_data_acceptance,
]
NO_TOKEN = "\x1d"  # to this model's tokenizer
LIMIT = 120  # seconds for an answer: a summary has 2,048 tokens
_numbers = itertools.count()


def brief(case: Any) -> None:
    """Few tokens, choices and ranks, so that examples are fast. What is wrong stays wrong."""
    ranks = case.body.get("new_data_parallel_size") if isinstance(case.body, dict) else None
    if isinstance(ranks, int | float) and not isinstance(ranks, bool) and 1 <= ranks <= 1024 and ranks == int(ranks):
        case.body["new_data_parallel_size"] = 1 + int(ranks) % 2
    if isinstance(case.body, dict) and isinstance(case.body.get("sampling_params"), dict):
        case.body["sampling_params"].setdefault("max_tokens", MOST["max_tokens"])
    if not isinstance(case.body, dict) or case.path not in (*GENERATION, *LIKE_THEM, "/v1/messages", RESPONSES):
        return
    for name, most in MOST.items():
        value = case.body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and most < value <= MAX_TOKENS:
            case.body[name] = most
    case.body.setdefault("max_output_tokens" if case.path == RESPONSES else "max_tokens", MOST["max_tokens"])


# Schemas, patterns and grammars are texts of languages of their own. Here are some of each.
WRITTEN = {
    "json": {"type": "object"},
    "json_schema": {"type": "object"},
    "schema": {"enum": [1, "b"]},
    "regex": "[a-c]+",
    "grammar": 'root ::= "a"+',
    "ebnf": 'root ::= "a"+',
    "structural_tag": '{"format": {"type": "const_string", "value": "a"}}',
    "whitespace_pattern": " ?",
}
FORMS: dict[str, Any] = {  # what may stand beside a type of response_format
    "text": {"schema": None},
    "json_object": {"value": WRITTEN["schema"]},
    "regex": {"value": WRITTEN["regex"]},
    "grammar": {"grammar": WRITTEN["grammar"]},
}
FIELDS = {
    op.path: set(op.body.__struct_fields__)
    for op in served(documentation=True, development=True, dashboard=True, tokenizer_info=True)
    if isinstance(op.body, type)
}
CONSTRAINTS = ("response_format", "structured_outputs", *PLAIN)


def constrain(body: dict[str, Any]) -> None:
    """One constraint at most, and one that is understood."""
    given = [name for name in CONSTRAINTS if body.get(name) not in (None, False)]
    for name in given[1:]:
        del body[name]
    if given:
        body.pop("allowed_token_ids", None)  # which may leave no token of the grammar
    form = body.get("response_format") or {}
    if form.get("type") in FORMS:
        body["response_format"] = form = {"type": form["type"], **FORMS[form["type"]]}
    fields = (body, body.get("structured_outputs"), form.get("json_schema"))
    for some in filter(None, fields):
        for name, text in WRITTEN.items():
            for spelling in (name, f"guided_{name}"):
                if some.get(spelling) is not None:
                    some[spelling] = text
        for spelling in ("choice", "guided_choice"):
            if some.get(spelling) is not None:
                some[spelling][-1] = "some"  # this model's vocabulary lacks bytes that the others may need


def has_tokens(prompt: Any) -> Any:
    """A prompt that this model's tokenizer makes a token of, which lacks some bytes: NO_TOKEN has none."""
    return f"some{prompt}" if isinstance(prompt, str) else prompt


def consistent(case: Any) -> None:
    """What JSON schema cannot say: fields that need or exclude others, JSON in text, ranks that there are, keys used once."""
    headers = case.headers or {}
    if "X-data-parallel-rank" in headers:
        headers["X-data-parallel-rank"] = "0"
    if "Idempotency-Key" in headers:
        headers["Idempotency-Key"] = f"key {next(_numbers)}"
    headers.pop("Last-Event-ID", None)
    if case.query and "reset_external" in case.query:
        case.query["reset_external"] = "false"  # which is refused
    if not isinstance(case.body, dict):
        return
    body = case.body
    for name in {*OF_PROMPT, *OF_ANSWER, *OF_VECTORS}:
        if name not in FIELDS[case.path]:
            body.pop(name, None)  # an additional property by this name is refused: the operation's text says so
    several = body.get("messages") or ()
    for message in itertools.chain(*several) if case.path.endswith("/batch") else several:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = "{}"
    if body.get("continue_final_message"):
        body["continue_final_message"] = False
    for item in body["items"] if isinstance(body.get("items"), list) else ():
        if "arguments" in item:
            item["arguments"] = "{}"
    if case.path in (RESPONSES, f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"):
        body.setdefault("input", "some")  # which may be left out where a response or a conversation goes on
        for item in body["input"] if isinstance(body.get("input"), list) else ():
            if "arguments" in item:
                item["arguments"] = "{}"
        for name in (
            "chat_template_kwargs",
            "previous_response_id",
            "conversation",
            "background",
            "request_id",
            "tool_choice",
            "text",
            "structured_outputs",
        ):
            body.pop(name, None)
        if case.path == RESPONSES:
            body["max_output_tokens"] = body.get("max_output_tokens") or MOST["max_output_tokens"]
        if not body.get("stream"):
            body.pop("stream_options", None)
    if case.path in MESSAGES:
        for name in ("chat_template_kwargs", "tool_choice", "output_config"):
            body.pop(name, None)
    if "derender" in case.path:
        for name in ("chat_request", "completion_request", "prompt_tokens"):
            body.pop(name, None)
        one = {"choices": [{"index": 0, "token_ids": [5, 6]}]}
        body.update(
            {name: one if name.endswith("response") else [one] for name in body if name.startswith("generate_")}
        )
    if case.path == "/inference/v1/generate":
        body.update({"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}})
        body["stream"] = bool(body.get("stream"))
        if not body["stream"]:
            body.pop("stream_options", None)
    if case.path == "/generative_scoring":
        body.update({"query": has_tokens(body["query"]), "items": [has_tokens(item) for item in body["items"]]})
    if case.path not in (*GENERATION, *LIKE_THEM):
        return
    constrain(body)
    if case.path.endswith("/completions/render"):
        body.pop("echo", None)  # the answer of token ids has no prompt in it
    if len(json.dumps(several)) > LONG_CHAT:
        body["truncate_prompt_tokens"] = 256  # else it is longer than the context
    for name in ("max_tokens", "max_completion_tokens"):
        body[name] = body.get(name) or MOST[name]
    body["stream"] = bool(body.get("stream")) and body.get("prompt_logprobs") is None and "batch" not in case.path
    if not body["stream"]:
        body.pop("stream_options", None)
    if body.get("tools") is None or body.get("tool_choice") not in ("none", "auto"):
        body.pop("tool_choice", None)  # a forced call names a tool, whose schema is one that can be kept
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    body.pop("best_of", None)
    for name in (
        "documents",
        "chat_template_kwargs",
        "timeout",
    ):  # a template may fail on any, and a short time is an error
        body.pop(name, None)
    body.pop("use_beam_search", None)  # which refuses much
    body.pop("vllm_xargs", None)  # there is nobody who reads them
    if body.get("repetition_detection"):
        body["repetition_detection"] = {"max_pattern_size": 4, "min_count": 2}
    if body.get("logprob_token_ids"):
        body["logprobs"] = 1 if "prompt" in body else True
    if body.get("chat_template"):
        body["chat_template"] = "{{ messages }}"
    if "prompt" in body:
        prompt = body["prompt"]
        several = isinstance(prompt, list) and isinstance(prompt[0], str)
        body["prompt"] = [has_tokens(text) for text in prompt] if several else has_tokens(prompt)
        body.pop("max_completion_tokens", None)
        body.pop("suffix", None)  # this model cannot fill in the middle


def statuses(operation: Any, mode: GenerationMode, url: str) -> set[int]:
    """Those of the answers to requests of this kind, each as declared."""
    found = set[int]()
    few = (
        operation.path in (*RARE, "/v1/responses/compact") or "derender" in operation.path
    )  # a summary is 2,048 tokens
    if mode is GenerationMode.NEGATIVE:
        few = operation.path in RARE  # what is wrong with a few may all be their keys

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=FEW if few else EXAMPLES[operation.method],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        brief(case)
        if mode is GenerationMode.POSITIVE:
            consistent(case)
        response = case.call(base_url=url, headers=AUTH, timeout=LIMIT)
        found.add(response.status_code)
        case.validate_response(response, checks=CHECKED)

    ask()
    return found


NOTHING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": NO_TOKEN}, "prompt"),
    ("/v1/completions", {"prompt": ["some", NO_TOKEN], "max_tokens": 4}, "prompt"),
    ("/v1/completions/render", {"prompt": NO_TOKEN}, "prompt"),
    ("/generative_scoring", {"query": "", "items": ["some", NO_TOKEN], "label_token_ids": [5]}, "items"),
    ("/generative_scoring", {"query": NO_TOKEN, "items": ["some", ""], "label_token_ids": [5]}, "items"),
]


@pytest.mark.parametrize(("path", "body", "param"), NOTHING)
def test_text_without_a_token_is_refused_as_the_document_says(
    keyed: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    """JSON schema cannot say it, as it is the tokenizer's to know: the field's description does."""
    answer = httpx.post(f"{keyed.url}{path}", headers=AUTH, json=body, timeout=LIMIT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    document = httpx.get(f"{keyed.url}/openapi.json", headers=AUTH, timeout=LIMIT).json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]["properties"]
    assert "no token is refused" in fields[param]["description"]


def operations(url: str) -> list[Any]:
    document = httpx.get(f"{url}/openapi.json", headers=AUTH, timeout=LIMIT).json()
    found: list[Any] = list(schemathesis.openapi.from_dict(document).get_all_operations())
    ok = [operation.ok() for operation in found]
    return [
        one for one in ok if one.path != "/dashboard/events" and (one.path, one.method) != ("/settings", "post")
    ]  # events have no end (tests/frontend/dashboard/test_routes.py), and a change would be for all tests beside these


def test_each_route_answers_as_declared(keyed: Serving) -> None:
    for operation in operations(keyed.url):
        nothing = any(name in operation.path for name in ("profile", "{response_id}", "{conversation_id}"))
        expected = {404} if nothing else {200}
        assert statuses(operation, GenerationMode.POSITIVE, keyed.url) == expected, operation.label
        if len(operation.body):
            wrong = statuses(operation, GenerationMode.NEGATIVE, keyed.url)
            assert 400 in wrong, operation.label
            assert max(wrong) < 500, operation.label


DEVELOPING = {
    "/collective_rpc": {404},  # there is no extension to call
    "/sleep": {200, 409},  # the latter at level 0 of a mesh that sleeps deeper, whose cache cannot be reset
    # of these some fields can only be refused, and no folder that chance names has weights
    "/init_weight_transfer_engine": {200, 409},
    "/start_weight_update": {200, 409},
    "/update_weights": {409},
    "/finish_weight_update": {200, 409},
    "/update_weights_from_disk": {409},
    "/update_weight_version": {200, 409},
    "/weight_checker": {200, 409},
}


def test_each_route_for_development_answers_as_declared() -> None:
    """Of a mesh of their own, which they pause, let sleep and scale. In the end it serves."""
    own = {op.path for op in OPERATIONS if op.group is Group.DEVELOPMENT}
    with serving(*FLAGS, "--server-dev-mode", "--enable-sleep-mode") as server:
        found = [operation for operation in operations(server.url) if operation.path in own]
        assert {operation.path for operation in found} == own
        for operation in found:
            expected = DEVELOPING.get(operation.path, {200})
            answered = statuses(operation, GenerationMode.POSITIVE, server.url)
            assert answered <= expected, operation.label
            if len(operation.body):
                wrong = statuses(operation, GenerationMode.NEGATIVE, server.url)
                assert max(wrong) < 500, operation.label
            for parameter in operation.query:
                url = f"{server.url}{operation.path}?{parameter.name}=nonsense"
                answer = httpx.request(operation.method, url, headers=AUTH, timeout=300)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter.name), url
            for path in ("/wake_up", "/resume"):
                assert httpx.post(f"{server.url}{path}", headers=AUTH, timeout=300).status_code == 200, operation.label
        body = {"prompt": [5, 6], "max_tokens": 4}
        served = httpx.post(f"{server.url}/v1/completions", headers=AUTH, json=body, timeout=300)
        assert served.status_code == 200, served.text


def test_the_pages(keyed: Serving) -> None:
    assert httpx.get(f"{keyed.url}/docs").status_code == 401, "a key as for all but the probes"
    page = httpx.get(f"{keyed.url}/docs", headers=AUTH)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert httpx.get(f"{keyed.url}/redoc", headers=AUTH).text == page.text
    for operation in operations(keyed.url):
        assert operation.path in page.text
