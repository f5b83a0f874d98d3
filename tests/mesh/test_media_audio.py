"""Sounds in the chats of a mesh: its answers are transformers' own, whatever dies meanwhile, and a crafted file harms nobody."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from image_requests import LIMIT_S, ask, body, cached, ids_of, stream
from serving import Serving, serving
from small_hearer import Hearer, samples_of
from sound_files import base64_of, clip, crafted, readable, wav
from waiting import until

from meshlm import LLM, SamplingParams

pytestmark = pytest.mark.mesh
FLAGS = ("--max-model-len", "512", "--dtype", "float32", "--cpu-threads", "1", "--limit-mm-per-prompt", "audio=3")
seeds = itertools.count(1)
TOKENS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def hearer(tmp_path_factory: pytest.TempPathFactory) -> Hearer:
    return Hearer(tmp_path_factory.mktemp("hearing") / "model")


@pytest.fixture(scope="module")
def hearing(hearer: Hearer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    local = tmp_path_factory.mktemp("sounds")
    (local / "a.wav").write_bytes(wav(clip(77)))
    with serving(str(hearer.folder), *FLAGS, "--allowed-local-media-path", str(local)) as server:
        server.local = local  # type: ignore[attr-defined]
        yield server


def part(data: bytes, form: str = "wav", **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": form}, **more}


def url(address: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": address}}


def fresh(seconds: float = 0.4) -> bytes:
    """A clip that nobody has sent."""
    return wav(clip(next(seeds), seconds))


def right(hearer: Hearer, answer: httpx.Response, *files: bytes) -> None:
    """The answer is what these clips make it."""
    prompt, ids = ids_of(answer)
    assert ids == hearer.expected(prompt, ids, *files)


def test_clips_are_heard_in_their_order(hearing: Serving, hearer: Hearer) -> None:
    one, other, filed = fresh(), fresh(0.9), wav(clip(77))
    parts = (part(one), " and ", url(f"data:audio/wav;base64,{base64_of(other)}"), url(f"file://{hearing.local}/a.wav"))  # type: ignore[attr-defined]
    right(hearer, ask(hearing, "what is ", *parts, "?", **GREEDY), one, other, filed)
    right(hearer, ask(hearing, "what is ", part(other), " and ", part(one), "?", **GREEDY), other, one)
    right(hearer, ask(hearing, part(one), **GREEDY), one)


def test_the_same_clip_hits(hearing: Serving, hearer: Hearer) -> None:
    text, one, other = f"{next(seeds)} a text of some length that both requests have, ", fresh(), fresh()
    before = cached(ask(hearing, text, part(one), " what?", **GREEDY))
    again = ask(hearing, text, part(one), " what?", **GREEDY)
    another = ask(hearing, text, part(other), " what?", **GREEDY)
    assert before < 16
    assert cached(again) >= len(ids_of(again)[0]) - 32
    assert 16 <= cached(another) < cached(again), "the text hits, the clip does not"
    right(hearer, again, one)
    right(hearer, another, other)


def test_a_name_and_the_responses_api(hearing: Serving, hearer: Hearer) -> None:
    data = fresh()
    chat = ask(hearing, part(data, uuid="dog"), "what?", **GREEDY)
    right(hearer, chat, data)
    right(hearer, ask(hearing, {"type": "input_audio", "input_audio": None, "uuid": "dog"}, "who?", **GREEDY), data)
    unknown = ask(hearing, {"type": "input_audio", "input_audio": None, "uuid": "cat"}, "who?")
    assert (unknown.status_code, "is not known" in unknown.text) == (400, True)
    model = httpx.get(f"{hearing.url}/v1/models").json()["data"][0]["id"]
    parts = [part(data), {"type": "input_text", "text": "what?"}]
    asked = {"model": model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
    response = httpx.post(f"{hearing.url}/v1/responses", json=asked, timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


def test_the_openai_client_sends_a_clip(hearing: Serving) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", timeout=LIMIT_S)
    content: Any = [{"type": "text", "text": "what?"}, part(fresh())]
    model = client.models.list().data[0].id
    made = client.chat.completions.create(
        model=model, max_tokens=5, messages=[{"role": "user", "content": content}], modalities=["text"]
    )
    assert made.usage is not None
    assert made.usage.prompt_tokens > 20
    with pytest.raises(openai.BadRequestError, match="only text is supported"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], modalities=["text", "audio"]
        )


def test_what_it_does_not_hear(hearing: Serving) -> None:
    picture = ask(hearing, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "what?")
    assert (picture.status_code, "this model takes no image; it takes audio" in picture.text) == (400, True)
    film = ask(hearing, {"type": "video_url", "video_url": {"url": "http://a.example/b.mp4"}}, "what?")
    assert (film.status_code, "this model takes no video; it takes audio" in film.text) == (400, True)
    many = ask(hearing, *[part(fresh())] * 4)
    assert (many.status_code, "4 parts with audio; at most 3 (--limit-mm-per-prompt)" in many.text) == (400, True)
    odd = ask(hearing, part(fresh()), mm_processor_kwargs={"max_pixels": 1})
    assert (odd.status_code, "max_pixels is nothing that this model's processor knows" in odd.text) == (400, True)
    words = ask(hearing, part(fresh()), "and <|AUDIO|> as text")
    assert (words.status_code, "must not have the placeholder" in words.text) == (400, True)


def test_crafted_files_are_refused_and_harm_nobody(hearing: Serving, hearer: Hearer) -> None:
    data = fresh()
    right(hearer, ask(hearing, part(data), **GREEDY), data)
    pids = [one["pid"] for one in hearing.status()["processes"]]
    for name, (file, words) in crafted().items():
        answer = ask(hearing, part(file), "what?")
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert words in error["message"], name
        assert "messages[0].content[0].input_audio.data: " in error["message"], name
    for name, file in readable().items():
        answer = ask(hearing, part(file), "what?", **GREEDY)
        assert answer.status_code == 200, (name, answer.text)
        right(hearer, answer, file)
    assert pids == [one["pid"] for one in hearing.status()["processes"]]
    right(hearer, ask(hearing, part(data), "?", **GREEDY), data)


@pytest.mark.parametrize("role", ["media", "worker"])
def test_a_process_dies_while_a_clip_is_answered(hearing: Serving, hearer: Hearer, role: str) -> None:
    data, killed = fresh(), list[int]()

    def kill(count: int) -> None:
        if count >= 8 and not killed:
            killed.append(hearing.pid(role))
            os.kill(killed[0], signal.SIGKILL)

    asked = body("what is ", part(data), "?", count=40, **GREEDY)
    ids = stream(hearing, asked, kill)
    assert killed
    until(lambda: all(one["state"] == "ready" for one in hearing.status()["processes"]), limit_s=60)
    whole = ask(hearing, "what is ", part(data), "?", count=40, **GREEDY)
    right(hearer, whole, data)
    assert ids == ids_of(whole)[1]


def test_the_python_api(hearer: Hearer) -> None:
    one, other = wav(clip(301)), wav(clip(302, 0.9))
    first, second = samples_of(one), samples_of(other)
    placed = "a<|audio_bos|><|AUDIO|><|audio_eos|>b"
    llm = LLM(str(hearer.folder), max_model_len="512", dtype="float32", cpu_threads=1)
    try:

        def right_of(found: Any, *files: bytes) -> None:
            ids = found.outputs[0].token_ids
            assert ids == hearer.expected(found.prompt_token_ids, ids, *files)

        for value in (first, (first, 16_000), [(first, 16_000)], (np.round(first * 32768).astype(np.int16), 16_000)):
            right_of(llm.generate({"prompt": placed, "multi_modal_data": {"audio": value}}, TOKENS)[0], one)
        both = {"prompt": placed + placed, "multi_modal_data": {"audio": [(second, 16_000), first]}}
        right_of(llm.generate(both, TOKENS)[0], other, one)
        talk = [{"role": "user", "content": [{"type": "text", "text": "hear"}, part(other), part(one)]}]
        right_of(llm.chat(talk, TOKENS)[0], other, one)
        odd: list[tuple[Any, str]] = [
            (np.zeros((2, 50), "f4"), "must be one channel"),
            (np.zeros(5, "i8"), "must be an array of floats or int16"),
            ((first, 0), "must be an array of floats or int16, or that and its rate"),
            ("a.wav", "must be an array"),
            ([first, first], "1 placeholders for 2 audio clips"),
        ]
        for value, words in odd:
            with pytest.raises(ValueError, match=words):
                llm.generate({"prompt": placed, "multi_modal_data": {"audio": value}}, TOKENS)
        with pytest.raises(ValueError, match="this model takes no image"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}])
    finally:
        llm.shutdown()


def test_a_model_of_text_names_what_it_does_not_take(tmp_path: Path) -> None:
    with serving("--device", "fake") as server:
        answer = ask(server, part(fresh()), "what?")
        assert (answer.status_code, "parts of type 'input_audio' are not supported" in answer.text) == (400, True)
