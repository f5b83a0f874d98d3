"""Prompts of `LLM.generate`: nothing that they ask for is ignored."""

import numpy as np
import pytest
import torch

from meshlm.protocol.audio import Audio
from meshlm.protocol.edges.text import JoinedPrompt, MediaPrompt, TextPrompt, TokenPrompt
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.wire.columns import pack_i32
from meshlm.supervisor.api.offline_prompts import NOT_SUPPORTED, Given, many, of_generate, of_tokenization
from meshlm.supervisor.api.tokenizer import chat_prompt


def test_one_prompt_or_several() -> None:
    for one in ("a", {"prompt": "a"}, [1, 2], (1, 2)):
        assert many(one) == [one]
        assert many([one, one]) == [one, one]
    assert many([]) == []


@pytest.mark.parametrize(
    ("item", "given"),
    [
        ("a", Given(TextPrompt("a"), "a")),
        ([1, 2], Given(TokenPrompt(pack_i32([1, 2])), None)),
        ({"prompt": "a"}, Given(TextPrompt("a"), "a")),
        ({"prompt_token_ids": [1]}, Given(TokenPrompt(pack_i32([1])), None)),
        (
            {"prompt_token_ids": [1], "prompt": "a", "cache_salt": "s", "multi_modal_data": None},
            Given(TokenPrompt(pack_i32([1])), "a", "s"),
        ),
        ({"prompt": "a", "multi_modal_data": {}}, Given(TextPrompt("a"), "a")),
    ],
)
def test_what_is_a_prompt(item: object, given: Given) -> None:
    assert of_generate(item) == given


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_is_not_supported_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^a prompt's '{name}': not supported; "):
        of_generate({"prompt": "a", name: {"image": 1}})


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"prompt": "a", "max_tokens": 3}, "a prompt has no key 'max_tokens'"),
        ({}, "a prompt that is a dict needs"),
        ({"prompt": None}, "a prompt that is a dict needs"),
        ({"prompt": "a", "cache_salt": ""}, "a prompt's 'cache_salt'"),
        ({"prompt_token_ids": [1], "prompt": 5}, "a prompt's 'prompt': must be text"),
        (5, "a prompt is text, token ids"),
        ([1.5], "a prompt is text, token ids"),
        ([1 << 31], "a prompt is text, token ids"),
    ],
)
def test_what_is_no_prompt(item: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_generate(item)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vectors(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 8).to(dtype)
    sizes = (8, 100)
    given = of_generate({"prompt_embeds": rows[None, 1:], "prompt": "a", "cache_salt": "s"}, sizes=sizes)
    assert (given.text, given.cache_salt) == ("a", "s")
    assert isinstance(given.prompt, MediaPrompt)
    (embeds,) = given.prompt.media
    assert isinstance(embeds, PromptEmbeds)
    assert given.prompt.prompt == TokenPrompt(embeds.token_ids)
    assert torch.equal(torch.frombuffer(bytearray(embeds.data), dtype=dtype).view(-1, 8), rows[1:])
    assert of_generate({"prompt_embeds": rows[1:].T.contiguous().T}, sizes=sizes).prompt == given.prompt


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, 9), "have 9 numbers"),
        (torch.zeros(8), r"shape is \[8\]"),
        (torch.zeros(0, 8), "no vector"),
        (torch.zeros(2, 8, dtype=torch.int64), "int64"),
        ([[1.0] * 8], "tensor of torch"),
    ],
)
def test_what_are_no_vectors(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"'prompt_embeds': .*{said}"):
        of_generate({"prompt_embeds": value}, sizes=(8, 100))
    with pytest.raises(ValueError, match="enable_prompt_embeds"):
        of_generate({"prompt_embeds": value})


SAMPLES = np.array([0.5, -0.25, 0.0])
AUDIO = Audio(SAMPLES.astype(np.float32).tobytes())
IDS, START = TokenPrompt(pack_i32([1, 2])), JoinedPrompt((TextPrompt("<|start|>", False),))
AUDIO_DATA = {"audio": (SAMPLES, 16_000)}


@pytest.mark.parametrize(
    ("item", "given"),
    [
        ({"prompt": "<|start|>", "multi_modal_data": AUDIO_DATA}, Given(MediaPrompt(START, (AUDIO,)), "<|start|>")),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"audio": SAMPLES}}, Given(MediaPrompt(IDS, (AUDIO,)), None)),
        (
            {"prompt_token_ids": [1, 2], "multi_modal_data": {"audio": [AUDIO_DATA["audio"]]}},
            Given(MediaPrompt(IDS, (AUDIO,)), None),
        ),
        (
            {"encoder_prompt": {"prompt": "", "multi_modal_data": AUDIO_DATA}, "decoder_prompt": "<|start|>"},
            Given(MediaPrompt(START, (AUDIO,)), "<|start|>"),
        ),
        (
            {"encoder_prompt": {"multi_modal_data": AUDIO_DATA}, "decoder_prompt": {"prompt_token_ids": [1, 2]}},
            Given(MediaPrompt(IDS, (AUDIO,)), None),
        ),
        (
            {"encoder_prompt": {"multi_modal_data": AUDIO_DATA}, "decoder_prompt": [1, 2]},
            Given(MediaPrompt(IDS, (AUDIO,)), None),
        ),
    ],
)
def test_sounds(item: object, given: Given) -> None:
    assert of_generate(item) == given


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            {"prompt": "a", "multi_modal_data": {"smell": 1}},
            "must be a dict with 'image', 'video' or 'audio', and nothing else",
        ),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1, "audio": 1}},
            "must be a dict with 'image', 'video' or 'audio', and",
        ),
        ({"prompt": "a", "multi_modal_data": [SAMPLES]}, "'multi_modal_data': must be a dict with 'image', 'video' or"),
        ({"prompt": "a", "multi_modal_data": {"audio": (SAMPLES, 8000)}}, "'audio': its rate is 8000"),
        ({"prompt": "a", "multi_modal_data": {"audio": SAMPLES[None]}}, "'audio': must be one channel"),
        ({"prompt": "a", "multi_modal_data": {"audio": SAMPLES[:0]}}, "'audio': must be one channel"),
        ({"prompt": "a", "multi_modal_data": {"audio": [np.nan, 1.0]}}, "'audio': must be one channel of finite"),
        ({"prompt": "a", "multi_modal_data": {"audio": "talk.wav"}}, "'audio': must be an array"),
        ({"multi_modal_data": AUDIO_DATA}, "a prompt that is a dict needs"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "'encoder_prompt': must be a dict with 'multi_modal_data'"),
        ({"encoder_prompt": {"prompt": "a"}, "decoder_prompt": "b"}, "'encoder_prompt': must be a dict"),
        ({"encoder_prompt": {}, "decoder_prompt": "b", "prompt": "c"}, "a prompt's 'prompt': beside 'encoder_prompt'"),
    ],
)
def test_what_are_no_sounds(item: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_generate(item)


def test_what_the_tokenizer_is_told() -> None:
    assert of_tokenization(None) == ({}, None)
    assert of_tokenization({"add_special_tokens": False}) == ({"add_special_tokens": False}, None)
    given = {"add_special_tokens": True, "truncate_prompt_tokens": 3}
    assert of_tokenization(given) == ({"add_special_tokens": True}, 3)
    assert given["truncate_prompt_tokens"] == 3, "the caller's is changed"
    assert of_generate("a", add_special_tokens=False).prompt == TextPrompt("a", False)
    with pytest.raises(ValueError, match="tokenization_kwargs: 'padding'"):
        of_tokenization({"padding": True})


def test_parts_that_no_template_could_show_are_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(ValueError, match="parts of type 'image_url' are not supported"):
        chat_prompt([{"role": "user", "content": [part]}], None, None, None, True, False)
