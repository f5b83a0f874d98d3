"""Embeddings of all-MiniLM-L6-v2 through the whole mesh, against transformers: the same vectors and ranks, through kills too."""

import base64
import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from retrieval import DOCUMENTS, QUERIES
from serving import Serving, serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]
F32 = NDArray[np.float32]
CHUNKED = '{"enable_chunked_processing": true, "max_embed_len": 2000}'


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Serving]:
    flags = ("--device", "cpu", "--served-model-name", "minilm", "--pooler-config", CHUNKED)
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
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
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


def test_what_a_server_of_vectors_refuses(server: Serving) -> None:
    for path, body, status, said in (
        ("/v1/completions", {"prompt": "a"}, 404, "this server gives vectors, and no text"),
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
