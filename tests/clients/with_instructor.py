"""instructor: answers that are objects, in the modes that OpenAI-like servers are asked in."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

base, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "Paris is the capital of France. Which city is the capital of France?"}]


class City(BaseModel):
    name: str
    country: str


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=base, api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model=model, response_model=City, messages=QUESTION, temperature=0, max_tokens=60, max_retries=0
    )
    assert isinstance(found, City), (mode, found)
