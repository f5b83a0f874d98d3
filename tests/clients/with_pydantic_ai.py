"""pydantic-ai: an agent's answer, whole and streamed."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base, model = sys.argv[1:]
served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base, api_key="none"))
SETTINGS = {"temperature": 0, "max_tokens": 40}
QUESTION = "What is the capital of France?"


agent = Agent(served, model_settings=SETTINGS)
answer = agent.run_sync(QUESTION)
assert "Paris" in answer.output, answer
assert answer.usage.output_tokens > 0


async def streamed() -> str:
    async with agent.run_stream(QUESTION) as run:
        return "".join([piece async for piece in run.stream_text(delta=True)])


assert asyncio.run(streamed()) == answer.output
