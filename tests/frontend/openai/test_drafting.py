"""Drafted tokens on the frontend: what a request may say of them on each path, and what answers tell of them."""

from typing import Any

import httpx
import msgspec
import pytest
from answering import asking, body, chunks, give, streamed, whole
from parsing import RESOLVED, USER
from scripted import STOP, Scripted

from meshlm.protocol.drafting import NAME, Drafting
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.draft_metrics import DraftsTold

DRAFTING = msgspec.structs.replace(RESOLVED, num_speculative_tokens=3)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [USER]},
    "/inference/v1/generate": {"token_ids": [1]},
}
STEPS = bytes((3, 0, 3, 3, 2, 0, 3, 1, 3, 0))
SUMMARY = {
    "mean_acceptance_length": 1.8,
    "draft_acceptance_rate": pytest.approx(4 / 14),
    "acceptance_histogram": [3, 1, 0, 1],
    "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "3": [2, 1, 0, 1]},
    "num_spec_steps": 5,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 14,
    "num_spec_tokens": 3,
}


async def post(backend: Scripted, path: str, wanted: Any) -> httpx.Response:
    asked = {**PATHS[path], **({} if wanted is None else {NAME: wanted})}
    if path.startswith("/inference"):
        asked = {**PATHS[path], "sampling_params": {} if wanted is None else {NAME: wanted}}
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json=asked)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wanted", "extras"), [(None, ()), (3, ()), (2, (Drafting(2),)), (0, (Drafting(0),)), ("1", (Drafting(1),))]
)
async def test_a_request_says_how_many_drafts_it_has(path: str, wanted: Any, extras: tuple[Drafting, ...]) -> None:
    backend = Scripted(resolved=DRAFTING)
    answer = await post(backend, path, wanted)
    assert answer.status_code == 200, answer.text
    assert [submit.extras for submit in backend.submits] == [extras]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wanted", [4, -1, 1.5, "many", True])
async def test_more_than_the_server_drafts_is_refused(path: str, wanted: Any) -> None:
    answer = await post(Scripted(resolved=DRAFTING), path, wanted)
    assert (answer.status_code, answer.text.count(NAME) > 0) == (400, True), answer.text
    assert wanted != 4 or f"{NAME}: at most 3, which the server drafts" in answer.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_server_without_drafts_takes_none_alone(path: str) -> None:
    backend = Scripted()
    answer = await post(backend, path, 1)
    assert answer.status_code == 400
    assert f"{NAME}: the server drafts no tokens (--speculative-config)" in answer.text
    assert (await post(backend, path, 0)).status_code == 200
    assert [submit.extras for submit in backend.submits] == [()]


# --- answers ---


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("by_step", [False, True])
def test_an_answer_tells_of_its_drafts(is_chat: bool, by_step: bool) -> None:
    answer, _ = whole(asking(is_chat))
    answer.drafts_told = DraftsTold(3, by_step)
    give(answer, 0, [7] * 9, "Hi", Finished(0, FinishReason.LENGTH, drafts=STEPS))
    metrics = body(answer)["metrics"]
    steps = {"per_step_accepted": [0, 3, 0, 1, 0], "per_step_drafted": [3, 3, 2, 3, 3]}
    assert metrics.pop("speculative_decoding") == SUMMARY | (steps if by_step else {})
    assert set(metrics.values()) == {None}, "times were not asked for"
    answer.tells_times = True
    assert {"time_to_first_token_ms", "speculative_decoding"} < set(body(answer)["metrics"])


def test_several_choices_tell_nothing() -> None:
    answer, _ = whole(asking(False, num_choices=2, num_returned=2))
    answer.drafts_told = DraftsTold(3, by_step=False)
    for index in (0, 1):
        give(answer, index, [7], "H", Finished(0, FinishReason.STOP, drafts=STEPS))
    assert body(answer)["metrics"] is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_tells_it_with_its_usage(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, include_usage=True))
    answer.drafts_told = DraftsTold(3, by_step=False)
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], "", Finished(0, FinishReason.LENGTH, drafts=STEPS))
    assert not any("metrics" in chunk for chunk in chunks(events, is_chat))
    last, _ = answer.last_events().split(b"\n\n")[:-1]
    (chunk,) = chunks([last + b"\n\n"], is_chat)
    assert chunk["metrics"]["speculative_decoding"] == SUMMARY


def test_a_request_without_drafts_has_zeros() -> None:
    answer, _ = whole(asking(False))
    answer.drafts_told = DraftsTold(2, by_step=True)
    give(answer, 0, [7], "H", STOP)
    assert body(answer)["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0, 0, 0],
        "acceptance_histogram_by_draft_length": {},
        **dict.fromkeys(("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"), 0),
        "num_spec_tokens": 2,
        "per_step_accepted": [],
        "per_step_drafted": [],
    }
