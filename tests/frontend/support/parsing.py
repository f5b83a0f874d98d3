"""A model, the least bodies that it takes, and what becomes of a body: shared by the tests of parse.py."""

import json
from functools import partial

import pytest
from tiny_models import resolved_of, spec_of

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.protocol.config import Resolved, ServerConfig

VOCAB, MAX_LOGPROBS, EOS = 1000, 20, (2,)
SPEC = spec_of(vocab_size=VOCAB)
RESOLVED = resolved_of(SPEC, device="fake", eos_token_ids=EOS)
SERVER = ServerConfig(max_logprobs=MAX_LOGPROBS, trust_request_chat_template=True)
USER = {"role": "user", "content": "hi"}
LEAST: dict[str, dict[str, object]] = {"text": {"prompt": "hi"}, "chat": {"messages": [USER]}}
ENDPOINTS = ("text", "chat")


def asked(endpoint: str, body: bytes, resolved: Resolved = RESOLVED, server: ServerConfig = SERVER) -> ParsedRequest:
    """What the endpoint's route does with a body."""
    check = partial(limits.check_raw, resolved=resolved)
    if endpoint == "text":
        completion, unknown = bodies.decode(body, CompletionRequest, check)
        return parse.completion(completion, unknown, resolved, server)
    check = partial(check, vectors=server.enable_prompt_embeds)
    chat, unknown = bodies.decode(body, ChatRequest, check)
    return parse.chat(chat, unknown, resolved, server)


def body_of(endpoint: str, fields: dict[str, object]) -> bytes:
    """The least body of the endpoint, and these fields."""
    return json.dumps({**LEAST[endpoint], **fields}).encode()


def ask(endpoint: str, **fields: object) -> ParsedRequest:
    return asked(endpoint, body_of(endpoint, fields))


def refused(endpoint: str, fields: dict[str, object]) -> tuple[HttpError, dict[str, object]]:
    """The error, and the object that the client reads."""
    with pytest.raises(HttpError) as caught:
        ask(endpoint, **fields)
    (name, error), *rest = json.loads(caught.value.body()).items()
    assert (name, rest) == ("error", [])
    return caught.value, error
