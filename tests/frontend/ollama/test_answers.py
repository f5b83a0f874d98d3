"""POST /api/chat and /api/generate as Ollama's clients read them: whole, in lines, with reasoning, calls and log-probabilities."""

import msgspec
import pytest
from ollama_site import USER, ask, both, lines
from scripted import NUM_PROMPT, Scripted

from meshlm.frontend.ollama.schema import ChatAnswer, GenerateAnswer
from meshlm.protocol.edges.text import Finished, PositionLogprobs, TextPrompt, TokenLogprob
from meshlm.protocol.wire.ids import ErrorKind, FinishReason

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
END = {"model": "tiny", "done": True, "done_reason": "stop"}
COUNTS = {"prompt_eval_count": NUM_PROMPT, "eval_count": 2}


async def test_a_chat(backend: Scripted) -> None:
    answer = await both(backend, "/api/chat", messages=USER, think=False)
    assert answer == {**END, **COUNTS, "message": {"role": "assistant", "content": "Hello you"}}


async def test_a_prompt_is_a_users_message(backend: Scripted) -> None:
    answer = await both(backend, "/api/generate", prompt="hi", system="be short", think=False)
    assert answer == {**END, **COUNTS, "response": "Hello you"}
    system, user = msgspec.json.decode(backend.prompt.messages_json)
    assert (system, user) == ({"role": "system", "content": "be short"}, {"role": "user", "content": "hi"})


async def test_a_raw_prompt_is_as_it_is(backend: Scripted) -> None:
    answer = await both(backend, "/api/generate", prompt="<s>hi", raw=True)
    assert answer["response"] == "Hello you"
    prompt, submit = backend.submits[-1].prompt, backend.submits[-1]
    assert isinstance(prompt, TextPrompt)
    assert prompt.text == "<s>hi"
    assert submit.cap_max_tokens  # as many tokens as the context holds


async def test_answers_are_those_that_the_document_names(backend: Scripted) -> None:
    whole = {"messages": USER, "stream": False}
    msgspec.json.decode((await ask(backend, "/api/chat", whole)).content, type=ChatAnswer)
    whole = {"prompt": "hi", "stream": False}
    msgspec.json.decode((await ask(backend, "/api/generate", whole)).content, type=GenerateAnswer)


async def test_thinking_and_calls(backend: Scripted) -> None:
    backend.pieces = ["<think>", "I look", ".", "</think>", "\n\n", "Look: ", CALL, "\n", CALL, "\n"]
    message = (await both(backend, "/api/chat", messages=USER, tools=TOOLS, think=True))["message"]
    assert (message["thinking"], message["content"]) == ("I look.", "\n\nLook: ")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "weather", "index": place, "arguments": {"city": "Bärn"}} for place in (0, 1)]


async def test_a_call_that_was_cut_is_not_lost(backend: Scripted) -> None:
    backend.pieces = ['<tool_call>\n{"name": "weather", "arguments": {"city": "B']
    backend.finished = Finished(0, FinishReason.LENGTH)
    answer = await both(backend, "/api/chat", messages=USER, tools=TOOLS, think=False)
    assert "Bä"[0] in msgspec.json.encode(answer["message"]).decode()
    assert answer["done_reason"] == "length"


async def test_logprobs(backend: Scripted) -> None:
    token = TokenLogprob(7, -0.5, 1, "Hello", b"Hello")
    backend.logprobs = [PositionLogprobs(token, 5, (token,))] * 2
    answer = await both(backend, "/api/chat", messages=USER, logprobs=True, top_logprobs=1, think=False)
    entry = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    assert answer["logprobs"] == [{**entry, "top_logprobs": [entry]}] * 2


async def test_a_failure_before_the_first_token_has_its_status(backend: Scripted) -> None:
    backend.pieces, backend.failure = (), (ErrorKind.INTERNAL, "given up", "")
    answer = await ask(backend, "/api/chat", {"messages": USER})
    assert (answer.status_code, answer.json()) == (500, {"error": "given up"})


async def test_a_failure_later_is_the_last_line(backend: Scripted) -> None:
    backend.failure = ErrorKind.INTERNAL, "given up", ""
    answer = await ask(backend, "/api/chat", {"messages": USER, "think": False})
    *_, last = answer.text.splitlines()
    assert msgspec.json.decode(last) == {"error": "given up"}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_without_a_prompt_the_model_is_there(backend: Scripted, path: str) -> None:
    answer = (await ask(backend, path, {"keep_alive": -1})).json()
    assert (answer["done"], answer["done_reason"], backend.submits) == (True, "load", [])


async def test_each_token_is_a_line(backend: Scripted) -> None:
    found = await lines(backend, "/api/chat", {"messages": USER, "think": False})
    assert [line["message"]["content"] for line in found] == ["Hello", " you", ""]
