"""A request with use_beam_search, against a mesh that is a table of likelihoods: its steps, its rows, its errors."""

import asyncio
import json
from array import array
from typing import Any

import pytest
from parsing import EOS, RESOLVED, ask

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests import pacing
from meshlm.frontend.requests.beams import Search
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import (
    Accepted,
    Detokenize,
    DetokenizeReply,
    Finished,
    PositionLogprobs,
    Submit,
    TokenLogprob,
    TokenPrompt,
)
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle
from meshlm.runtime.client.placement import Choice, RowDetails

PROMPT_IDS = (7, 8)
# What follows which token: the likeliest first.
FOLLOWS = {8: [(11, -0.5), (12, -1.0), (EOS[0], -3.0)], 11: [(13, -2.0), (14, -2.5)], 12: [(EOS[0], -0.1), (15, -0.2)]}


class Mesh:
    """The part of the backend that a search uses. Each step is answered at once."""

    resolved = RESOLVED

    config = MeshConfig(resolved=RESOLVED)

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.open_now = self.most_open = self._handle = 0
        self.fails_at = -1
        self.requests = self

    def new_handle(self) -> Handle:
        self._handle += 1
        return Handle(self._handle)

    def open(self, choices: list[Choice], submit: Submit) -> None:
        self.open_now += len(choices)
        self.most_open = max(self.most_open, self.open_now)
        (choice,) = choices
        ids = ints(submit.prompt.token_ids) if isinstance(submit.prompt, TokenPrompt) else list(PROMPT_IDS)
        self.steps.append(ids)
        if len(self.steps) == self.fails_at:
            choice.sink.failed(choice, ErrorKind.OVERLOADED, "full", "")
            return
        assert (submit.max_tokens, submit.sampling.temperature, submit.text.stop) == (1, 0.0, ())
        asked = submit.sampling.logprobs
        follow = FOLLOWS.get(ids[-1], [(20, -1.0), (21, -9.0)])[:asked]
        top = tuple(
            TokenLogprob(token, logprob, nth + 1, f"<{token}>", b"") for nth, (token, logprob) in enumerate(follow)
        )
        choice.sink.accepted(choice, Accepted((choice.handle,), len(ids), pack_i32(ids) if submit.want_ids else b""))
        choice.token_ids = array("i", [top[0].token_id])
        details = RowDetails(Finished(0, FinishReason.LENGTH), [PositionLogprobs(top[0], 1, top)])
        asyncio.get_running_loop().call_soon(choice.sink.row, choice, 1, "x", details)

    def close(self, choices: list[Choice]) -> None:
        self.open_now -= len(choices)

    async def ask(self, message: Detokenize) -> DetokenizeReply:
        ids = ints(message.token_ids)
        assert message.output is not None
        return DetokenizeReply(message.handle, "".join(f"<{token}>" for token in ids), pack_i32([4] * len(ids)))


async def found(mesh: Mesh, asked: ParsedRequest) -> dict[str, Any]:
    answer = WholeResponse(AnswerHead(asked, "cmpl-x", 0, "m", lambda: None))
    list(build_each(answer, asked, mesh.new_handle, -1))
    await Search(mesh, asked, "cmpl-x", -1).fill(answer)
    assert mesh.open_now == 0
    whole: dict[str, Any] = json.loads(answer.body())
    return whole


async def test_the_best_beams_are_the_choices() -> None:
    mesh = Mesh()
    asked = ask("text", use_beam_search=True, n=2, max_tokens=2, logprobs=1, return_token_ids=True)
    whole = await found(mesh, asked)
    assert mesh.steps == [[7, 8], [7, 8, 11], [7, 8, 12]]
    # 12 and its end: -1.1 over 3 tokens; 12 15: -1.2 over 4; 11 13: -2.5 over 4.
    assert [(one["text"], one["finish_reason"], one["stop_reason"]) for one in whole["choices"]] == [
        ("<12><15>", "length", None),
        ("<12>", "stop", EOS[0]),
    ]
    assert [one["token_ids"] for one in whole["choices"]] == [[12, 15], [12]]
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -0.2]
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 4]
    assert whole["choices"][0]["logprobs"]["top_logprobs"][0] == {"<11>": -0.5, "<12>": -1.0}
    assert whole["choices"][0]["prompt_token_ids"] == [7, 8]
    assert whole["usage"]["completion_tokens"] == 3


async def test_thousands_of_beams_are_not_in_the_mesh_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MOST_WAITING", 6)
    mesh = Mesh()
    whole = await found(mesh, ask("text", prompt=["a"] * 20, use_beam_search=True, n=2, max_tokens=2))
    assert [one["text"] for one in whole["choices"]] == ["<12><15>", "<12>"] * 20
    assert 3 <= mesh.most_open <= 6, "three prompts of two beams"
    wide = Mesh()
    monkeypatch.setattr(pacing, "MOST_WAITING", 1)
    assert (
        len((await found(wide, ask("text", prompt=["a"] * 2, use_beam_search=True, n=2, max_tokens=2)))["choices"]) == 4
    )


async def test_ends_are_tokens_like_others_where_they_are_ignored() -> None:
    whole = await found(Mesh(), ask("text", use_beam_search=True, n=2, max_tokens=2, ignore_eos=True))
    assert [one["text"] for one in whole["choices"]] == [f"<12><{EOS[0]}>", "<12><15>"]


async def test_length_penalty() -> None:
    whole = await found(Mesh(), ask("text", use_beam_search=True, n=2, max_tokens=2, length_penalty=-1))
    assert [one["text"] for one in whole["choices"]] == ["<12>", "<12><15>"]


async def test_an_error_of_one_step_ends_the_search() -> None:
    mesh = Mesh()
    mesh.fails_at = 3
    with pytest.raises(HttpError, match="full") as caught:
        await found(mesh, ask("text", use_beam_search=True, n=2, max_tokens=9))
    assert (caught.value.status, mesh.open_now) == (503, 0)


async def test_more_tokens_than_the_context_holds() -> None:
    most = RESOLVED.max_model_len - len(PROMPT_IDS)
    with pytest.raises(HttpError, match=f"max_tokens may be {most} at most"):
        await found(Mesh(), ask("text", use_beam_search=True, max_tokens=most + 1))


async def test_a_time_limit() -> None:
    class Silent(Mesh):
        def open(self, choices: list[Choice], submit: Submit) -> None:
            self.open_now += len(choices)

    with pytest.raises(HttpError, match="timeout") as caught:
        await found(Silent(), ask("text", use_beam_search=True, timeout=0.01))
    assert caught.value.status == 504


@pytest.mark.parametrize(
    ("endpoint", "fields", "name"),
    [
        ("text", {"stop": ["x"]}, "stop"),
        ("text", {"bad_words": ["x"]}, "bad_words"),
        ("text", {"presence_penalty": 0.5}, "presence_penalty"),
        ("text", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("text", {"min_tokens": 2}, "min_tokens"),
        ("text", {"best_of": 3}, "best_of"),
        ("text", {"echo": True, "logprobs": 1}, "echo"),
        ("text", {"echo": True, "max_tokens": 0}, "max_tokens"),
        ("chat", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("chat", {"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
    ],
)
def test_what_a_search_would_not_heed_is_refused(endpoint: str, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(HttpError) as caught:
        ask(endpoint, use_beam_search=True, **fields)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_settings_of_draws_are_taken() -> None:
    assert ask("chat", use_beam_search=True, temperature=0.3, top_p=0.5, top_k=4, seed=1).mesh.beams
