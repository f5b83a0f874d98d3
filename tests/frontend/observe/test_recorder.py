"""Recordings: no field that decides a sequence's tokens is lost in silence, and files stay within their bytes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import answering
import msgspec
import pytest
from parse_cases import TAKEN
from parsing import RESOLVED, SERVER, USER, ask, asked, body_of

from meshlm.frontend.http import bodies
from meshlm.frontend.observe import recorder
from meshlm.frontend.observe.recorder import ASIDE, Recorder, lost_fields, sequences
from meshlm.frontend.openai import parse, render
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.openai.schema import CompletionRequest
from meshlm.frontend.requests import submits
from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.protocol.edges.text import Accepted, Finished, Retry, TextParams
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.recording import RecordedSequence
from meshlm.protocol.sampling import RepetitionDetection, SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Role

IDS = [5, 6, 7]
# A value of each field of SamplingParams that is not its default.
SAMPLING: dict[str, Any] = {
    "min_tokens": 3, "temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.06, "presence_penalty": 0.7,
    "frequency_penalty": -0.8, "repetition_penalty": 1.9, "stop_token_ids": (2, 9), "eos_token_ids": (),
    "logit_bias": {5: -1.5, 7: 100.0}, "allowed_token_ids": (3, 4, 5), "begin_suppress_token_ids": (4,), "logprobs": 2,
    "prompt_logprobs": 1, "logprob_token_ids": (8, 9), "repetition_detection": RepetitionDetection(4, 2, 3),
    "extra_args": {"a": [1, "b"]}, "typical_p": 0.9, "top_n_sigma": 1.5, "xtc_probability": 0.2, "xtc_threshold": 0.3,
    "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ("a",),
}  # fmt: skip
OF_MESH = {
    "seed",
    "max_tokens",
    "bad_words_token_ids",
}  # drawn, the request's, and made by the detokenizer of bad_words
TEXT: dict[str, Any] = {
    "stop": ("x", "y"), "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "bad_words": ("no",), "keep_special_tokens": ("<a>",), "truncate_prompt_tokens": 2, "truncation_side": "right",
}  # fmt: skip
PROCESSES = msgspec.structs.replace(RESOLVED, logits_processors=("a:B",))


def again(parsed_request: ParsedRequest) -> tuple[ParsedRequest, list[str]]:
    """The request that a replay asks for, and the fields that it is said to lose."""
    body = render.completion_alone(parsed_request, IDS, "tiny", RESOLVED.max_model_len)
    line = msgspec.json.decode(msgspec.json.encode(body))
    completion, unknown = bodies.converted(line, CompletionRequest)
    assert not unknown
    return parse.completion(completion, (), PROCESSES, SERVER), lost_fields(parsed_request, line, (), PROCESSES, SERVER)


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_no_sampling_parameter_is_lost(name: str) -> None:
    if name in OF_MESH:
        assert name in ASIDE
        return
    changes = {name: SAMPLING[name]} | ({"logprobs": 2} if name == "logprob_token_ids" else {})
    before = ask("text")
    told = {"logprobs": changes.get("logprobs", -1), "prompt_logprobs": changes.get("prompt_logprobs", -1)}
    sampling = msgspec.structs.replace(before.mesh.sampling, **changes)
    assert sampling != before.mesh.sampling
    after, lost = again(before.with_mesh(sampling=sampling).with_answer(**told))
    if name == "begin_suppress_token_ids":
        assert lost == [name]
    else:
        assert getattr(after.mesh.sampling, name) == SAMPLING[name]
        assert lost == []


@pytest.mark.parametrize("name", TextParams.__struct_fields__)
def test_no_parameter_of_the_text_is_lost(name: str) -> None:
    before = ask("text", stop="x")
    text = msgspec.structs.replace(before.mesh.text, **{name: TEXT[name]})
    after, lost = again(before.with_mesh(text=text))
    if name == "keep_special_tokens":
        assert lost == [name], "a stop string may be looked for in them"
        assert again(before.with_mesh(text=msgspec.structs.replace(text, stop=())))[1] == []
    elif name.startswith("trunca"):
        assert lost == [], "the prompt is cut already"
    else:
        assert (getattr(after.mesh.text, name), lost) == (TEXT[name], [])


@pytest.mark.parametrize("endpoint", ["text", "chat"])
def test_what_is_taken_can_be_replayed_or_is_named(endpoint: str) -> None:
    for where, fields, _, _ in TAKEN:
        if where not in ("both", endpoint):
            continue
        before = ask(endpoint, **fields)
        after, lost = again(before)
        assert lost == (["use_beam_search"] if fields.get("use_beam_search") else []), fields
        aside: dict[str, Any] = {"seed": 0, "max_tokens": 0, "logprobs": 0}
        one, other = (msgspec.structs.replace(each.mesh.sampling, **aside) for each in (before, after))
        assert one == other, fields
        assert len(before.mesh.extras) == len(after.mesh.extras)


def test_constraints_of_chats() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    server = ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=True)
    thinks = msgspec.structs.replace(server, reasoning_parser="deepseek_r1")
    object_ = {"type": "json_object"}

    def lost(server: ServerConfig, **fields: Any) -> list[str]:
        parsed = asked("chat", body_of("chat", {"messages": [USER], **fields}), RESOLVED, server)
        body = render.completion_alone(parsed, IDS, "tiny", RESOLVED.max_model_len)
        return lost_fields(parsed, body, (), RESOLVED, server)

    assert lost(server, tools=[tool], tool_choice="required") == []
    assert lost(server, tools=[tool], tool_choice="auto") == []
    assert lost(thinks, tools=[tool], tool_choice="auto") == []
    assert lost(server, response_format=object_) == []
    assert lost(thinks, response_format=object_) == ["response_format"], "it begins behind the reasoning"
    assert lost(thinks, thinking_token_budget=5) == ["thinking_token_budget"]


def test_media_are_named() -> None:
    embeds = PromptEmbeds("float32", ((0, 1),), b"")
    assert lost_fields(ask("text"), {"prompt": IDS}, (embeds,), RESOLVED, SERVER) == ["prompt_embeds"]


def answer_of(*, retry: bool = False, finished: Finished | None = answering.LENGTH, **fields: Any) -> WholeResponse:
    """Two choices of two prompts each."""
    parsed_request = ask("text", prompt=["a", "b"], n=2, seed=40, **fields).with_answer(is_recorded=True)
    answer = WholeResponse(AnswerHead(parsed_request, "cmpl-1", 17, "tiny", lambda: None))
    answer.fingerprint = "meshlm-1"
    for prompt, (choices, submit) in enumerate(submits.build_each(answer, parsed_request, lambda: Handle(1), -1)):
        assert submit.want_ids
        for choice in choices:
            answer.accepted(choice, Accepted((choice.handle,), 3, pack_i32([*IDS[:2], prompt])))
            choice.token_ids.extend([1, 2, choice.index])
            choice.finished = finished
            if retry:
                choice.submit = msgspec.structs.replace(choice.submit, retry=Retry("ab", b""))
    return answer


def test_each_sequence_has_a_line_with_its_own_seed() -> None:
    found = list(sequences(answer_of(max_tokens=3), "/v1/completions", RESOLVED, SERVER))
    assert [one.body["seed"] for one in found] == [40, 41, 40, 41]
    assert [one.body["prompt"] for one in found] == [[5, 6, 0], [5, 6, 0], [5, 6, 1], [5, 6, 1]]
    assert [one.output_token_ids for one in found] == [[1, 2, number] for number in range(4)]
    assert [one.choice for one in found] == [0, 1, 2, 3]
    assert len({one.custom_id for one in found}) == 4
    first = found[0]
    assert (first.body["n"], first.body["max_tokens"], first.body["model"]) == (1, 3, "tiny")
    assert (first.request_id, first.created, first.system_fingerprint) == ("cmpl-1", 17, "meshlm-1")
    assert (first.finish_reason, first.logprobs, first.not_replayable) == (FinishReason.LENGTH, None, [])


def test_whoever_sees_the_end_of_a_sequence_records_it() -> None:
    def reasons(answer: WholeResponse) -> list[FinishReason]:
        return [one.finish_reason for one in sequences(answer, "/", RESOLVED, SERVER)]

    assert reasons(answer_of(finished=None)) == [FinishReason.ABORT] * 4
    assert reasons(answer_of(finished=None, retry=True)) == []
    assert reasons(answer_of(retry=True)) == [FinishReason.LENGTH] * 4
    empty = answer_of()
    for choice in empty.choices:
        del choice.token_ids[:]
    assert reasons(empty) == []


def test_only_what_has_tokens_is_recorded_and_only_where_it_is_wanted() -> None:
    def is_recorded(server: ServerConfig, asked: ParsedRequest) -> bool:
        return submits.permitted(asked, "", MeshConfig(server=server, resolved=RESOLVED)).answer.is_recorded

    records = ServerConfig(record_requests="/tmp/a")
    assert is_recorded(records, ask("text"))
    assert not is_recorded(ServerConfig(), ask("text"))
    assert not is_recorded(records, ask("text").with_mesh(extras=(Pool(PoolKind.LAST),)))


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, text: str, **fields: Any) -> None:
        self.lines.append((text, fields))


async def written(one: Recorder) -> None:
    """The loop has heard of all that was written."""
    async with asyncio.timeout(60):
        await asyncio.wrap_future(one._pool.submit(int))


async def test_files_stay_within_their_bytes_and_the_newest_stay(tmp_path: Path) -> None:
    log, folder = Log(), tmp_path / "new"
    server = ServerConfig(record_requests=str(folder), record_requests_bytes=1 << 16, port=81)
    one = Recorder(server, RESOLVED, Identity(Role.FRONTEND, 3), log)
    for number in range(100):
        answer = answer_of()
        answer.request_id = f"cmpl-{number}"
        one.ended(answer, "/v1/completions")
    await written(one)
    one.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["81-3.jsonl", "81-3.older.jsonl"]
    assert all(0 < file.stat().st_size <= 1 << 15 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    lines = [line for file in reversed(files) for line in file.read_bytes().splitlines()]
    names = [msgspec.json.decode(line, type=RecordedSequence).request_id for line in lines]
    last = [f"cmpl-{number}" for number in range(100) for _ in range(4)][-len(names) :]
    assert names == last
    assert log.lines == []


async def test_a_request_that_is_not_recorded_costs_nothing(tmp_path: Path) -> None:
    one = Recorder(ServerConfig(record_requests=str(tmp_path)), RESOLVED, Identity(Role.FRONTEND), Log())
    answer = answer_of()
    answer.parsed_request = answer.parsed_request.with_answer(is_recorded=False)
    one.ended(answer, "/")
    assert one._num_waiting == 0
    one.close()
    assert not os.listdir(tmp_path)


async def test_what_cannot_be_written_is_said_once_and_so_is_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = Log(), tmp_path / "new"
    folder.touch()
    one = Recorder(ServerConfig(record_requests=str(folder)), RESOLVED, Identity(Role.FRONTEND), log)
    for _ in range(3):
        one.ended(answer_of(), "/")
    await written(one)
    assert [text for text, _ in log.lines] == ["requests are not recorded"]
    assert str(folder) in log.lines[0][1]["reason"]
    folder.unlink()
    one.ended(answer_of(), "/")
    await written(one)
    assert log.lines[1:] == [("requests are recorded again", {"left_out": 3})]
    long = answer_of()
    long.choices[0].token_ids.extend([7] * (1 << 17))
    one._server = msgspec.structs.replace(one._server, record_requests_bytes=1 << 16)
    one.ended(long, "/")
    await written(one)
    reason = f"--record-requests {folder}: a sequence is longer than half of --record-requests-bytes"
    assert log.lines.pop() == ("requests are not recorded", {"reason": reason})
    one._num_left_out = 0
    monkeypatch.setattr(recorder, "MAX_WAITING", 0)
    one.ended(answer_of(), "/")
    assert log.lines[2] == ("requests are not recorded", {"reason": "0 wait to be written"})
    one.close()
