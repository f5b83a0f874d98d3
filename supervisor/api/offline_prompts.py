"""The prompts of `LLM.generate` as the mesh takes them. Pure; used by llm.py. ValueError names what is no prompt, or not supported."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshlm.protocol.audio import SAMPLE_RATE, Audio
from meshlm.protocol.edges.text import JoinedPrompt, MediaPrompt, Prompt, TextPrompt, TokenPrompt
from meshlm.protocol.extras import Extras
from meshlm.protocol.prompt_embeds import ITEM_BYTES
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime import tensor_files
from meshlm.supervisor.api import media as of_media
from meshlm.supervisor.api.media import MediaInputs

GIVEN = ("prompt_embeds", "prompt_token_ids", "prompt")  # the first that is there counts
OnePrompt = str | Sequence[int] | Mapping[str, Any]
Prompts = OnePrompt | Sequence[OnePrompt]
Texts = str | Sequence[str]
Sizes = tuple[int, int]  # hidden_size and vocab_size, against which a prompt of vectors is checked
NOT_SUPPORTED = {
    "multi_modal_uuids": "it names items of 'multi_modal_data', which there is not",
    "mm_processor_kwargs": "there is no image in the prompt",
    "prompt_is_token_ids": "a prompt is text, token ids or vectors",
    "token_type_ids": "LLM.score gives a pair's texts their types",
}


class Given(NamedTuple):
    """One prompt; `text` is what RequestOutput.prompt says."""

    prompt: Prompt
    text: str | None
    cache_salt: str = ""
    extras: Extras = ()
    media: MediaInputs = ()  # whose items come to the prompt when they are made


class Asked(NamedTuple):
    """Prompts that were given together. keep: truncate each to so many tokens."""

    prompts: Iterator[Given]
    num: int
    keep: int | None

    def with_extras(self, each: Sequence[Extras]) -> "Asked":
        """The prompts, each of which carries these."""
        made = (given._replace(extras=extras) for given, extras in zip(self.prompts, each, strict=True))
        return self._replace(prompts=made)


def many(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def of_generate(
    item: Any,
    *,
    add_special_tokens: bool = True,
    sizes: Sizes | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    hears: bool = False,
) -> Given:
    """Text, token ids, or a dict of either, or of vectors [tokens, hidden]. sizes: None where no vectors are taken. hears: clips are
    among the prompt, as images are; else one is all that a speech-to-text model is given."""
    if not isinstance(item, Mapping):
        prompt = _prompt(item, add_special_tokens)
        return Given(prompt, prompt.text if isinstance(prompt, TextPrompt) else None)
    if "encoder_prompt" in item or "decoder_prompt" in item:
        item = _of_both(item)
    if data := item.get("multi_modal_data"):
        rest = {name: value for name, value in item.items() if name != "multi_modal_data"}
        if isinstance(data, Mapping) and data.keys() <= {"image", "video", *(("audio",) if hears else ())}:
            return _of_media(rest, data, add_special_tokens, mm_processor_kwargs)
        return _of_audio(rest, data)
    for name, value in item.items():
        if name in NOT_SUPPORTED and value is not None and not (isinstance(value, Mapping | list) and not value):
            raise ValueError(f"a prompt's {name!r}: not supported; {NOT_SUPPORTED[name]}")
        if name not in NOT_SUPPORTED and name not in (*GIVEN, "cache_salt", "multi_modal_data"):
            raise ValueError(f"a prompt has no key {name!r}; it has 'prompt' or 'prompt_token_ids', and 'cache_salt'")
    given = [(name, item[name]) for name in GIVEN if item.get(name) is not None]
    if not given:
        raise ValueError("a prompt that is a dict needs 'prompt' or 'prompt_token_ids'")
    salt = item.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError("a prompt's 'cache_salt': must be text, and not empty")
    text = item.get("prompt")
    if not isinstance(text, str | None):
        raise ValueError("a prompt's 'prompt': must be text")
    name, value = given[0]
    prompt = _vectors(value, sizes) if name == "prompt_embeds" else _prompt(value, add_special_tokens)
    return Given(prompt, text, salt or "")


def _of_both(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an encoder and a decoder get, as one prompt: the audio of the one, and text or ids of the other."""
    if more := item.keys() - {"encoder_prompt", "decoder_prompt"}:
        raise ValueError(f"a prompt's {min(more)!r}: beside 'encoder_prompt' and 'decoder_prompt' there is nothing")
    of_encoder, of_decoder = item.get("encoder_prompt"), item.get("decoder_prompt")
    if not isinstance(of_encoder, Mapping) or of_encoder.get("prompt") or of_encoder.get("prompt_token_ids"):
        raise ValueError("a prompt's 'encoder_prompt': must be a dict with 'multi_modal_data' and an empty 'prompt'")
    if isinstance(of_decoder, Mapping):
        found = dict(of_decoder)
    else:
        found = {"prompt" if isinstance(of_decoder, str) else "prompt_token_ids": of_decoder}
    return {**found, "multi_modal_data": of_encoder.get("multi_modal_data")}


def _of_media(
    item: dict[str, Any], data: Mapping[str, Any], add_special_tokens: bool, kwargs: Mapping[str, Any] | None
) -> Given:
    """A prompt in which the model's placeholders stand for images and clips."""
    kwargs_json = of_media.kwargs_json(kwargs, item.pop("mm_processor_kwargs", None))
    uuids = item.pop("multi_modal_uuids", None)
    given = of_generate(item, add_special_tokens=add_special_tokens)
    if not isinstance(given.prompt, TextPrompt | TokenPrompt):
        raise ValueError("a prompt's 'multi_modal_data': goes with 'prompt' or 'prompt_token_ids'")
    return given._replace(media=of_media.of_data(data, kwargs_json, uuids))


def _of_audio(item: Mapping[str, Any], data: Any) -> Given:
    """An audio clip, and what stands before the text that is written of it, without special tokens that nobody named."""
    if not isinstance(data, Mapping) or data.keys() != {"audio"}:
        raise ValueError(
            "a prompt's 'multi_modal_data': must be a dict with 'image', 'video' or 'audio', and nothing else"
        )
    given = of_generate(item, add_special_tokens=False)
    if not isinstance(given.prompt, TextPrompt | TokenPrompt):
        raise ValueError("a prompt's 'multi_modal_data': goes with 'prompt' or 'prompt_token_ids'")
    prompt = given.prompt if isinstance(given.prompt, TokenPrompt) else JoinedPrompt((given.prompt,))
    return given._replace(prompt=MediaPrompt(prompt, (_audio(data["audio"]),)))


def _audio(audio: Any) -> Audio:
    """An array of samples, or such an array and its rate."""
    import numpy as np

    if isinstance(audio, list) and len(audio) == 1:
        audio = audio[0]
    samples, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise ValueError(f"a prompt's 'audio': its rate is {rate}; give it at {SAMPLE_RATE} samples a second")
    try:
        found = np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        raise ValueError("a prompt's 'audio': must be an array of samples, or that and its rate") from None
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise ValueError("a prompt's 'audio': must be one channel of finite samples, and not empty")
    return Audio(found.astype("<f4").tobytes())


def _vectors(tensor: Any, sizes: Sizes | None) -> MediaPrompt:
    if sizes is None:
        why = "not taken here; LLM(enable_prompt_embeds=True).generate takes them"
        raise ValueError(f"a prompt's 'prompt_embeds': {why}")
    try:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape[1:] if tensor.ndim == 3 and tensor.shape[0] == 1 else tensor.shape)
        if dtype not in ITEM_BYTES:
            raise tensor_files.NotATensor(f"its dtype is {dtype}, and should be float32, float16 or bfloat16")
        raw = tensor.detach().cpu().contiguous().view(-1).view(_torch_bytes(tensor)).numpy().tobytes()
        return tensor_files.prompt_of(tensor_files.embeds_of_rows(raw, dtype, shape, *sizes))
    except AttributeError:
        raise ValueError("a prompt's 'prompt_embeds': must be a tensor of torch") from None
    except tensor_files.NotATensor as error:
        raise ValueError(f"a prompt's 'prompt_embeds': {error}") from None


def _torch_bytes(tensor: Any) -> Any:
    """torch.uint8, which numpy knows as well; torch itself is the caller's and is not imported here."""
    return sys.modules[type(tensor).__module__.partition(".")[0]].uint8


def of_tokenization(given: Mapping[str, Any] | None) -> tuple[dict[str, Any], int | None]:
    """The supported settings of tokenization_kwargs: those of the text, and how many tokens to keep of each prompt."""
    known = ("add_special_tokens", "truncate_prompt_tokens")
    options = dict(given or {})
    for name in options:
        if name not in known:
            raise ValueError(f"tokenization_kwargs: {name!r} is not supported; {' and '.join(known)} are")
    return options, options.pop("truncate_prompt_tokens", None)


def _prompt(item: Any, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens)
    try:
        return TokenPrompt(pack_i32(item))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a prompt is text, token ids, or a dict of either: {error}") from None
