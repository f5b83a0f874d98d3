"""Anthropic's own client on /v1/messages: whole, streamed, asynchronous, counted."""

import asyncio
import sys

import anthropic

base, model = sys.argv[1:]
ADDRESS = {"base_url": base.removesuffix("/v1"), "api_key": "none"}
ASKED = {
    "model": model,
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}

client = anthropic.Anthropic(**ADDRESS)
answer = client.messages.create(**ASKED)
(block,) = answer.content
assert "Paris" in block.text, answer
assert answer.stop_reason in ("end_turn", "max_tokens")
usage = answer.usage
assert client.messages.count_tokens(model=model, messages=ASKED["messages"]).input_tokens == (
    usage.input_tokens + usage.cache_read_input_tokens
)
with client.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == block.text
    assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens


async def one() -> str:
    async with anthropic.AsyncAnthropic(**ADDRESS) as other:
        return (await other.messages.create(**ASKED)).content[0].text


assert asyncio.run(one()) == block.text
try:
    client.messages.create(**{**ASKED, "max_tokens": 0})
except anthropic.BadRequestError as error:
    assert "max_tokens" in error.message, error  # noqa: PT017
else:
    raise AssertionError("max_tokens 0 was answered")
