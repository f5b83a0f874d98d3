"""How the tests of text ask the mesh with SmolLM2, by OpenAI's client and without."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

MODEL = "SmolLM2-135M-Instruct"
TALE = "Once upon a time"
EOS = 2
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
FRANCE = {"role": "user", "content": "What is the capital of France?"}
T = TypeVar("T")


def together(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def ask(client: openai.OpenAI, prompt: Any = TALE, *, extra: dict[str, Any] | None = None, **fields: Any) -> Completion:
    """POST /v1/completions; `extra` are the fields that OpenAI has not."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
    answer: Completion = client.completions.create(**asked, extra_body=extra)
    return answer


def stream(
    client: openai.OpenAI, prompt: Any = TALE, *, extra: dict[str, Any] | None = None, **fields: Any
) -> list[Completion]:
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
    return list(client.completions.create(**asked, extra_body=extra, stream=True))


def chat(
    client: openai.OpenAI, *messages: dict[str, str], extra: dict[str, Any] | None = None, **fields: Any
) -> ChatCompletion:
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
    answer: ChatCompletion = client.chat.completions.create(**asked, extra_body=extra)
    return answer


def post(client: openai.OpenAI, path: str, **body: Any) -> dict[str, Any]:
    """A route beside OpenAI's, by the same client."""
    base = str(client.base_url).removesuffix("v1/")
    answer: dict[str, Any] = client.post(f"{base}{path}", body=body, cast_to=dict[str, Any])
    return answer


def joined(chunks: list[Completion]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def extra_of(thing: Any, name: str) -> Any:
    """A field that OpenAI's types do not have."""
    assert thing.model_extra is not None
    return thing.model_extra[name]


class Greedy(NamedTuple):
    """The tale as it goes without any stop."""

    text: str
    pieces: list[str]  # the tokens' texts
    ids: list[int]
