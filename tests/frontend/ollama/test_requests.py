"""What a body of Ollama's asks of the mesh, and what is refused by Ollama's names."""

from typing import Any

import httpx
import pytest
from ollama_site import SERVER, USER, ask, messages_of
from scripted import Scripted

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar

Json = dict[str, Any]
IMAGE = {"role": "user", "content": "see", "images": ["aGk="]}


async def test_options_are_sampling_parameters(backend: Scripted) -> None:
    options: Json = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        "typical_p": 0.75,
        "repeat_penalty": 1.5,
    }
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 7, "seed": 3, "stop": ["END"]}
    machine = {"num_ctx": 4096, "num_gpu": 99, "num_thread": 8, "use_mmap": True, "num_keep": 4, "mirostat": 0}
    answer = await ask(backend, "/api/chat", {"messages": USER, "options": options | machine})
    assert answer.status_code == 200, answer.text
    submit = backend.submits[-1]
    sampling = submit.sampling
    named = {name: getattr(sampling, name) for name in options if hasattr(sampling, name)}
    assert named == {name: options[name] for name in named}
    assert len(named) == 8
    assert (sampling.repetition_penalty, submit.max_tokens, sampling.seed) == (1.5, 7, 3)
    assert submit.text.stop == ("END",)
    assert backend.ignored_fields == ()


@pytest.mark.parametrize("wanted", [-1, -2, None])
async def test_no_limit_is_the_contexts(backend: Scripted, wanted: int | None) -> None:
    await ask(backend, "/api/chat", {"messages": USER, "options": {"num_predict": wanted}})
    assert backend.submits[-1].cap_max_tokens


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("wanted", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_a_format_is_a_grammar(backend: Scripted, path: str, wanted: Any) -> None:
    body = {"messages": USER} if path == "/api/chat" else {"prompt": "hi"}
    answer = await ask(backend, path, {**body, "format": wanted, "think": False})
    assert answer.status_code == 200, answer.text
    assert find_extra(backend.submits[-1].extras, Grammar) is not None


async def test_a_conversation_with_calls(backend: Scripted) -> None:
    def call(name: str) -> Json:
        return {"function": {"name": name, "arguments": {"city": "Bärn"}}}

    messages = [
        *USER,
        {"role": "assistant", "content": "", "thinking": "two", "tool_calls": [call("weather"), call("time")]},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "mine", **call("time")}]},
        {"role": "tool", "content": "later", "tool_call_id": "mine"},
    ]
    answer = await ask(backend, "/api/chat", {"messages": messages})
    assert answer.status_code == 200, answer.text
    _, first, noon, sunny, second, later = messages_of(backend)
    assert first["reasoning"] == "two"
    assert [one["id"] for one in first["tool_calls"]] == ["call_0", "call_1"]
    assert first["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bärn"}'}
    assert [one["tool_call_id"] for one in (noon, sunny, later)] == ["call_1", "call_0", "mine"]
    assert second["tool_calls"][0]["id"] == "mine"


@pytest.mark.parametrize("think", [True, False, "high"])
async def test_think_is_the_templates_switch(backend: Scripted, think: bool | str) -> None:
    await ask(backend, "/api/chat", {"messages": USER, "think": think})
    kwargs = backend.prompt.template_kwargs_json.decode()
    assert f'"enable_thinking":{"true" if think else "false"}' in kwargs
    assert ('"reasoning_effort":"high"' in kwargs) == (think == "high")


REFUSED: list[tuple[str, Json, str]] = [
    ("chat", {"messages": [{"role": "user"}, {"role": "robot", "content": "x"}]}, "messages.1.role"),
    ("chat", {"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content"),
    ("chat", {"messages": [{"role": "user", "content": "a", "images": "x"}]}, "messages.0.images"),
    ("chat", {"messages": [IMAGE]}, "image"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0.function"),
    ("chat", {"messages": USER, "options": {"temperature": -1}}, "options.temperature"),
    ("chat", {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat"),
    ("chat", {"messages": USER, "options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ("chat", {"messages": USER, "options": {"num_predict": 0}}, "options.num_predict"),
    ("chat", {"messages": USER, "options": {"max_tokens": 3}}, "options.max_tokens: not supported on this path; num_predict"),
    ("chat", {"messages": USER, "max_tokens": 3}, "max_tokens: not supported on this path; options.num_predict"),
    ("chat", {"messages": USER, "response_format": {"type": "json_object"}}, "format"),
    ("chat", {"messages": USER, "format": 3}, "format"),
    ("chat", {"messages": USER, "think": "much"}, "think"),
    ("chat", {"messages": USER, "think": 1}, "think"),
    ("chat", {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ("chat", {"keep_alive": 0}, "keep_alive"),
    ("chat", {"prompt": "hi", "messages": USER}, "prompt"),
    ("generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "template"),
    ("generate", {"prompt": "hi", "context": [1, 2]}, "context"),
    ("generate", {"prompt": "hi", "raw": True, "system": "x"}, "system"),
    ("generate", {"prompt": "hi", "raw": True, "think": True}, "think"),
    ("generate", {"keep_alive": "0s"}, "keep_alive"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "said"), REFUSED)
async def test_what_is_refused(backend: Scripted, path: str, body: Json, said: str) -> None:
    answer = await ask(backend, f"/api/{path}", body)
    assert answer.status_code == 400, answer.text
    ((name, text),) = answer.json().items()
    assert name == "error"
    assert said in text
    assert backend.submits == []


async def test_reasoning_needs_a_parser() -> None:
    backend = Scripted(ServerConfig(api=("ollama",)))
    answer = await ask(backend, "/api/chat", {"messages": USER, "think": True})
    assert "--reasoning-parser" in answer.json()["error"]


async def test_names_may_have_the_tag_latest(backend: Scripted) -> None:
    assert (await ask(backend, "/api/chat", {"model": "tiny:latest", "messages": USER})).status_code == 200
    answer = await ask(backend, "/api/chat", {"model": "other:latest", "messages": USER})
    assert (answer.status_code, "other" in answer.json()["error"]) == (404, True)


async def test_without_the_flag_it_is_not_there() -> None:
    answer = await ask(Scripted(), "/api/chat", {"messages": USER})
    assert (answer.status_code, "--api ollama" in answer.json()["error"]) == (404, True)


@pytest.mark.parametrize(("headers", "status"), [({}, 200), ({"origin": "http://localhost"}, 415)])
async def test_curl_needs_no_content_type_and_a_web_page_does(
    backend: Scripted, headers: dict[str, str], status: int
) -> None:
    transport = httpx.ASGITransport(app=backend.app)
    form = {"content-type": "application/x-www-form-urlencoded", **headers}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = b'{"model": "tiny", "prompt": "hi", "stream": false}'
        answer = await client.post("/api/generate", content=body, headers=form)
    assert answer.status_code == status


async def test_keys_hold_here_too() -> None:
    backend = Scripted(ServerConfig(api=SERVER.api, api_key=("s3cret",)))
    answer = await ask(backend, "/api/chat", {"messages": USER})
    assert (answer.status_code, list(answer.json())) == (401, ["error"])
    allowed = await ask(backend, "/api/chat", {"messages": USER}, Authorization="Bearer s3cret")
    assert allowed.status_code == 200
