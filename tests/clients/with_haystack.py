"""Haystack's OpenAIChatGenerator and OpenAIGenerator, whole and streamed, in a pipeline."""

import sys

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

base, model = sys.argv[1:]
KEY = Secret.from_token("none")
SETTINGS = {"temperature": 0, "max_tokens": 12}

pieces: list[str] = []
generator = OpenAIChatGenerator(KEY, model, api_base_url=base, generation_kwargs=SETTINGS)
answer = generator.run([ChatMessage.from_user("What is the capital of France?")])["replies"][0]
assert "Paris" in answer.text, answer
assert answer.meta["usage"]["completion_tokens"] > 0
streaming = OpenAIChatGenerator(
    KEY,
    model,
    api_base_url=base,
    generation_kwargs=SETTINGS,
    streaming_callback=lambda chunk: pieces.append(chunk.content),
)
assert streaming.run([ChatMessage.from_user("What is the capital of France?")])["replies"][0].text == answer.text
assert "".join(pieces) == answer.text

pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is the capital of {{country}}?")]))
pipeline.add_component("llm", OpenAIChatGenerator(KEY, model, api_base_url=base, generation_kwargs=SETTINGS))
pipeline.connect("prompt.prompt", "llm.messages")
assert pipeline.run({"prompt": {"country": "France"}})["llm"]["replies"][0].text == answer.text
