"""What clients read of vectors: numbers in every form, scores, ranks, and means of parts."""

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.vectors import answers
from meshlm.frontend.vectors.answers import ROUNDERS, VectorsResponse
from meshlm.frontend.vectors.parse import Pairs
from meshlm.frontend.vectors.schema import CohereEmbedRequest, EmbeddingRequest, RerankRequest
from meshlm.protocol.edges.text import Accepted, Finished, Submit, TextPrompt
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import PoolingSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, RequestId
from meshlm.runtime.client.placement import Choice, RowDetails

EMBED = Pool(PoolKind.MEAN, PoolHead.EMBED, True)
F32 = NDArray[np.float32]


def answered(
    vectors: list[list[float]], write: Any, task: Pool = EMBED, tokens: list[int] | None = None, parts: Any = ()
) -> Any:
    """The body's bytes, and the answer."""
    ended: list[bool] = []
    mesh = MeshRequest([TextPrompt("a")] * len(vectors), seed=0, max_tokens=1, extras=(task,))
    ask = ParsedRequest(mesh, AnswerOptions(include_usage=True))
    answer = VectorsResponse(AnswerHead(ask, "embd-1", 7, "m", lambda: ended.append(True)), write, parts)
    for place, vector in enumerate(vectors):
        count = tokens[place] if tokens else 2
        submit = Submit((Handle(place),), (RequestId(str(place)),), TextPrompt("a"), SamplingParams(), extras=(task,))
        choice = Choice(answer, place, place, submit, Handle(place))
        answer.choices.append(choice)
        answer.accepted(choice, Accepted((Handle(place),), count, pack_i32(range(count))))
        choice.num_prompt_tokens, choice.pooled = count, np.array(vector, np.float32).tobytes()
    for choice in answer.choices:
        answer.row(choice, 0, "", RowDetails(Finished(0, FinishReason.STOP)))
    assert ended == [True]
    return answer.body(), answer


def encoded(
    vectors: list[list[float]], task: Pool = EMBED, tokens: list[int] | None = None, parts: Any = (), **body: Any
) -> Any:
    def write(answer: VectorsResponse) -> bytes:
        return answers.write_encoded(answer, EmbeddingRequest(**body), "embedding")

    found, answer = answered(vectors, write, task, tokens, parts)
    return found, answer


def test_numbers() -> None:
    found, _ = encoded([[0.5, -1.0], [2.0, 0.25]])
    assert json.loads(found) == {
        "id": "embd-1",
        "object": "list",
        "created": 7,
        "model": "m",
        "data": [
            {"index": 0, "object": "embedding", "embedding": [0.5, -1.0]},
            {"index": 1, "object": "embedding", "embedding": [2.0, 0.25]},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": None},
    }


def test_null_is_a_default() -> None:
    null: Any = {"encoding_format": None, "embed_dtype": None, "endianness": None}
    assert encoded([[0.5, -1.0]], **null)[0] == encoded([[0.5, -1.0]])[0]
    assert encoded([[0.5]], **{**null, "encoding_format": "base64"})[0] == encoded([[0.5]], encoding_format="base64")[0]


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_base64(dtype: str, endianness: str) -> None:
    values = [0.1, -3.5, 1e-3, 70000.0, 0.0]
    found, _ = encoded([values], encoding_format="base64", embed_dtype=dtype, endianness=endianness)
    data = base64.b64decode(json.loads(found)["data"][0]["embedding"])
    order = ">" if endianness == "big" else "<"
    expected: F32 = np.array(values, np.float32)
    if dtype == "float32":
        read = np.frombuffer(data, f"{order}f4")
        assert (read == expected).all()
    elif dtype == "float16":
        read = np.frombuffer(data, f"{order}f2")
        assert (read == expected.clip(-65504, 65504).astype(np.float16)).all()
    else:
        import torch

        bits = np.frombuffer(data, f"{order}u2").astype(np.int32) << 16
        assert (bits.view(np.float32) == torch.tensor(values).bfloat16().float().numpy()).all()


@pytest.mark.parametrize(("dtype", "theirs"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_floats_of_eight_bits_are_torchs(dtype: str, theirs: str) -> None:
    """To the nearest, ties to even; too large ones become the largest, or infinity."""
    import torch

    kind = getattr(torch, theirs)
    all_of_them = torch.arange(256, dtype=torch.uint8).view(kind).float()
    finite = all_of_them[all_of_them.isfinite()].unique()
    between = (finite[1:] + finite[:-1]) / 2
    some = torch.cat((finite, between, between * 1.0001, between * 0.9999, torch.randn(500) * 0.1))
    edge = torch.tensor([447.0, 61439.0, 61440.0, 61441.0, 1e9, 0.0, -0.0, 1e-12])
    if dtype == "fp8_e4m3":  # torch's before 2.13 are NaN
        edge = edge.clamp(max=finite.max())
    values = torch.cat((some, edge, -edge)).tolist()
    found, _ = encoded([values], encoding_format="base64", embed_dtype=dtype, endianness="big")
    data = base64.b64decode(json.loads(found)["data"][0]["embedding"])
    assert data == torch.tensor(values).to(kind).view(torch.uint8).numpy().tobytes()


def test_numbers_beyond_eight_bits() -> None:
    e4m3, e5m2 = ROUNDERS["fp8_e4m3"], ROUNDERS["fp8_e5m2"]
    assert [e4m3(value) for value in (464.1, 1e9, -1e9, math.inf, math.nan)] == [0x7E, 0x7E, 0xFE, 0x7E, 0x7F]
    assert [e5m2(value) for value in (1e9, -1e9, math.inf, math.nan)] == [0x7C, 0xFC, 0x7C, 0x7F]


def test_bytes() -> None:
    """All vectors in one body; the header says where each is."""
    found, answer = encoded([[1.0, 2.0], [3.0, 4.0]], encoding_format="bytes", endianness="little")
    assert struct.unpack("<4f", found) == (1.0, 2.0, 3.0, 4.0)
    assert answer.media_type == "application/octet-stream"
    head = json.loads(answer.headers["metadata"])
    where = [(one["start"], one["end"], one["shape"]) for one in head["data"]]
    assert where == [(0, 8, [2]), (8, 16, [2])]
    assert head["usage"]["prompt_tokens"] == 4
    _, answer = encoded([[1.0]], encoding_format="bytes_only")
    assert answer.headers == {}


def test_vectors_of_tokens() -> None:
    task = Pool(PoolKind.ALL, PoolHead.EMBED, True)
    found, _ = encoded([[1, 2, 3, 4, 5, 6], [7, 8]], task, tokens=[3, 1])
    assert [one["embedding"] for one in json.loads(found)["data"]] == [[[1, 2], [3, 4], [5, 6]], [[7, 8]]]


def test_steps_have_the_vectors_of_their_tags_alone() -> None:
    """The prompts' token ids count from 0."""
    task = Pool(PoolKind.ALL, PoolHead.CLASSIFY, True, step_tag_id=1)
    vectors = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0]]
    found, _ = encoded(vectors, task, tokens=[3, 1])
    assert [one["embedding"] for one in json.loads(found)["data"]] == [[[3, 4]], []]
    body, answer = encoded(vectors, task, tokens=[3, 1], encoding_format="bytes")
    assert np.frombuffer(body, np.float32).tolist() == [3, 4]
    assert [one["shape"] for one in json.loads(answer.headers["metadata"])["data"]] == [[1, 2], [0]]


def test_special_tokens_at_the_edges_have_none() -> None:
    """The prompts' token ids count from 0."""
    task = Pool(PoolKind.ALL, PoolHead.CLASSIFY, True, bos_token_id=0, eos_token_id=2)
    found, _ = encoded([[1, 2, 3], [7, 8]], task, tokens=[3, 2])
    assert [one["embedding"] for one in json.loads(found)["data"]] == [[[2]], [[8]]]


def test_parts_weigh_as_many_tokens_as_they_have() -> None:
    found, _ = encoded([[1.0, 0.0], [0.0, 4.0], [5.0, 5.0]], tokens=[3, 1, 2], parts=(2, 1))
    data = json.loads(found)
    assert [one["embedding"] for one in data["data"]] == [[0.75, 1.0], [5.0, 5.0]]
    assert data["usage"]["prompt_tokens"] == 6


def test_classes() -> None:
    spec = PoolingSpec(tasks=("classify",), kind=PoolKind.CLS, size=2, labels=("bad", "good"))
    task = Pool(PoolKind.CLS, PoolHead.CLASSIFY, True)
    found, _ = answered([[0.25, 0.75]], lambda answer: answers.write_classes(answer, spec), task)
    assert json.loads(found)["data"] == [{"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}]
    spec = replace(spec, labels=())  # config.json has no id2label
    found, _ = answered([[0.25, 0.75], [2.0]], lambda answer: answers.write_classes(answer, spec), task)
    assert [one["label"] for one in json.loads(found)["data"]] == ["LABEL_1", "LABEL_0"]


def test_cosines_are_scores() -> None:
    pairs = Pairs(["q"], ["a", "b", "c"])
    vectors = [[3.0, 0.0], [5.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    found, _ = answered(vectors, lambda answer: answers.write_scores(answer, pairs))
    assert [one["score"] for one in json.loads(found)["data"]] == [1.0, 0.0, 0.0]
    pairs = Pairs(["q", "r"], ["a", "b"])
    found, _ = answered([[1, 0], [0, 1], [1, 0], [0, 1]], lambda answer: answers.write_scores(answer, pairs))
    assert [one["score"] for one in json.loads(found)["data"]] == [1.0, 1.0]


def test_late_interaction() -> None:
    task = Pool(PoolKind.ALL, PoolHead.EMBED, True)
    pairs = Pairs(["q"], ["a"])
    vectors = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.25, 0.0, 2.0]]
    found, _ = answered(vectors, lambda answer: answers.write_scores(answer, pairs), task, [2, 3])
    assert [one["score"] for one in json.loads(found)["data"]] == [2.5]


def test_ranks() -> None:
    task = Pool(PoolKind.CLS, PoolHead.CLASSIFY, True)
    pairs = Pairs(["q"], ["a", "b", "c"])
    body = RerankRequest(query="q", documents=["a", "b", "c"], top_n=2)
    found, _ = answered([[0.1], [0.9], [0.5]], lambda answer: answers.write_ranks(answer, pairs, body), task)
    data = json.loads(found)
    assert [(one["index"], one["document"]["text"]) for one in data["results"]] == [(1, "b"), (2, "c")]
    assert data["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


def test_cohere() -> None:
    body = CohereEmbedRequest(texts=["a"], embedding_types=["float", "binary", "ubinary", "base64"])
    vector = [1.0, -1, 1, -1, 0, -1, -1, 1]
    found, _ = answered([vector], lambda answer: answers.write_cohere(answer, body))
    data = json.loads(found)
    assert data["embeddings"]["float"] == [vector]
    assert data["embeddings"]["ubinary"] == [[0b10101001]]
    assert data["embeddings"]["binary"] == [[0b10101001 - 128]]
    assert struct.unpack("<8f", base64.b64decode(data["embeddings"]["base64"][0])) == tuple(vector)
    assert (data["texts"], data["meta"]["billed_units"]["input_tokens"]) == (["a"], 2)
