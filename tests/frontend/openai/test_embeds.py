"""`prompt_embeds` of a completion: what becomes of saved tensors, and what does not go with them."""

import base64
import io
from typing import Any

import msgspec
import pytest
import torch
from parsing import RESOLVED, SERVER, asked, body_of

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.text import ChatPrompt, MediaPrompt, TextPrompt, TokenPrompt
from meshlm.protocol.prompt_embeds import PromptEmbeds, mark

HIDDEN = RESOLVED.spec.hidden_size
TAKES = msgspec.structs.replace(SERVER, enable_prompt_embeds=True)


def saved(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


ROWS = torch.randn(6, HIDDEN)


def ask(server: ServerConfig = TAKES, resolved: Resolved = RESOLVED, **fields: Any) -> ParsedRequest:
    return asked("text", body_of("text", {"prompt": None, "prompt_embeds": saved(ROWS), **fields}), resolved, server)


def rows(prompt: object) -> torch.Tensor:
    """The vectors of a prompt that has nothing else, or of a part of a chat."""
    if isinstance(prompt, MediaPrompt):
        assert isinstance(prompt.prompt, TokenPrompt)
        (vectors,) = prompt.media
        assert isinstance(vectors, PromptEmbeds)
        assert prompt.prompt.token_ids == vectors.token_ids
        return rows(vectors)
    assert isinstance(prompt, PromptEmbeds)
    assert len(prompt.token_ids) // 4 == prompt.spans[0][1]
    return torch.frombuffer(bytearray(prompt.data), dtype=torch.float32).view(-1, HIDDEN)


def test_vectors_are_prompts_before_the_texts() -> None:
    (alone,) = ask().mesh.prompts
    assert torch.equal(rows(alone), ROWS)
    assert ask(prompt="").mesh.prompts == ask(prompt=[]).mesh.prompts == [alone]
    found = ask(prompt=["a", "b"], prompt_embeds=[saved(ROWS), saved(ROWS[:2].clone())]).mesh.prompts
    assert torch.equal(rows(found[1]), ROWS[:2])
    assert found[2:] == [TextPrompt("a"), TextPrompt("b")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 2}, ROWS[4:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, ROWS[:2]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9}, ROWS),
        ({"truncate_prompt_tokens": -1}, ROWS),
    ],
)
def test_a_cut_prompt_has_as_many_ids_as_vectors(fields: dict[str, Any], expected: torch.Tensor) -> None:
    found = ask(**fields)
    assert torch.equal(rows(found.mesh.prompts[0]), expected)
    keep = found.mesh.text.truncate_prompt_tokens
    assert len(expected) <= keep, "the mesh cuts no more"


def test_a_default_that_leaves_no_room_cuts_vectors_and_ids_alike() -> None:
    """Without max_tokens an answer has 16, and -1 keeps what these leave."""
    short = msgspec.structs.replace(RESOLVED, max_model_len=20)
    (prompt,) = ask(resolved=short, truncate_prompt_tokens=-1).mesh.prompts
    assert torch.equal(rows(prompt), ROWS[2:])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_embeds": "no base64"}, "prompt_embeds"),
        ({"prompt_embeds": saved(torch.zeros(2, HIDDEN + 1))}, "prompt_embeds"),
        ({"prompt_embeds": [saved(ROWS), 5]}, "prompt_embeds"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "b"}, "suffix"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_does_not_go_with_them_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as raised:
        ask(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_finite_number_is_refused(dtype: torch.dtype, spoilt: float) -> None:
    """All that a model computes of it is no number either. The largest number of the type is one."""
    rows = torch.randn(3, HIDDEN).to(dtype)
    rows[2, 0] = torch.finfo(dtype).max
    rows[1, 0] = torch.finfo(dtype).tiny / 4
    assert len(ask(prompt_embeds=saved(rows)).mesh.prompts) == 1
    rows[2, 1] = spoilt
    with pytest.raises(HttpError, match="number 1 of its vector 2 is not finite") as refused:
        ask(prompt_embeds=saved(rows))
    assert (refused.value.status, refused.value.param) == (400, "prompt_embeds")
    with pytest.raises(HttpError, match="not finite"):
        chat(part(rows))


def test_a_server_takes_none_unless_it_is_told_to() -> None:
    with pytest.raises(HttpError, match="--enable-prompt-embeds") as raised:
        ask(SERVER)
    assert raised.value.param == "prompt_embeds"
    assert ask(SERVER, prompt="hi", prompt_embeds=None).mesh.prompts == [TextPrompt("hi")]


def test_longer_than_the_context_and_too_many_copies() -> None:
    with pytest.raises(HttpError) as raised:
        ask(resolved=msgspec.structs.replace(RESOLVED, max_model_len=5))
    assert "context" in raised.value.message
    large = saved(torch.zeros(1 << 12, HIDDEN))
    wide = msgspec.structs.replace(RESOLVED, max_model_len=1 << 13)
    fits = (64 << 20) // (4 * HIDDEN << 12)
    assert ask(resolved=wide, prompt_embeds=large, n=min(fits, 128)).mesh.num_choices
    if fits < 128:
        with pytest.raises(HttpError) as raised:
            ask(resolved=wide, prompt_embeds=large, n=fits + 1)
        assert raised.value.param == "prompt_embeds"


def chat(*parts: Any, server: ServerConfig = TAKES, **fields: Any) -> ParsedRequest:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]
    return asked("chat", body_of("chat", {"messages": messages, **fields}), RESOLVED, server)


def part(tensor: torch.Tensor) -> dict[str, str]:
    return {"type": "prompt_embeds", "data": saved(tensor)}


def test_parts_of_a_chat_may_be_vectors() -> None:
    (prompt,) = chat("Say", part(ROWS), {"type": "text", "text": "and"}, part(ROWS[:2].clone())).mesh.prompts
    assert isinstance(prompt, MediaPrompt)
    assert isinstance(prompt.prompt, ChatPrompt)
    content = msgspec.json.decode(prompt.prompt.messages_json)[1]["content"]
    first, second = ({"type": "text", "text": mark(place)} for place in (0, 1))
    assert content == ["Say", first, {"type": "text", "text": "and"}, second]
    assert torch.equal(rows(prompt.media[0]), ROWS)
    assert torch.equal(rows(prompt.media[1]), ROWS[:2])


@pytest.mark.parametrize(
    ("parts", "fields", "param"),
    [
        ([{"type": "prompt_embeds"}], {}, "messages"),
        ([{"type": "prompt_embeds", "data": "no base64"}], {}, "messages"),
        ([part(torch.zeros(2, HIDDEN + 1))], {}, "messages"),
        ([part(ROWS), part(ROWS.half())], {}, "messages"),
        ([part(ROWS)], {"echo": True}, "echo"),
        ([part(ROWS)], {"prompt_logprobs": 1}, "prompt_logprobs"),
        ([part(ROWS)], {"return_prompt_text": True}, "return_prompt_text"),
        ([part(ROWS)], {"use_beam_search": True}, "use_beam_search"),
        ([part(ROWS)], {"repetition_penalty": 1.1}, "repetition_penalty"),
        ([part(torch.zeros((1 << 21) // HIDDEN, HIDDEN))], {"n": 9}, "prompt_embeds"),
        ([part(ROWS)], {"server": SERVER}, "prompt_embeds"),
    ],
)
def test_parts_that_are_no_vectors_are_named(parts: list[Any], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat(*parts, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
