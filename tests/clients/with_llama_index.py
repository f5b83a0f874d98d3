"""llama-index's OpenAILike: chat, stream_chat, complete, and asynchronously."""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base, model = sys.argv[1:]
llm = OpenAILike(model=model, api_base=base, api_key="none", is_chat_model=True, temperature=0, max_tokens=12)
QUESTION = [ChatMessage(role="user", content="What is the capital of France?")]

answer = llm.chat(QUESTION)
assert "Paris" in answer.message.content, answer
assert [part.message.content for part in llm.stream_chat(QUESTION)][-1] == answer.message.content
assert asyncio.run(llm.achat(QUESTION)).message.content == answer.message.content
plain = OpenAILike(model=model, api_base=base, api_key="none", is_chat_model=False, temperature=0, max_tokens=6)
assert "Paris" in plain.complete("The capital of France is").text
