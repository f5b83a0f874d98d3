"""litellm: whole, streamed and asynchronous chats, a text completion, and an error."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network
import litellm

base, model = sys.argv[1:]
litellm.telemetry = False
KNOWN = {"api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 12}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NAME = f"hosted_vllm/{model}"

answer = litellm.completion(NAME, QUESTION, **KNOWN)
text = answer.choices[0].message.content
assert "Paris" in text, text
assert answer.usage.completion_tokens == answer.usage.total_tokens - answer.usage.prompt_tokens > 0

chunks = list(litellm.completion(NAME, QUESTION, stream=True, stream_options={"include_usage": True}, **KNOWN))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


async def several() -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(NAME, QUESTION, **KNOWN) for _ in range(4)))
    return [one.choices[0].message.content for one in answers]


assert asyncio.run(several()) == [text] * 4

completed = litellm.text_completion(prompt="The capital of France is", model=f"text-completion-openai/{model}", **KNOWN)
assert "Paris" in completed.choices[0].text, completed

try:
    litellm.completion(NAME, QUESTION, api_base=base, api_key="none", max_tokens=1_000_000)
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error), error  # noqa: PT017
else:
    raise AssertionError("a request beyond the context was answered")
