"""langchain-openai: invoke, stream, batch, log-probabilities, and a chain."""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

base, model = sys.argv[1:]
chat = ChatOpenAI(base_url=base, api_key="none", model=model, temperature=0, max_tokens=12)
QUESTION = "What is the capital of France?"

answer = chat.invoke(QUESTION)
assert "Paris" in answer.content, answer
assert answer.usage_metadata["output_tokens"] > 0
assert answer.response_metadata["finish_reason"] in ("stop", "length")
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer.content
assert [one.content for one in chat.batch([QUESTION, QUESTION])] == [answer.content] * 2

found = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
assert len(found[0]["top_logprobs"]) == 2

chain = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")]) | chat | StrOutputParser()
assert chain.invoke({"country": "France"}) == answer.content

completion = OpenAI(base_url=base, api_key="none", model=model, temperature=0, max_tokens=6)
assert "Paris" in completion.invoke("The capital of France is")
