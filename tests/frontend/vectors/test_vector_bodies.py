"""What bodies ask of the mesh, and what is refused by the name of its field."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.requests import submits
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.frontend.vectors.routes import Asked, read
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import ChatPrompt, PairPrompt, TextPrompt, TokenPrompt
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import PoolingSpec
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Handle
from meshlm.supervisor.settings import flags, resolve

EMBED = Pool(PoolKind.MEAN, PoolHead.EMBED, True)


@pytest.fixture(scope="module")
def config(minilm: Path) -> MeshConfig:
    return resolve.resolve(flags.build({"model": str(minilm), "device": "cpu"}, None))


def with_pooling(config: MeshConfig, **changes: Any) -> MeshConfig:
    resolved = config.resolved
    assert resolved is not None
    assert resolved.pooling is not None
    return replace(config, resolved=replace(resolved, pooling=replace(resolved.pooling, **changes)))


def asked(config: MeshConfig, path: str = "/v1/embeddings", **body: Any) -> Asked:
    return read(path, json.dumps(body).encode(), 1 << 20, config)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [TextPrompt("hi")]),
        ("", [TextPrompt("")]),
        (["hi", "there"], [TextPrompt("hi"), TextPrompt("there")]),
        ([5, 6], [TokenPrompt(b"\5\0\0\0\6\0\0\0")]),
        ([[5], [6.0]], [TokenPrompt(b"\5\0\0\0"), TokenPrompt(b"\6\0\0\0")]),
    ],
)
def test_inputs(config: MeshConfig, given: Any, prompts: list[Any]) -> None:
    assert asked(config, input=given).parsed_request.mesh.prompts == prompts
    assert asked(config, input=given).parsed_request.mesh.extras[0] == EMBED


def test_conversations(config: MeshConfig) -> None:
    """They come as `messages`, as vLLM has them, or as `input`; one or several."""
    message = {"role": "user", "content": "hi"}
    for body in ({"messages": [message]}, {"input": [message]}, {"messages": [[message]]}, {"input": [[message]]}):
        (prompt,) = asked(config, **body).parsed_request.mesh.prompts
        assert isinstance(prompt, ChatPrompt)
        assert json.loads(prompt.messages_json) == [message]
        assert not prompt.add_generation_prompt


def test_what_an_embedding_is(config: MeshConfig) -> None:
    cuts = with_pooling(config, matryoshka=True)
    assert asked(cuts, input="a", dimensions=12).parsed_request.mesh.extras[0] == replace(EMBED, dimensions=12)
    assert asked(config, input="a", use_activation=False).parsed_request.mesh.extras[0] == replace(
        EMBED, activation=False
    )
    assert asked(config, input="a", normalize=False).parsed_request.mesh.extras[0] == replace(EMBED, activation=False)
    assert asked(config, "/pooling", input="a").parsed_request.mesh.extras[0] == EMBED
    tokens = asked(config, "/pooling", input="a", task="token_embed").parsed_request.mesh.extras[0]
    assert tokens == Pool(PoolKind.ALL, PoolHead.EMBED, True)


def test_truncation(config: MeshConfig) -> None:
    text = asked(config, input="a", truncate_prompt_tokens=-1).parsed_request.mesh.text
    assert (text.truncate_prompt_tokens, text.truncation_side) == (256, "right")
    text = asked(config, input="a", truncate_prompt_tokens=5, truncation_side="left").parsed_request.mesh.text
    assert (text.truncate_prompt_tokens, text.truncation_side) == (5, "left")


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input", "give either input or messages"),
    ("/v1/embeddings", {"input": "a", "messages": [{}]}, "input", "give either input or messages"),
    ("/v1/embeddings", {"input": []}, "input", "give 1 to 2048 inputs, got 0"),
    ("/v1/embeddings", {"input": [[]]}, "input", "must be text, a list of token ids, or a list of either"),
    ("/v1/embeddings", {"input": 5}, "input", "must be text, a list of token ids, or a list of either"),
    ("/v1/embeddings", {"input": [1.5]}, "input", "must be text, a list of token ids, or a list of either"),
    ("/v1/embeddings", {"input": [[7, 30522]]}, "input", "token id 30522 is outside the vocabulary 0..30521"),
    ("/v1/embeddings", {"input": [-1]}, "input", "token id -1 is outside the vocabulary 0..30521"),
    ("/v1/embeddings", {"input": [1] * 257}, "input", "257 tokens; this model's maximum context length is 256 tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 64}, "dimensions", "does not support Matryoshka embeddings"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "Invalid enum value"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8_e3m4"}, "embed_dtype", "Invalid enum value"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", "older name"),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 257},
        "truncate_prompt_tokens",
        "must be -1, or 1 to 256",
    ),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "must be -1, or 1 to 256",
    ),
    ("/v1/embeddings", {"messages": [[]]}, "messages", "a conversation is a list of messages"),
    ("/v1/embeddings", {"input": "a", "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs", "goes with messages"),
    ("/pooling", {"input": "a", "task": "classify"}, "task", "does not support the task 'classify'"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task", "Invalid enum value"),
    ("/classify", {"input": "a"}, "task", "it has 'embed', 'token_embed'"),
    ("/score", {"queries": "a"}, "queries", "give queries and documents, or text_1 and text_2"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "1:1, 1:N or N:N"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "give at least one text"),
    (
        "/score",
        {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 256},
        "max_tokens_per_doc",
        "less than the model's context",
    ),
    ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "images are not supported"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "Expected `int` >= 0"),
    ("/rerank", {"documents": ["b"]}, "query", "required field"),
    ("/v2/embed", {"texts": []}, "texts", "at least one"),
    ("/v2/embed", {"images": ["x"]}, "images", "not supported"),
    ("/v2/embed", {"texts": ["a"], "output_dimension": 9}, "output_dimension", "does not support Matryoshka"),
    ("/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs", "images are not supported"),
]


@pytest.mark.parametrize(("path", "body", "param", "said"), BAD)
def test_what_is_refused(config: MeshConfig, path: str, body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(HttpError) as told:
        asked(config, path, **body)
    assert (told.value.status, told.value.param) == (400, param)
    assert said in told.value.message


def test_sizes_of_a_model_with_some(config: MeshConfig) -> None:
    some = with_pooling(config, matryoshka=True, matryoshka_dimensions=(64, 128))
    for wanted in (0, 65, 385, 10**30, -(10**30)):
        with pytest.raises(HttpError, match=f"got {wanted}"):
            asked(some, input="a", dimensions=wanted)


def test_pairs(config: MeshConfig) -> None:
    """A classifier reads both texts at once; embeddings are made of each text once."""
    crossed = with_pooling(config, tasks=("classify", "token_classify"), size=1, kind=PoolKind.CLS)
    for body in ({"text_1": "q", "text_2": ["a", "b"]}, {"queries": ["q"], "documents": ["a", "b"]}):
        found = asked(crossed, "/score", **body, max_tokens_per_doc=9).parsed_request
        assert found.mesh.prompts == [PairPrompt("q", text, max_second=9) for text in "ab"]
        assert found.mesh.extras[0] == Pool(PoolKind.CLS, PoolHead.CLASSIFY, True)
    found = asked(config, "/v2/rerank", query="q", documents=["a", {"text": "b"}]).parsed_request
    assert found.mesh.prompts == [TextPrompt("q"), TextPrompt("a"), TextPrompt("b")]
    with pytest.raises(HttpError, match="that needs a classifier with one label"):
        asked(with_pooling(crossed, size=3), "/score", text_1="a", text_2="b")
    with pytest.raises(HttpError, match="it needs a server with --chat-template"):
        asked(crossed, "/score", text_1="a", text_2="b", instruction="c")
    templated = replace(crossed, model=replace(crossed.model, chat_template="x"))
    (prompt,) = asked(templated, "/score", text_1="a", text_2="b", instruction="c").parsed_request.mesh.prompts
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in json.loads(prompt.messages_json)] == ["query", "document"]
    assert json.loads(prompt.template_kwargs_json) == {"instruction": "c"}


def test_cohere(config: MeshConfig) -> None:
    named = with_pooling(config, prompts={"search_query": "query: "})
    found = asked(
        named, "/v2/embed", texts=["a"], input_type="search_query", truncate="START", max_tokens=7
    ).parsed_request
    assert found.mesh.prompts == [TextPrompt("query: a")]
    assert (found.mesh.text.truncate_prompt_tokens, found.mesh.text.truncation_side) == (7, "left")
    assert asked(named, "/v2/embed", texts=["a"], truncate="NONE").parsed_request.mesh.text.truncate_prompt_tokens == 0
    with pytest.raises(HttpError, match="it has search_query"):
        asked(named, "/v2/embed", texts=["a"], input_type="other")
    two = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert asked(config, "/v2/embed", inputs=[two]).parsed_request.mesh.prompts == [TextPrompt("a\nb")]
    with pytest.raises(HttpError, match="the model has no prompt 'any'; it has none") as error:
        asked(config, "/v2/embed", texts=["a"], input_type="any")
    assert (error.value.status, error.value.param) == (400, "input_type")


def test_a_server_of_text_has_none(config: MeshConfig) -> None:
    assert config.resolved is not None
    text = replace(config, resolved=replace(config.resolved, pooling=None))
    with pytest.raises(HttpError, match="this server gives text, and no vectors") as told:
        asked(text, input="a")
    assert told.value.status == 404


def test_longer_prompts_where_they_are_cut_in_parts(config: MeshConfig) -> None:
    (prompt,) = asked(with_pooling(config, chunks=True), input=[5] * 300).parsed_request.mesh.prompts
    assert isinstance(prompt, TokenPrompt)
    assert len(ints(prompt.token_ids)) == 300


def test_the_spec_says_what_compares() -> None:
    spec = PoolingSpec(tasks=("token_embed",), kind=PoolKind.CLS, size=8)
    assert spec.scores_by == "token_embed"


def test_token_ids_are_asked_for_where_they_say_which_vectors_are_given_out(config: MeshConfig) -> None:
    tasks = ("embed", "token_embed", "token_classify")
    m3 = with_pooling(config, tasks=tasks, edges={"token_embed": (0, -1), "token_classify": (0, 2)})
    for settings, task, wanted in ((config, "token_embed", False), (m3, "token_embed", True), (m3, "embed", False)):
        ask = asked(settings, "/pooling", input="a", task=task).parsed_request
        answer = VectorsResponse(AnswerHead(ask, "pool-1", 7, "m", lambda: None), lambda _: b"")
        ((_, submit),) = submits.build_each(answer, ask, lambda: Handle(1), -1)
        assert submit.want_ids is wanted, task
    assert asked(m3, "/pooling", input="a", task="token_classify").parsed_request.mesh.extras[0] == Pool(
        PoolKind.ALL, PoolHead.CLASSIFY, True, bos_token_id=0, eos_token_id=2
    )
