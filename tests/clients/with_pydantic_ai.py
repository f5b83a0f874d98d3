"""pydantic-ai: an agent's answer, whole and streamed, and an answer that has a type."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base, model = sys.argv[1:]
served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base, api_key="none"))
SETTINGS = {"temperature": 0, "max_tokens": 40}
QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: str
    inhabitants: int


agent = Agent(served, model_settings=SETTINGS)
answer = agent.run_sync(QUESTION)
assert "Paris" in answer.output, answer
assert answer.usage.output_tokens > 0


async def streamed() -> str:
    async with agent.run_stream(QUESTION) as run:
        return "".join([piece async for piece in run.stream_text(delta=True)])


assert asyncio.run(streamed()) == answer.output
typed = Agent(served, output_type=NativeOutput(City), model_settings=SETTINGS).run_sync(QUESTION)
assert isinstance(typed.output, City)
by_tool = Agent(served, output_type=City, model_settings=SETTINGS).run_sync(QUESTION)
assert isinstance(by_tool.output, City)
