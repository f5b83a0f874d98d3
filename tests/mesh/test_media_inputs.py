"""Images in other requests than chats: completions, questions about tokens, vectors. With the fake device, as test_media.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from image_files import data_url
from image_requests import FLAGS, LIMIT_S, ask, body, fresh, ids_of, part, placed, processor_of, right
from seeing_models import fake_answer, seeing_model
from serving import Serving, serving

from meshlm.mediaproc.processors import Processor

pytestmark = pytest.mark.mesh
MARK = "<|image_pad|>"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="session")
def processor(folder: Path) -> Processor:
    return processor_of(folder)


@pytest.fixture(scope="session")
def seeing(folder: Path) -> Iterator[Serving]:
    with serving(str(folder), *FLAGS, "--limit-mm-per-prompt", '{"image": 3}') as server:
        yield server


def post(server: Serving, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=LIMIT_S)


def complete(server: Serving, prompt: Any, data: Any, **more: Any) -> httpx.Response:
    fields = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "multi_modal_data": data, **more}
    return post(server, "/v1/completions", prompt=prompt, **fields)


def test_a_completion_has_images_where_its_prompt_has_placeholders(seeing: Serving, processor: Processor) -> None:
    one, other = fresh(), fresh((150, 40))
    right(processor, complete(seeing, f"what is {MARK}?", {"image": data_url(one)}), one)
    both = complete(seeing, f"{MARK} and {MARK}", {"image": [data_url(other), data_url(one)]})
    right(processor, both, other, one)
    ids, _ = ids_of(ask(seeing, "who?"))
    token = ids_of(complete(seeing, MARK, {"image": data_url(one)}))[0][0]
    with_ids = complete(seeing, [*ids, token], {"image": [data_url(one)]})
    prompt, answer = ids_of(with_ids)
    assert answer == fake_answer(prompt, placed(processor, prompt, one), 6)


def test_names_of_a_completions_images(seeing: Serving, processor: Processor) -> None:
    data = fresh()
    right(processor, complete(seeing, MARK, {"image": data_url(data)}, multi_modal_uuids={"image": "moon"}), data)
    again = complete(seeing, f"a {MARK}", {"image": [None]}, multi_modal_uuids={"image": ["moon"]})
    right(processor, again, data)
    chat = ask(seeing, {"type": "image_url", "image_url": None, "uuid": "moon"}, "who?")
    right(processor, chat, data)


URL = data_url(b"x")
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"multi_modal_data": {"image": URL}, "prompt": ["a", "b"]}, "multi_modal_data", "goes with one prompt"),
    ({"multi_modal_data": {"picture": URL}}, "multi_modal_data", "by modality"),
    ({"multi_modal_data": {"audio": URL}}, "multi_modal_data", "takes no audio"),
    ({"multi_modal_data": {"image": 7}}, "multi_modal_data", "must be a URL"),
    ({"multi_modal_data": {"image": "file:///etc/hostname"}}, "multi_modal_data", "--allowed-local-media-path"),
    ({"multi_modal_data": {"image": URL}, "multi_modal_uuids": {"image": ["a", "b"]}}, "multi_modal_uuids", "2 names"),
    ({"multi_modal_data": {"image": URL}, "multi_modal_uuids": {"video": "a"}}, "multi_modal_uuids", "by modality"),
    ({"multi_modal_uuids": {"image": "a"}}, "multi_modal_uuids", "goes with multi_modal_data"),
    ({"mm_processor_kwargs": {"max_pixels": 784}}, "mm_processor_kwargs", "goes with multi_modal_data"),
    ({"multi_modal_data": {"image": URL}, "use_beam_search": True, "n": 2}, "use_beam_search", "multi_modal_data"),
    ({"multi_modal_data": {"image": URL}, "suffix": "b"}, "suffix", "multi_modal_data"),
    ({"multi_modal_data": {"image": data_url(fresh())}, "prompt": "none"}, "prompt", "0 placeholders for 1 image"),
    ({"multi_modal_data": {"image": [URL] * 4}}, "multi_modal_data", "--limit-mm-per-prompt"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_is_refused_by_name(seeing: Serving, fields: dict[str, Any], param: str, words: str) -> None:
    answer = post(seeing, "/v1/completions", **{"prompt": MARK, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


def test_tokens_of_conversations_with_images_are_those_that_are_computed(seeing: Serving) -> None:
    data = fresh((150, 40))
    asked = body("what is ", part(data_url(data)), "?")
    prompt, _ = ids_of(ask(seeing, "what is ", part(data_url(data)), "?"))
    found = post(seeing, "/tokenize", messages=asked["messages"])
    assert found.status_code == 200, found.text
    assert (found.json()["tokens"], found.json()["count"]) == (prompt, len(prompt))
    smaller = post(seeing, "/tokenize", messages=asked["messages"], mm_processor_kwargs={"max_pixels": 784})
    assert smaller.json()["count"] < len(prompt)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(data).partition(",")[2]}
    text = [{"type": "text", "text": "what is "}, {"type": "image", "source": source}, {"type": "text", "text": "?"}]
    message = [{"role": "user", "content": text}]
    counted = post(seeing, "/v1/messages/count_tokens", model="m", messages=message)
    if counted.status_code == 404:
        name = httpx.get(f"{seeing.url}/v1/models").json()["data"][0]["id"]
        counted = post(seeing, "/v1/messages/count_tokens", model=name, messages=message)
    assert counted.json()["input_tokens"] == len(prompt)
    many = post(seeing, "/tokenize", messages=body(*[part(data_url(data))] * 4)["messages"])
    assert (many.status_code, "--limit-mm-per-prompt" in many.text) == (400, True)
    bad = post(seeing, "/tokenize", messages=body(part(URL))["messages"])
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


def test_a_conversation_with_images_is_not_rendered(seeing: Serving) -> None:
    answer = post(seeing, "/v1/chat/completions/render", **body(part(data_url(fresh()))))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_vectors_of_conversations_with_images(folder: Path) -> None:
    one, other = fresh(), fresh()
    with serving(str(folder), *FLAGS, "--runner", "pooling") as server:

        def embedded(data: bytes, path: str = "/v1/embeddings") -> Any:
            answer = post(server, path, messages=body("what is ", part(data_url(data)), "?")["messages"])
            assert answer.status_code == 200, answer.text
            found = answer.json()
            return found["data"][0]["embedding" if path == "/v1/embeddings" else "data"], found["usage"]

        first, usage = embedded(one)
        assert embedded(one)[0] == first
        assert embedded(one, "/pooling")[1]["prompt_tokens"] == usage["prompt_tokens"] > 20
        assert embedded(other)[0] != first
        several = [body(part(data_url(one)))["messages"]] * 2
        refused = post(server, "/v1/embeddings", messages=several)
        assert (refused.status_code, "one conversation" in refused.text) == (400, True)
