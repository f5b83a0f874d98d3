"""The Python API with images: in its forms they are what the processor makes of them, and a model's answers are transformers' own."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from image_files import data_url, file_of, picture
from image_requests import fresh, placed, processor_of
from PIL import Image
from seeing_models import IMAGE, fake_answer, seeing_model
from small_seer import Seer

from meshlm import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.mesh
BEFORE, AFTER = "<|vision_start|><|image_pad|><|vision_end|>", " what?"
TOKENS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def pillow(data: bytes) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": opened(data)}


def refusal(work: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        work()
    return str(error.value)


def test_images_in_all_forms(tmp_path: Path) -> None:
    folder = seeing_model(tmp_path / "model")
    processor, local = processor_of(folder), tmp_path / "images"
    local.mkdir()
    (local / "a.png").write_bytes(filed := fresh())
    one, other = fresh(), fresh((150, 40))
    llm = LLM(
        str(folder),
        load_format="dummy",
        device="fake",
        max_model_len="2048",
        allowed_local_media_path=str(local),
        limit_mm_per_prompt='{"image": 3}',
    )
    try:

        def right(found: Any, *files: bytes) -> None:
            prompt = found.prompt_token_ids
            assert found.outputs[0].token_ids == fake_answer(prompt, placed(processor, prompt, *files), 6)

        asked: list[Any] = [
            {"prompt": BEFORE + AFTER, "multi_modal_data": {"image": opened(one)}},
            "text alone",
            {"prompt": f"a{BEFORE}b{BEFORE}", "multi_modal_data": {"image": [opened(one), opened(other)]}},
            {"prompt_token_ids": [1, 2, IMAGE, 3], "multi_modal_data": {"image": [opened(other)]}},
        ]
        first, text, both, ids = llm.generate(asked, TOKENS)
        right(first, one)
        right(both, one, other)
        right(ids, other)
        assert len(text.outputs[0].token_ids) == 6
        named = {"prompt": BEFORE, "multi_modal_data": {"image": opened(one)}, "multi_modal_uuids": {"image": "sun"}}
        right(llm.generate(named, TOKENS)[0], one)
        right(llm.generate({**named, "prompt": f"b{BEFORE}", "multi_modal_data": {"image": None}}, TOKENS)[0], one)
        answers = llm.chat(
            [
                chat(url(data_url(one)), pillow(other), url(f"file://{local}/a.png")),
                chat(pillow(other), url(data_url(one))),
            ],
            TOKENS,
        )
        right(answers[0], one, other, filed)
        right(answers[1], other, one)
        assert "vision_start" in str(answers[0].prompt)
        assert llm.enqueue(asked[0], TOKENS) != llm.enqueue_chat(chat(pillow(other)), TOKENS)
        first, second = llm.wait_for_completion(use_tqdm=False)
        right(first, one)
        right(second, other)
        two = llm.generate(asked[0], SamplingParams(max_tokens=6, ignore_eos=True, n=2))[0]
        assert two.outputs[0].token_ids == two.outputs[1].token_ids
        large = llm.generate(asked[2], TOKENS, mm_processor_kwargs={"max_pixels": 28 * 28 * 4})[0]
        assert len(large.prompt_token_ids) < len(both.prompt_token_ids)
        image, beams = {"image": opened(one)}, BeamSearchParams(beam_width=2, max_tokens=2)
        refused = {
            "prompt: the prompt has 0 placeholders for 1 images: each image needs one": lambda: llm.generate(
                {"prompt": "a", "multi_modal_data": image}
            ),
            "--limit-mm-per-prompt": lambda: llm.generate(
                {"prompt": BEFORE * 4, "multi_modal_data": {"image": [opened(one)] * 4}}
            ),
            "nothing that this model's processor knows": lambda: llm.chat(
                chat(pillow(one)), mm_processor_kwargs={"nonsense": 1}
            ),
            "private network": lambda: llm.chat(chat(url("http://127.0.0.1:9/a.png"))),
            "no such file below": lambda: llm.chat(chat(url("file:///etc/hostname"))),
            "the uuid is not known": lambda: llm.generate(
                {"prompt": BEFORE, "multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": "dark"}}
            ),
            "beam search": lambda: llm.beam_search([{"prompt": BEFORE, "multi_modal_data": image}], beams),
            "must be an image of Pillow": lambda: llm.generate({"prompt": BEFORE, "multi_modal_data": {"image": "a"}}),
        }
        for words, work in refused.items():
            assert words in refusal(work), words
        # The media process dies before it has answered, and is asked again.
        pid = next(one.pid for one in llm._background.supervisor.status().processes if one.role == "media")
        os.kill(pid, signal.SIGSTOP)
        llm.enqueue({"prompt": BEFORE, "multi_modal_data": {"image": picture(9001)}}, TOKENS)
        os.kill(pid, signal.SIGKILL)
        right(llm.wait_for_completion(use_tqdm=False)[0], file_of(picture(9001)))
    finally:
        llm.shutdown()


def test_answers_are_transformers_own(tmp_path: Path) -> None:
    seer = Seer(tmp_path / "model")
    one, other = fresh(), fresh((150, 40))
    llm = LLM(str(seer.folder), max_model_len="512", dtype="float32")
    try:
        prompt = {"prompt": f"a{BEFORE}b{BEFORE}", "multi_modal_data": {"image": [opened(other), opened(one)]}}
        for found in (llm.generate(prompt, TOKENS)[0], llm.chat(chat(pillow(other), url(data_url(one))), TOKENS)[0]):
            tokens = found.outputs[0].token_ids
            assert tokens == seer.expected(found.prompt_token_ids, tokens, other, one)
    finally:
        llm.shutdown()


def test_a_model_that_does_not_see_says_so() -> None:
    llm = LLM(device="fake", max_model_len="512")
    try:
        image = {"prompt": "a", "multi_modal_data": {"image": picture()}}
        assert refusal(lambda: llm.generate(image)) == "multi_modal_data: this model has no vision"
        assert "parts of type 'image_url' are not supported" in refusal(lambda: llm.chat(chat(url("http://a/b"))))
        assert "mm_processor_kwargs: this model has no vision" in refusal(
            lambda: llm.generate("a", mm_processor_kwargs={"max_pixels": 1})
        )
    finally:
        llm.shutdown()
