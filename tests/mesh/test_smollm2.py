"""SmolLM2 through the whole mesh, against transformers: the same greedy tokens."""

import base64
import functools
import io
import json
import math
import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import httpx
import jsonschema
import openai
import pytest
import torch
from serving import Serving, serving

pytestmark = [pytest.mark.mesh, pytest.mark.model]
TEXT = "the quick brown fox jumps over a lazy dog while seven wizards count their coins in an old tower by the sea"
WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[(7 * p + i) % len(WORDS)] for i in range(3 + 11 * p)) for p in range(20)]
ASKED = PROMPTS[1::2]
NUM_TOKENS = 32
LENIENT = {"name": "a", "schema": {"type": "string", "minLength": 2, "not": {"const": "a"}}, "strict": False}


Pairs = list[tuple[list[int], list[int]]]  # prompt ids, output ids


class Oracle:
    """transformers, float32. Once it has agreed with an answer, that answer is the reference for the others."""

    def __init__(self, path: Path) -> None:
        import transformers

        name: dict[str, Any] = {"gguf_file": path.name}
        # transformers reads the file four times, and makes the map of names anew for each module.
        with ExitStack() as patches:
            for slow in ("GGUFReader", "get_tensor_name_map"):
                patches.enter_context(patch.object(gguf, slow, functools.cache(getattr(gguf, slow))))
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **name)
            found = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **name)
        self._model = found.eval()
        self._agreed: Pairs | None = None

    def check(self, answers: Pairs) -> None:
        """Greedy decoding is right if each token is the argmax after all before it: one forward pass proves a whole answer."""
        if self._agreed is not None:
            assert answers == self._agreed
            return
        for prompt, (prompt_ids, output) in zip(ASKED, answers, strict=True):
            assert prompt_ids == self._tokenizer(prompt).input_ids
            assert len(output) == NUM_TOKENS
            with torch.no_grad():
                logits = self._model(torch.tensor([prompt_ids + output])).logits[0]
            assert logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == output
        self._agreed = answers

    def vectors(self, prompt: str) -> str:
        """The model's own vectors of a prompt's tokens, as a client sends them."""
        buffer = io.BytesIO()
        with torch.no_grad():
            torch.save(self._model.get_input_embeddings()(torch.tensor(self._tokenizer(prompt).input_ids)), buffer)
        return base64.b64encode(buffer.getvalue()).decode()

    def beams(self, prompt: str, width: int, num_tokens: int) -> list[list[int]]:
        """The likeliest sequences, best first; none of them ends early."""
        settings: dict[str, Any] = {"num_beams": width, "num_return_sequences": width, "eos_token_id": None}
        ids = torch.tensor([self._tokenizer(prompt).input_ids])
        with torch.no_grad():
            found = self._model.generate(ids, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, **settings)
        sequences: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return sequences


@pytest.fixture(scope="session")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


def complete_all(server: Serving) -> Pairs:
    body = {"prompt": ASKED, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer.json()["choices"]]


def test_greedy_tokens_are_transformers(smol: Serving, oracle: Oracle) -> None:
    oracle.check(complete_all(smol))  # cold
    oracle.check(complete_all(smol))  # prefix cache warm


def test_beams_are_transformers(smol: Serving, oracle: Oracle) -> None:
    """Two prompts at once, streamed and not; and a chat."""
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    asked: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "n": 3, "max_tokens": 8, "extra_body": extra}
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none") as client:
        whole = client.completions.create(prompt=PROMPTS[1:3], **asked)
        found = [choice.model_dump() for choice in whole.choices]
        expected = [one for prompt in PROMPTS[1:3] for one in oracle.beams(prompt, 3, 8)]
        assert [choice["token_ids"] for choice in found] == expected
        assert [choice["index"] for choice in found] == list(range(6))
        texts = dict.fromkeys(range(6), "")
        for chunk in client.completions.create(prompt=PROMPTS[1:3], stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert list(texts.values()) == [choice["text"] for choice in found]
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **asked)
        assert len({choice.message.content for choice in chat.choices}) == 3


def test_chunked_and_preempted(oracle: Oracle) -> None:
    """Chunks of 32 tokens; memory for about three of the ten, seats for six."""
    flags = (
        "--max-num-batched-tokens",
        "32",
        "--max-num-seqs",
        "6",
        "--max-model-len",
        "320",
        "--kv-cache-memory",
        "20M",
    )
    with serving("--device", "cpu", "--cpu-threads", "1", "--cpu-exact", *flags) as server:
        oracle.check(complete_all(server))
        line = next(
            t for t in httpx.get(f"{server.url}/metrics").text.splitlines() if t.startswith("meshlm:num_preemptions")
        )
        assert float(line.split()[-1]) > 0, "nothing was preempted: the test proves nothing"


def test_the_time_that_the_device_computes_is_counted(smol: Serving) -> None:
    """30 tokens take a CPU tens of milliseconds, all of them in its steps; the mesh's figures come once a second."""

    def busy_s() -> float:
        lines = httpx.get(f"{smol.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("meshlm:device_busy_seconds_total"))

    before, until = busy_s(), time.monotonic() + 20
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "One two three", "max_tokens": 30, "ignore_eos": True}
    httpx.post(f"{smol.url}/v1/completions", json=body, timeout=300).raise_for_status()
    while busy_s() < before + 0.03:
        assert time.monotonic() < until, "computing took no time"


def test_paris(smol: Serving) -> None:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        ask: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 30,
        }
        whole = client.chat.completions.create(**ask).choices[0].message.content
        assert whole is not None
        assert "Paris" in whole
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
        )
        assert streamed == whole


def test_logprobs_and_echo(smol: Serving) -> None:
    body = {"prompt": "The sky is", "max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}
    choice = httpx.post(f"{smol.url}/v1/completions", json=body, timeout=300).json()["choices"][0]
    assert choice["text"].startswith("The sky is")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 24, "logprobs": True, "top_logprobs": 3, "temperature": 1.5, "seed": 5},
        {"max_tokens": 24, "temperature": 0, "stop": [" capital", "zz"], "logprobs": True, "return_token_ids": True},
        {"max_tokens": 24, "temperature": 0, "prompt_logprobs": 1, "n": 2},
        {"max_tokens": 9, "temperature": 0, "response_format": {"type": "json_schema", "json_schema": LENIENT}},
    ],
)
def test_a_chat_in_three_steps_is_the_chat(smol: Serving, fields: dict[str, Any]) -> None:
    """Rendered, generated and derendered, its answer is what the chat's own route gives, but for the prompt's ids."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{smol.url}{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    chat = {"messages": [{"role": "user", "content": "What is the capital of Österreich? 🙂"}], **fields}
    whole = post("/v1/chat/completions", chat)
    request = post("/v1/chat/completions/render", chat)
    generated = post("/inference/v1/generate", request)
    asked = {"generate_response": generated, "chat_request": chat, "prompt_tokens": len(request["token_ids"])}
    found = post("/v1/chat/completions/derender", asked)
    assert found["choices"] == whole["choices"]
    assert found["prompt_logprobs"] == whole["prompt_logprobs"]
    assert found["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_vectors_of_tokens_give_the_tokens_text(smol: Serving, oracle: Oracle) -> None:
    """In chunks, of two choices and streamed; found in the prefix cache by equal vectors, and by nothing else."""
    url, body = f"{smol.url}/v1/completions", {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    texts = [PROMPTS[9], PROMPTS[19]]
    expected = [httpx.post(url, json={**body, "prompt": text}, timeout=300).json()["choices"][0] for text in texts]
    vectors = [oracle.vectors(text) for text in texts]
    asked = {**body, "prompt_embeds": vectors, "prompt": None, "n": 2}
    for hits in (0, 1):
        answer = httpx.post(url, json={**asked, "return_token_ids": True}, timeout=300).json()
        found = [choice["text"] for choice in answer["choices"]]
        assert found == [text for text in (expected[0]["text"], expected[1]["text"]) for _ in range(2)]
        assert {choice["prompt_token_ids"] for choice in answer["choices"]} == {None}
        assert hits == 0 or answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none") as client:
        extra = {"prompt_embeds": vectors[1], "ignore_eos": True}
        chunks = client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="", max_tokens=16, temperature=0, stream=True, extra_body=extra
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected[1]["text"]
    parts: list[dict[str, str]] = [{"type": "text", "text": text} for text in ("Say:", PROMPTS[9], "Now.")]
    chat = {**body, "messages": [{"role": "user", "content": parts}], "return_token_ids": True}
    chats = f"{smol.url}/v1/chat/completions"
    plain = httpx.post(chats, json=chat, timeout=300).json()
    parts[1] = {"type": "prompt_embeds", "data": vectors[0]}
    mixed = httpx.post(chats, json=chat, timeout=300).json()
    assert mixed["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert (mixed["usage"]["prompt_tokens"], mixed["prompt_token_ids"]) == (plain["usage"]["prompt_tokens"], None)
    fresh = {**body, "prompt_embeds": oracle.vectors(" ".join(reversed(WORDS)))}
    usage = httpx.post(url, json=fresh, timeout=300).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens"] == usage["total_tokens"] - 16 > 20


def test_generative_scores_are_the_next_tokens_likelihood(smol: Serving) -> None:
    """One item's query is text and ids; its score without softmax is what /v1/completions says of the same token."""
    items = [" France is the city of", " Italy is the city of"]
    ids = [httpx.post(f"{smol.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in (" Paris", " Rome")]
    labels = [tokens[0] for tokens in ids]
    asked = {"query": "The capital of", "items": items, "label_token_ids": labels}
    shares = httpx.post(f"{smol.url}/generative_scoring", json=asked, timeout=300).json()["data"]
    assert shares[0]["score"] > 0.5 > shares[1]["score"]
    plain = {"prompt": "The capital of France is the city of", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    position = httpx.post(
        f"{smol.url}/v1/completions",
        json={**plain, "logprob_token_ids": labels, "return_tokens_as_token_ids": True},
        timeout=60,
    ).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    among_all = httpx.post(f"{smol.url}/generative_scoring", json={**asked, "apply_softmax": False}, timeout=300).json()
    expected = math.exp(position[f"token_id:{labels[0]}"])
    assert among_all["data"][0]["score"] == pytest.approx(expected, rel=1e-3)


def test_seeded_sampling_repeats(smol: Serving) -> None:
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.0, "seed": 11, "n": 2}
    first, second = (httpx.post(f"{smol.url}/v1/completions", json=body, timeout=300).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert texts[0] != texts[1]


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_keep_to_what_is_asked_for(smol: Serving) -> None:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Invent a person."}]
        ask: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 200}
        schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        extra = {"guided_whitespace_pattern": " ?"}
        whole = client.chat.completions.create(
            **ask, response_format=schema, extra_body=extra, n=3, seed=3, logprobs=True, frequency_penalty=0.5
        )
        for choice in whole.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None
        streamed = client.chat.completions.create(**ask, response_format=schema, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert (
            client.chat.completions.create(**ask, response_format=schema, temperature=0).choices[0].message.content
            == text
        )
        pattern = "[a-z]{3}-[0-9]{2}"
        for kind, value, form in (("choice", ["left", "right"], "left|right"), ("regex", pattern, pattern)):
            found = client.chat.completions.create(**ask, extra_body={"structured_outputs": {kind: value}})
            assert re.fullmatch(form, found.choices[0].message.content or "")
            assert found.choices[0].finish_reason == "stop"
        for wrong in (
            {"guided_regex": "(a"},
            {"guided_json": {"$ref": "#"}},
            {"guided_choice": ["a"], "allowed_token_ids": [9]},
        ):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                client.chat.completions.create(**ask, extra_body=wrong)


def test_a_forced_call_keeps_to_the_tools_schema(smol: Serving) -> None:
    """Without a parser of the model's own calls; streamed and whole alike."""
    tools: Any = [
        {"type": "function", "function": {"name": "add_person", "parameters": PERSON, "strict": True}},
        {"type": "function", "function": {"name": "clear"}},
    ]
    named: Any = {"type": "function", "function": {"name": "add_person"}}
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Add a person named Ann, 30 years old."}]
        ask: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "messages": messages,
            "tools": tools,
            "max_tokens": 200,
            "temperature": 0,
            "extra_body": {"guided_whitespace_pattern": " ?"},
        }
        for choice, reason in ((named, "stop"), ("required", "tool_calls")):
            only: Any = tools if choice == named else tools[:1]
            settings = {**ask, "tools": only, "tool_choice": choice, "parallel_tool_calls": False}
            whole = client.chat.completions.create(**settings).choices[0]
            assert (whole.message.content, whole.finish_reason) == (None, reason)
            (call,) = whole.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "add_person"
            jsonschema.validate(json.loads(call.function.arguments), PERSON)
            with client.chat.completions.stream(**settings) as stream:
                (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
            assert streamed.function.arguments == call.function.arguments
        broken: Any = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(**{**ask, "tools": broken, "tool_choice": "required"})


def killed_in_the_middle(server: Serving, body: dict[str, Any], prompts: list[str], field: str = "prompt") -> list[str]:
    """Texts that are asked for alone, and then all at once while their worker is killed: they are the same."""
    url = f"{server.url}/v1/completions"
    alone = [httpx.post(url, json={**body, field: prompt}, timeout=300).json() for prompt in prompts]
    expected: list[str] = [answer["choices"][0]["text"] for answer in alone]
    texts, killed = [""] * len(prompts), False
    with httpx.stream("POST", url, json={**body, field: prompts, "stream": True}, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
            if not killed and all(len(text) > 60 for text in texts):
                os.kill(server.pid("worker"), signal.SIGKILL)
                killed = True
    assert killed
    assert texts == expected
    return texts


def test_a_killed_worker_changes_no_seeded_text(oracle: Oracle) -> None:
    """Six seeded texts, each asked for alone; then all at once, and their worker is killed in the middle. So are two with a grammar,
    whose matchers are rebuilt from their tokens, and two whose prompts are vectors.

    What was decoded one by one is then computed again in one prefill, beside others: the logits must be the same to the last bit.
    """
    body: dict[str, Any] = {"max_tokens": 48, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    flags = ("--kv-cache-memory", "512M", "--max-num-batched-tokens", "100", "--enable-prompt-embeds")
    with serving("--device", "cpu", *flags) as server:
        killed_in_the_middle(server, body, [oracle.vectors(text) for text in PROMPTS[4:6]], "prompt_embeds")
        killed_in_the_middle(server, body, PROMPTS[:6])
        constrained = {**body, "ignore_eos": False, "max_tokens": 120, "guided_regex": "([a-z]{2,7}[,;] ){18}[0-9]{3}"}
        for text in killed_in_the_middle(server, constrained, PROMPTS[6:8]):
            assert re.fullmatch(constrained["guided_regex"], text)
