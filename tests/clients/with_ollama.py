"""Ollama's own client and LangChain's ChatOllama on --api ollama: whole, in lines, asynchronous, with a schema, calls and refusals."""

import asyncio
import json
import sys

import ollama
from langchain_ollama import ChatOllama

base, model = sys.argv[1:]
HOST = base.removesuffix("/v1")
USER = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"temperature": 0, "num_predict": 12}

client = ollama.Client(HOST)
answer = client.chat(model, USER, options=OPTIONS)
assert "Paris" in answer.message.content, answer
assert answer.done_reason in ("stop", "length")
assert min(answer.eval_count, answer.prompt_eval_count, answer.eval_duration) > 0
assert answer.total_duration >= answer.eval_duration
pieces = list(client.chat(f"{model}:latest", USER, options=OPTIONS, stream=True))
assert "".join(piece.message.content for piece in pieces) == answer.message.content
assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
assert client.generate(model, USER[0]["content"], options=OPTIONS).response == answer.message.content
raw = client.generate(model, "The capital of France is", raw=True, options=OPTIONS)
assert "Paris" in raw.response, raw
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
shaped = client.chat(model, USER, format=SCHEMA, options={"temperature": 0, "num_predict": 60})
assert list(json.loads(shaped.message.content)) == ["city"], shaped
scored = client.chat(model, USER, options=OPTIONS, logprobs=True, top_logprobs=2)
assert len(scored.logprobs) == scored.eval_count, scored


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


client.chat(model, USER, tools=[weather], options=OPTIONS)
done = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]}]
assert client.chat(model, [*done, {"role": "tool", "content": "sunny", "tool_name": "weather"}], options=OPTIONS).done

assert [one.model for one in client.list().models] == [model]
assert [one.model for one in client.ps().models] == [model]
assert "completion" in client.show(model).capabilities
assert client.pull(model).status == "success"


async def one() -> str:
    return (await ollama.AsyncClient(HOST).chat(model, USER, options=OPTIONS)).message.content


assert asyncio.run(one()) == answer.message.content
for refused in ({"model": "other"}, {"model": model, "options": {"mirostat": 2}}):
    try:
        client.chat(messages=USER, **refused)
    except ollama.ResponseError as error:
        assert "other" in error.error or "mirostat" in error.error, error  # noqa: PT017
    else:
        raise AssertionError(f"{refused} was answered")

chain = ChatOllama(model=model, base_url=HOST, temperature=0, num_predict=12)
assert chain.invoke("What is the capital of France?").content == answer.message.content
assert "".join(piece.content for piece in chain.stream("What is the capital of France?")) == answer.message.content
