"""Generate calls become what the same completion would ask; every field has an effect or is refused by its name."""

from typing import Any

import pytest
from parsing import RESOLVED, SERVER, ask
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.grpc import messages as requests
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.edges.text import TextPrompt, TokenPrompt


def read(request: pb.GenerateRequest) -> ParsedRequest:
    return requests.generation(request, RESOLVED, SERVER)


SAME: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 3,
    "prompt_logprobs": 1,
    "seed": 11,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 6,
}


def test_a_full_request_is_the_same_as_over_http() -> None:
    params = pb.SamplingParams(**SAME, logit_bias={3: -4.0})
    same = ask("text", prompt="hi", **SAME, logit_bias={"3": -4.0}, request_id="mine")
    assert read(pb.GenerateRequest(request_id="mine", text="hi", sampling_params=params)) == same


def test_what_is_left_out_is_neutral() -> None:
    """And not the model's own default: who calls sends that, as GetModelInfo told it."""
    found = read(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[4, 5]), stream=True))
    (prompt,) = found.mesh.prompts
    assert isinstance(prompt, TokenPrompt)
    assert memoryview(prompt.token_ids).cast("i").tolist() == [4, 5]
    sampling = found.mesh.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, found.mesh.num_choices, found.answer.logprobs) == (1.0, 1, -1)
    assert found.answer.stream
    assert (found.mesh.max_tokens, found.mesh.cap_max_tokens) == (None, True)
    assert isinstance(read(pb.GenerateRequest(text="x")).mesh.prompts[0], TextPrompt)


def test_a_greedy_temperature_is_not_left_out() -> None:
    assert (
        read(pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(temperature=0))).mesh.sampling.temperature
        == 0
    )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="x", kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(text="x", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (pb.GenerateRequest(text="x", media_refs=pb.MediaRefs()), "media_refs"),
        (pb.GenerateRequest(text="x", request_id="a b"), "request_id"),
        (pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(top_p=float("nan"))), "top_p"),
        (pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(temperature=-1)), "temperature"),
        (pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(logit_bias={2000: 1})), "logit_bias"),
        (
            pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(grammar_from_first_token=True)),
            "grammar_from_first_token",
        ),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5000])), "prompt"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * 99999)), "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(request_)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_every_field_of_the_messages_is_known() -> None:
    """A newer version of the package may bring fields that would be left out in silence."""
    constraint = {field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    known = {*requests.SAME, *requests.ZERO_IS_ONE, *requests.PLAIN, *requests.SWITCHES, *requests.LISTS}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == known | constraint | {
        "logit_bias",
        "grammar_from_first_token",
    }
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == {
        *requests.NOT_SUPPORTED,
        "request_id",
        "tokenized",
        "text",
        "sampling_params",
        "stream",
        "data_parallel_rank",
    }


def test_a_rank() -> None:
    assert requests.dp_rank(pb.GenerateRequest()) == -1
    assert requests.dp_rank(pb.GenerateRequest(data_parallel_rank=0)) == 0
    with pytest.raises(HttpError, match="data_parallel_rank"):
        requests.dp_rank(pb.GenerateRequest(data_parallel_rank=-3))
