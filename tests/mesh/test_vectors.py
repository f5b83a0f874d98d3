"""Embeddings of all-MiniLM-L6-v2 through the whole mesh, against transformers: the same vectors and ranks, through kills too."""

import base64
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from numpy.typing import NDArray
from retrieval import DOCUMENTS, QUERIES
from schemathesis import GenerationMode, checks
from serving import Serving, serving

from meshlm.frontend.vectors.parse import PAIRS

pytestmark = [pytest.mark.mesh, pytest.mark.model]
F32 = NDArray[np.float32]
CHECKED = [checks.not_a_server_error, checks.status_code_conformance, checks.response_schema_conformance]
CHUNKED = '{"enable_chunked_processing": true, "max_embed_len": 2000}'


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Serving]:
    flags = ("--device", "cpu", "--cpu-threads", "1", "--served-model-name", "minilm", "--pooler-config", CHUNKED)
    with serving(str(minilm), *flags) as found:
        yield found


class Oracle:
    """transformers' model, and sentence-transformers' mean over the tokens."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    def embed(self, text: str) -> F32:
        return self.mean(self.tokenizer(text, truncation=True, max_length=256).input_ids)

    def mean(self, ids: list[int]) -> F32:
        with torch.inference_mode():
            states = self._model(torch.tensor([ids])).last_hidden_state[0]
        found: F32 = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        return found


@pytest.fixture(scope="module")
def oracle(minilm: Path) -> Oracle:
    return Oracle(minilm)


def ask(server: Serving, path: str = "/v1/embeddings", **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(server: Serving, texts: Any) -> F32:
    return np.array([one["embedding"] for one in ask(server, input=texts)["data"]], np.float32)


def ndcg(scores: F32, wanted: set[int]) -> float:
    """At 10 (Järvelin and Kekäläinen 2002)."""
    best = (-scores).argsort(kind="stable")[:10].tolist()
    gain = sum(1 / math.log2(2 + place) for place, document in enumerate(best) if document in wanted)
    return gain / sum(1 / math.log2(2 + place) for place in range(len(wanted)))


def test_vectors_are_transformers(server: Serving, oracle: Oracle) -> None:
    """Of texts of many lengths in one request, in every order; also of their token ids, and by OpenAI's client."""
    texts = ["a", "", *DOCUMENTS, " ".join(DOCUMENTS[:8])]
    expected = np.stack([oracle.embed(text) for text in texts])
    found = embed(server, texts)
    assert (found * expected).sum(1).min() > 0.9999
    ids = [oracle.tokenizer(text).input_ids for text in texts[::-1]]
    answer = ask(server, input=ids, encoding_format="base64")
    raw = [np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in answer["data"]]
    np.testing.assert_allclose(np.stack(raw), found[::-1], atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    theirs = client.embeddings.create(model="minilm", input=texts[:3])
    np.testing.assert_allclose(np.array([one.embedding for one in theirs.data]), found[:3], atol=1e-6)


def test_documents_are_found(server: Serving, oracle: Oracle) -> None:
    """Ranks by embeddings and by POST /rerank are those that transformers' vectors give."""
    documents, queries = embed(server, DOCUMENTS), embed(server, list(QUERIES))
    theirs = np.stack([oracle.embed(text) for text in DOCUMENTS])
    total = reference = 0.0
    for query, vector in zip(QUERIES, queries, strict=True):
        total += ndcg(documents @ vector, QUERIES[query])
        reference += ndcg(theirs @ oracle.embed(query), QUERIES[query])
        ranks = ask(server, "/rerank", query=query, documents=DOCUMENTS, top_n=3)["results"]
        assert [one["index"] for one in ranks] == (-(documents @ vector)).argsort(kind="stable")[:3].tolist()
    assert abs(total - reference) < 1e-6
    assert total / len(QUERIES) > 0.9


def test_long_texts_in_parts(server: Serving, oracle: Oracle) -> None:
    """The mean of the parts' vectors, by their tokens; beyond max_embed_len they are refused."""
    long = " ".join(DOCUMENTS * 2)
    ids = oracle.tokenizer(long).input_ids
    parts = [ids[at : at + 256] for at in range(0, len(ids), 256)]
    assert len(parts) > 2
    expected = sum(len(part) * oracle.mean(part) for part in parts) / len(ids)
    answer = ask(server, input=["short", long])
    assert answer["usage"]["prompt_tokens"] == 3 + len(ids)
    np.testing.assert_allclose(np.array(answer["data"][1]["embedding"]), expected, atol=1e-4)
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": " ".join(DOCUMENTS * 6)})
    assert refused.status_code == 400
    assert "at most 2000 are embedded (max_embed_len)" in refused.text
    cut = ask(server, input=long, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(np.array(cut["data"][0]["embedding"]), oracle.embed(long), atol=1e-4)


def test_no_vector_is_lost_when_processes_die(server: Serving) -> None:
    """Worker, scheduler and detokenizer die while a batch of embeddings runs: all vectors come, the same ones."""
    texts = [f"{DOCUMENTS[n % 30]} {n} {DOCUMENTS[n % 7]}" for n in range(200)]
    expected = embed(server, texts)
    with ThreadPoolExecutor(1) as pool:
        for role in ("worker", "scheduler", "detokenizer"):
            running = pool.submit(embed, server, texts)
            while httpx.get(f"{server.url}/load").json()["server_load"] < 20 and not running.done():
                pass
            os.kill(server.pid(role), signal.SIGKILL)
            np.testing.assert_allclose(running.result(), expected, atol=1e-5)


def test_the_pages_programs_run(server: Serving) -> None:
    """docs/api/embeddings.md, as a reader would type it."""
    page = Path(__file__).parents[2] / "docs" / "api" / "embeddings.md"
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S))
    program = program.replace("http://localhost:8000", server.url)
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/", timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("2 384 ")
    assert lines[1].startswith("1 0.")


IN_PYTHON = """
import sys
import asyncio
from meshlm import AsyncLLM, PoolingParams
engine = AsyncLLM(sys.argv[1], device="cpu")
llm = engine._llm
one, two = llm.embed(["hello world", [101, 7592, 2088, 102]], use_tqdm=False)
assert one.prompt_token_ids == two.prompt_token_ids == [101, 7592, 2088, 102]
assert max(abs(a - b) for a, b in zip(one.outputs.embedding, two.outputs.embedding)) < 1e-6
print(one.outputs.embedding[:2])
good, bad = llm.score("what is a dog", ["a dog is an animal", "the moon"], use_tqdm=False)
assert good.outputs.score > 0.7 > 0.4 > bad.outputs.score
assert llm.encode("a b", pooling_task="token_embed", use_tqdm=False)[0].outputs.data.shape == (4, 384)
raw = llm.embed("a", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.embedding
assert abs(sum(x * x for x in raw) - 1) > 0.01
for wrong, said in (
    (lambda: llm.classify("a"), "does not support the task 'classify'"),
    (lambda: llm.reward("a"), "does not support the task 'token_classify'"),
    (lambda: llm.generate("a"), "the model gives vectors, and no text"),
    (lambda: llm.embed("a", pooling_params=PoolingParams(dimensions=3)), "Matryoshka"),
    (lambda: llm.score(["a", "b"], ["c"]), "1:1, 1:N or N:N"),
    (lambda: llm.embed("a " * 300), "maximum context length is 256"),
    (lambda: llm.embed([[30522]]), "outside the vocabulary"),
):
    try:
        wrong()
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
async def encode(prompt, name=None, **params):
    return [found async for found in engine.encode(prompt, PoolingParams(**params), name)]
async def main():
    (whole,), (tokens,), aborted = await asyncio.gather(
        encode("hello world", task="embed"), encode("a b", "tokens", task="token_embed"), stopped())
    assert abs(whole.outputs.data - one.outputs.data).max() < 1e-6 and whole.prompt_token_ids == one.prompt_token_ids
    assert tokens.outputs.data.shape == (4, 384) and aborted == []
    for wrong, said in (({"task": "classify"}, "does not support"), ({"dimensions": 3}, "Matryoshka")):
        try:
            await encode("a", **wrong)
        except ValueError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
async def stopped():
    asked = asyncio.ensure_future(encode("a " * 200, "mine"))
    while "mine" not in engine._open:
        await asyncio.sleep(0)
    await engine.abort("mine")
    return await asked
asyncio.run(main())
"""


def test_in_python(minilm: Path, oracle: Oracle) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", IN_PYTHON, str(minilm)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = [float(number) for number in ran.stdout.strip(" []\n").split(",")]
    np.testing.assert_allclose(found, oracle.embed("hello world")[:2], atol=1e-5)


def consistent(case: Any) -> None:
    """What JSON schema cannot say: ranks that there are, as many texts as others, fields that exclude each other."""
    if case.headers and "X-data-parallel-rank" in case.headers:
        case.headers["X-data-parallel-rank"] = "0"
    body = case.body
    if not isinstance(body, dict):
        return
    for name in ("normalize", "chat_template", "chat_template_kwargs", "continue_final_message"):
        body.pop(name, None)
    if body.get("messages") is not None:  # the model has no template
        body.update(messages=None, input="some")
    for first, second in PAIRS:
        if isinstance(body.get(first), list) and body.get(second) is not None:
            body[first] = body[first][:1]


def ask_as_described(server: Serving, operation: Any, mode: GenerationMode) -> None:
    is_taken = mode is GenerationMode.POSITIVE and operation.path != "/classify"  # the model has no classes
    wanted = [*CHECKED, *([checks.positive_data_acceptance] if is_taken else [])]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=6,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        derandomize=True,
    )
    def one(case: Any) -> None:
        if is_taken:
            consistent(case)
        case.validate_response(case.call(base_url=server.url, timeout=60), checks=wanted)

    one()


def test_paths_do_what_the_schema_says(server: Serving) -> None:
    """schemathesis: whatever a body holds, the answer is a declared one, and none is an error of the server. Right bodies are taken."""
    document = httpx.get(f"{server.url}/openapi.json").json()
    paths = {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank"}
    described: list[Any] = list(schemathesis.openapi.from_dict(document).get_all_operations())
    for operation in (found.ok() for found in described):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.path in paths else ():
            ask_as_described(server, operation, mode)


def test_a_classifier_reads_pairs(minilm: Path, tmp_path: Path) -> None:
    """A small BERT with random weights on two ranks: scores, ranks and classes are transformers', types of tokens included."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    names: dict[str, Any] = {"num_labels": 1, "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    config = transformers.BertConfig(vocab_size=30522, initializer_range=0.3, **sizes, **names)
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def logit(*texts: str) -> float:
        with torch.inference_mode():
            return float(theirs(**tokenizer(*texts, return_tensors="pt")).logits)

    query, documents = "what is a dog", DOCUMENTS[:12]
    logits = np.array([logit(query, document) for document in documents])
    scores = 1 / (1 + np.exp(-logits))
    flags = ("--device", "cpu", "--cpu-threads", "1", "-dp", "2", "--kv-cache-memory", "64M")
    with serving(str(tmp_path), *flags) as server:
        found = ask(server, "/score", text_1=query, text_2=documents)
        np.testing.assert_allclose([one["score"] for one in found["data"]], scores, atol=1e-4)
        ranks = ask(server, "/rerank", query=query, documents=documents, use_activation=False)["results"]
        np.testing.assert_allclose([one["relevance_score"] for one in ranks], np.sort(logits)[::-1], atol=1e-4)
        (entry,) = ask(server, "/classify", input=query)["data"]
        assert (entry["label"], entry["num_classes"]) == ("relevant", 1)
        np.testing.assert_allclose(entry["probs"], [1 / (1 + math.exp(-logit(query)))], atol=1e-4)
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        assert (refused.status_code, "does not support the task 'embed'" in refused.text) == (400, True)


def test_what_a_server_of_vectors_refuses(server: Serving) -> None:
    for path, body, status, said in (
        ("/v1/completions", {"prompt": "a"}, 404, "it gives vectors (--runner)"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, 400, "does not support Matryoshka"),
        ("/v1/embeddings", {"input": [[30522]]}, 400, "outside the vocabulary"),
        ("/classify", {"input": "a"}, 400, "does not support the task 'classify'"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "does not exist"),
        ("/v1/embeddings", {"input": "a", "priority": 3}, 400, "priority"),
    ):
        answer = httpx.post(f"{server.url}{path}", json=body)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v2/embed", "/rerank", "/v1/score", "/classify", "/pooling"} <= paths.keys()
    assert "/v1/completions" not in paths
