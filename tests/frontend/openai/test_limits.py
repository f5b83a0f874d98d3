"""What one request may ask for at most: refused by name beyond it, and within it no message is too long for a frame."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from parsing import RESOLVED, VOCAB, ask, refused

from meshlm.detokenizer.admission import MAX_PROMPT_LOGPROBS
from meshlm.detokenizer.batch import ENTRY_BYTES, MAX_BATCH_BYTES
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.edges.admit import AbortRequests, Admit, Assign, EngineRequest, SchedulerIncarnation
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.edges.text import (
    PIECE_ENTRIES,
    Accepted,
    Detokenize,
    PositionLogprobs,
    Submit,
    TextParams,
    TextPrompt,
    Tokenize,
    TokenLogprob,
    TokenPrompt,
)
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.channels import MAX_MESSAGE_BYTES
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role, Row, StepId
from meshlm.scheduler_proc import sizes

IDS = list(range(VOCAB))
BIAS = {str(token): 1.0 for token in IDS}


def test_ids_count_once() -> None:
    """Repetitions of what the vocabulary has were carried to every sequence."""
    for name in ("allowed_token_ids", "stop_token_ids"):
        sampling = ask("text", **{name: IDS * (limits.MAX_LISTED_IDS // VOCAB)}).mesh.sampling
        assert getattr(sampling, name) == tuple(IDS)
        error, shown = refused("text", {name: [7] * 1_300_000})
        assert (error.status, shown["param"]) == (400, name)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_lists_of_ids_count_for_each_sequence(name: str) -> None:
    fields: dict[str, object] = {name: BIAS if name == "logit_bias" else IDS}
    most = limits.MAX_LISTED_IDS // VOCAB
    assert ask("text", **fields, prompt=["x"] * most).mesh.prompts == [TextPrompt("x")] * most
    error, shown = refused("text", {**fields, "prompt": ["x"] * (most // 2 + 1), "n": 2})
    assert (error.status, shown["param"]) == (400, name)
    assert f"at most {limits.MAX_LISTED_IDS}" in str(shown["message"])


def test_the_lists_count_together() -> None:
    fields = {"prompt": ["x"] * 200, "stop_token_ids": IDS}
    ask("text", **fields)
    assert refused("text", {**fields, "logit_bias": BIAS})[1]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    ("name", "value"), [("stop", ["é" * 2048] * 4), ("cache_salt", "s" * (1 << 14))], ids=["stop", "cache_salt"]
)
def test_texts_that_every_sequence_carries(name: str, value: object) -> None:
    ask("text", prompt=["x"] * 256, **{name: value})
    error, shown = refused("text", {"prompt": ["x"] * 257, name: value})
    assert (error.status, shown["param"]) == (400, name)
    assert f"at most {limits.MAX_COPIED_BYTES}" in str(shown["message"])


def test_a_prompt_that_no_context_holds_is_refused_before_it_travels() -> None:
    too_many = [5] * (RESOLVED.max_model_len + 1)
    error, shown = refused("text", {"prompt": [[5], too_many]})
    assert (error.status, shown["param"]) == (400, "prompt")
    assert "maximum context length" in str(shown["message"])
    assert ask("text", prompt=too_many, truncate_prompt_tokens=3).mesh.prompts == [TokenPrompt(pack_i32(too_many))]


def test_a_prompts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MIN_PROMPT_BYTES", 100)
    monkeypatch.setattr(limits, "BYTES_PER_TOKEN", 0)
    assert ask("text", prompt="ü" * 50).mesh.prompts == [TextPrompt("ü" * 50)]
    assert refused("text", {"prompt": "ü" * 51})[1]["param"] == "prompt"
    ask("chat")
    tools: dict[str, object] = {"messages": [{"role": "user", "content": "x" * 101}]}
    assert refused("chat", tools)[1]["param"] == "messages"


def test_detokenize() -> None:
    limits.check_detokenize(limits.MAX_DETOKENIZE_IDS, RESOLVED)
    with pytest.raises(HttpError, match=f"^tokens: 869000 ids; at most {limits.MAX_DETOKENIZE_IDS} in one request$"):
        limits.check_detokenize(869_000, RESOLVED)


# --- what becomes of it in messages ---

encode = msgspec.msgpack.Encoder().encode
WIDE_IDS = range(1 << 20, (1 << 20) + limits.MAX_LISTED_IDS)  # five bytes each
FULL_LISTS = SamplingParams(
    max_tokens=1 << 30, seed=(1 << 63) - 1, logit_bias=dict.fromkeys(WIDE_IDS, 0.1), eos_token_ids=tuple(range(64))
)
CONTEXT = 1 << 20  # tokens; four times as many would still do


def test_the_largest_requests_fit_into_their_messages() -> None:
    """Each by itself at every limit at once, on its whole road."""
    copied = "x" * limits.MAX_COPIED_BYTES
    names = tuple(RequestId(f"cmpl-{'x' * 128}-{number}") for number in range(128))
    handles = tuple(Handle(0x7FFF_FFFF - number) for number in range(128))
    submit = Submit(
        handles=handles,
        request_ids=names,
        prompt=TextPrompt("x" * max(limits.MIN_PROMPT_BYTES, limits.BYTES_PER_TOKEN * CONTEXT)),
        sampling=FULL_LISTS,
        text=TextParams(stop=(copied,)),
        delivered=bytes(4 * CONTEXT),
    )
    work = EngineRequest(
        names[0], handles[0], bytes(4 * CONTEXT), FULL_LISTS, output_token_ids=bytes(4 * CONTEXT), cache_salt=copied
    )
    row = NewRow(Row(0), bytes(8 * CONTEXT), CONTEXT, bytes(CONTEXT), FULL_LISTS)
    most_rows = StepPlan(
        1 << 40, StepId(1 << 40), rows=b"", starts=b"", counts=b"", samples=b"", num_tokens=0, new_rows=[row] * 2
    )  # sizes.MAX_START_BYTES, and one more
    life = Incarnation(1 << 62)
    most: list[Struct] = [
        submit,
        Detokenize(handles[0], bytes(4 * max(limits.MAX_DETOKENIZE_IDS, CONTEXT))),
        Tokenize(handles[0], submit.prompt),
        Admit(work, 1, tuple(SchedulerIncarnation(Identity(Role.SCHEDULER, rank), life) for rank in range(1024))),
        Assign(work, Identity(Role.DETOKENIZER, 1), life),
        most_rows,
        Accepted(handles, CONTEXT, bytes(4 * CONTEXT), "x" * 8 * CONTEXT),
        AbortRequests(names * 32),
    ]
    for message in most:
        assert len(encode(message)) <= MAX_MESSAGE_BYTES, type(message)


def test_log_probabilities_fit_into_their_messages() -> None:
    """The longest that the limits let through, for tokens of usual length; what is longer still ends with an error."""
    num_positions = 10_000
    text = "ordinary"
    entry = TokenLogprob(1 << 20, -1.1, 1 << 20, text, text.encode())
    positions = [PositionLogprobs(entry, len(text), (entry,) * 20)] * num_positions
    each = len(encode(positions)) / (21 * num_positions)
    assert each <= ENTRY_BYTES + 4 * len(text)
    assert MAX_PROMPT_LOGPROBS * each + MAX_BATCH_BYTES <= MAX_MESSAGE_BYTES
    assert 2 * PIECE_ENTRIES * each + MAX_BATCH_BYTES <= MAX_MESSAGE_BYTES
    columns = LogprobColumns(20, *(bytes(4 * num_positions) for _ in "xx"), *(bytes(80 * num_positions) for _ in "xx"))
    params = SamplingParams(logprobs=20, prompt_logprobs=20)
    assert len(encode(columns)) <= num_positions * sizes.prompt_logprob_bytes(params)
    assert sizes.prompt_logprob_bytes(params) == sizes.logprob_bytes(params)
    assert MAX_PROMPT_LOGPROBS * 16 + 2 * sizes.MAX_STEP_BYTES <= MAX_MESSAGE_BYTES


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_small_body_stays_small(data: st.DataObject) -> None:
    """Whatever its shape, one HTTP request is refused by name, or its messages together are not much more than it allows."""
    draw = data.draw
    fields: dict[str, object] = {
        "prompt": [draw(st.sampled_from(["x", "y" * 100]))] * draw(st.integers(1, 600)),
        "n": draw(st.integers(1, 8)),
        "stop": draw(st.lists(st.sampled_from(["a", "b" * 4000, "é" * 1000]), max_size=8)),
        "cache_salt": draw(st.sampled_from([None, "s", "s" * 5000])),
        "logit_bias": dict.fromkeys(map(str, range(draw(st.integers(0, VOCAB)))), 0.1),
        "allowed_token_ids": draw(st.sampled_from([None, IDS[:7], IDS, IDS * 3])),
        "stop_token_ids": draw(st.sampled_from([[], IDS[:3], IDS])),
        "logprobs": draw(st.sampled_from([None, 0, 20])),
    }
    refusal: HttpError | None = None
    try:
        found = ask("text", **fields)
    except HttpError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert "at most" in refusal.message or "more than" in refusal.message
        return
    answer = WholeResponse(AnswerHead(found, "cmpl-1", 0, "m", lambda: None))
    handles = iter(range(1, 1 << 20))
    asked = list(build_each(answer, found, lambda: Handle(next(handles)), -1))
    messages = [submit for _, submit in asked]
    assert max(len(encode(message)) for message in messages) <= MAX_MESSAGE_BYTES
    num_sequences = len(found.mesh.prompts) * found.mesh.num_choices
    most = limits.MAX_COPIED_BYTES + 14 * limits.MAX_LISTED_IDS + 2000 * num_sequences
    assert sum(len(encode(message)) for message in messages) <= most
