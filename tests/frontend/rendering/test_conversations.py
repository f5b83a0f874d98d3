"""Several conversations in a request, and invocations: against a frontend without a mesh."""

from typing import Any

import pytest
from scripted import NUM_PROMPT, Scripted, post

USER = {"role": "user", "content": "hi"}


async def test_several_conversations_have_a_choice_each() -> None:
    server = Scripted()
    body = {"messages": [[USER], [{"role": "user", "content": "ho"}]], "max_tokens": 5, "return_token_ids": True}
    found = await post(server, "/v1/chat/completions/batch", body)
    assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [
        (0, "Hello you"),
        (1, "Hello you"),
    ]
    assert found["usage"]["prompt_tokens"] == 2 * NUM_PROMPT
    assert found["prompt_token_ids"] is None
    prompts = [getattr(submit.prompt, "messages_json", b"") for submit in server.submits]
    assert [b'"hi"' in prompts[0], b'"ho"' in prompts[1]] == [True, True]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [USER]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[USER], []]}, "messages"),
        ({"messages": [[USER], [{"role": "user"}]]}, "messages"),
        ({"messages": [[USER]], "n": 2}, "n"),
        ({"messages": [[USER]], "stream": True}, "stream"),
        ({"messages": [[USER]], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [[USER]], "tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_what_a_batch_of_conversations_cannot_have(fields: dict[str, Any], name: str) -> None:
    assert (await post(Scripted(), "/v1/chat/completions/batch", fields, 400))["error"]["param"] == name


async def test_invocations_are_what_their_fields_say() -> None:
    server = Scripted()
    chat = await post(server, "/invocations", {"messages": [USER]})
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "Hello you")
    text = await post(server, "/invocations", {"prompt": "a"})
    assert text["object"] == "text_completion"
    assert "messages (/v1/chat/completions)" in (await post(server, "/invocations", {"x": 1}, 400))["error"]["message"]
    assert (await post(server, "/invocations", {"prompt": "a", "n": 0}, 400))["error"]["param"] == "n"
