"""Small models that hear, with random weights: transformers' real processors, transformers' own model, and items as the media process
makes them: a processor is given an item's placeholder alone, and the ids that it gives stand for the item."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from media_processors import WORDS
from msgspec.structs import replace
from numpy.typing import NDArray
from small_models import GEMMA4, SMALL

from meshlm.protocol.media import Media, MediaDType, MediaItem, MediaTensor, Modality

RATE = 16_000
MELS = 16
Clip = NDArray[np.float32]
AUDIO, IMAGE = "<audio>", "<image>"
NAMED = {"audio_token": AUDIO, "image_token": IMAGE, "video_token": "<video>", "audio_bos_token": "<boa>"}
NAMED |= {"audio_eos_token": "<eoa>", "vision_bos_token": "<boi>", "vision_eos_token": "<eoi>"}
NAMED |= {"boa_token": "<boa>", "eoa_token": "<eoa>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
IDS = {name: WORDS + nth for nth, name in enumerate(dict.fromkeys(NAMED.values()))}
_NOT_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Case(NamedTuple):
    architecture: str
    text: dict[str, Any]
    audio: dict[str, Any]
    more: dict[str, Any]  # of the outer configuration
    processor: Callable[[Any], Any]  # of a tokenizer
    sees: bool = False
    begin: str = ""  # what stands around a placeholder in prompts
    end: str = ""
    pages: int = 22  # of a KV cache that is too small for several prompts at once


def tokenizer() -> Any:
    import transformers

    words = tokenizers.models.WordLevel({f"w{nth}": nth for nth in range(WORDS)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in IDS])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=NAMED, pad_token="w0")


def _features(seconds: int = 1) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=seconds)


def _qwen2_audio(words: Any) -> Any:
    from transformers import Qwen2AudioProcessor

    return Qwen2AudioProcessor(_features(), words)


def _flamingo(words: Any) -> Any:
    from transformers import AudioFlamingo3Processor

    return AudioFlamingo3Processor(_features(), words, audio_token=AUDIO, max_audio_len=4)


def _voxtral(words: Any) -> Any:
    """Its own call leaves sounds to mistral-common's tokenizer, so the class has the call that others have."""
    from transformers import VoxtralProcessor

    from meshlm.mediaproc.windows import windowed

    class Called(VoxtralProcessor):  # type: ignore[misc]
        def __call__(self, text: list[str], audio: Any = (), **given: Any) -> Any:
            found, clips = text[0].split(AUDIO), [windowed(self, one, CASES["voxtral"].audio) for one in audio]
            whole = found[0] + "".join(
                f"{AUDIO * one.num_tokens}{rest}" for one, rest in zip(clips, found[1:], strict=True)
            )
            features = {"input_features": torch.cat([torch.from_numpy(one.features) for one in clips])} if clips else {}
            return {**self.tokenizer([whole], return_tensors="pt"), **features}

    return Called(_features(), words)


def _omni(words: Any) -> Any:
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideo(Qwen2_5OmniProcessor):  # type: ignore[misc]
        """Its processor of videos needs torchvision."""

        def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
            return type(given)

    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=64 * 24)
    return WithoutVideo(images, None, _features(3), words)


def _gemma4(name: str) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        import transformers
        from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
        from transformers.models.gemma4_unified import feature_extraction_gemma4_unified as unified

        kind: Any = getattr(transformers, name)
        without_video = type(name, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
        own = unified.Gemma4UnifiedAudioFeatureExtractor if "Unified" in name else Gemma4AudioFeatureExtractor
        return without_video(own(), Gemma4ImageProcessorPil(), words, None)

    return made


_TOWER: dict[str, Any] = {
    "num_mel_bins": MELS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}
_TOWER |= {"max_source_positions": 50, "initializer_range": 0.2}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "depth": 4,
    "out_hidden_size": 48,
}
_VISION |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16}
_VISION |= {"fullatt_block_indexes": [1, 3], "initializer_range": 0.2}
CASES: dict[str, Case] = {
    "qwen2-audio": Case(
        "Qwen2AudioForConditionalGeneration", {"model_type": "qwen2"}, _TOWER, {}, _qwen2_audio, begin="<boa>", end="<eoa>"
    ),
    "audio-flamingo-3": Case(
        "AudioFlamingo3ForConditionalGeneration", {"model_type": "qwen2"}, _TOWER, {}, _flamingo
    ),
    "gemma4-e2b": Case(
        "Gemma4ForConditionalGeneration",
        GEMMA4["gemma4-e2b"][1] | {"pad_token_id": 5},
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 12}
        | {"subsampling_conv_channels": [128, 4], "attention_chunk_size": 6, "attention_context_left": 4},
        {"vision_config": None, "tie_word_embeddings": True},
        _gemma4("Gemma4Processor"),
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedForConditionalGeneration",
        GEMMA4["gemma4-dense"][1] | {"pad_token_id": 0},
        {},
        {"vision_config": None, "tie_word_embeddings": True},
        _gemma4("Gemma4UnifiedProcessor"),
        pages=30,
    ),
    "voxtral": Case(
        "VoxtralForConditionalGeneration",
        {"model_type": "llama"},
        {"num_mel_bins": MELS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"intermediate_size": 64, "max_source_positions": 50, "initializer_range": 0.2},
        {},
        _voxtral,
        begin="<boa>",
        pages=34,
    ),
    "qwen2.5-omni": Case(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {"rope_parameters": _AXES},
        _TOWER | {"max_source_positions": 200, "n_window": 20, "output_dim": 48},
        {"initializer_range": 0.2, "vision_config": _VISION, "audio_start_token_id": IDS["<boa>"], "audio_end_token_id": IDS["<eoa>"]}
        | {"vision_start_token_id": IDS["<boi>"], "vision_end_token_id": IDS["<eoi>"]},
        _omni,
        sees=True,
        begin="<boa>",
        end="<eoa>",
    ),
}  # fmt: skip


class Hearing:
    """A model in a folder, transformers' own beside it, and prompts with clips (and images) for both."""

    def __init__(self, case: Case, folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        self.case, self.folder = case, folder
        text = {**SMALL, "max_position_embeddings": 1024, "initializer_range": 0.2, **case.text}
        kind: Any = getattr(transformers, case.architecture)
        tokens = {"audio_token_id": IDS[AUDIO]} | ({"image_token_id": IDS[IMAGE]} if case.sees else {})
        config = kind.config_class(text_config=text, audio_config=case.audio, **tokens, **case.more)
        self.theirs = kind._from_config(config, attn_implementation="eager").eval().float()
        self.theirs.get_input_embeddings().weight.data *= 0.1
        head = self.theirs.get_output_embeddings().weight.data
        head[list(IDS.values())] = 0  # no answer has a placeholder, for which transformers would want a clip
        for name, parameter in self.theirs.named_parameters():
            if (
                any(part in name for part in ("audio_tower", "projector", "embed_audio"))
                and "positions" not in name
                and parameter.dim() > 1
            ):
                parameter.data.normal_(0, 0.25)  # that a clip changes the answer
            if name.endswith(("norm.weight", ".bias")):
                parameter.data += torch.randn_like(parameter) * 0.1
        self.theirs.save_pretrained(folder)
        self._words = tokenizer()
        self.processor = case.processor(self._words)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))

    def item(self, given: Any) -> MediaItem:
        """As the media process leaves it in its file. given: a clip, or an image."""
        is_audio = isinstance(given, np.ndarray)
        placeholder = AUDIO if is_audio else IMAGE
        out = self.given(placeholder, [given])
        ids = out["input_ids"][0].numpy().astype(np.int32)
        values = {
            name: value.numpy() for name, value in out.items() if name not in _NOT_TENSORS and torch.is_tensor(value)
        }
        digest = hashlib.sha256(b"".join(value.tobytes() + repr(value.shape).encode() for value in values.values()))
        path, data, tensors = self.folder / f"{digest.hexdigest()}.media", b"", list[MediaTensor]()
        for name, value in values.items():
            dtype: MediaDType = str(value.dtype)  # type: ignore[assignment]
            tensors.append(MediaTensor(name, dtype, value.shape, len(data)))
            data += value.tobytes()
        path.write_bytes(data)
        is_vector = (ids == IDS[placeholder]).astype(np.uint8).tobytes()
        grid = (1, 1, is_vector.count(1))
        if not is_audio:
            frames, rows, columns = values["image_grid_thw"][0].tolist()
            grid = frames, rows // 2, columns // 2
        modality = Modality.AUDIO if is_audio else Modality.IMAGE
        return MediaItem(
            modality, digest.digest(), ids.tobytes(), is_vector, -1, grid, str(path), tuple(tensors)
        )  # fmt: skip

    def prompt(self, text: str, given: list[Any]) -> tuple[list[int], Media | None]:
        """The ids of a text with placeholders, as the detokenizer expands it: they are the processor's own of the whole prompt."""
        ids, items = list[int](), list[MediaItem]()
        waiting = [self.item(one) for one in given]
        for word in self.spelled(text).split():
            if word not in (AUDIO, IMAGE):
                ids += self._words(word, add_special_tokens=False)["input_ids"]
                continue
            items.append(replace(waiting.pop(0), position=len(ids)))
            ids += np.frombuffer(items[-1].replacement, np.int32).tolist()
        assert ids == self.given(self.spelled(text), given)["input_ids"][0].tolist()
        return ids, Media(tuple(items)) if items else None

    def spelled(self, text: str) -> str:
        """The text with what the model's template has around placeholders."""
        text = text.replace(AUDIO, f" {self.case.begin} {AUDIO} {self.case.end} ")
        return text.replace(IMAGE, f" <boi> {IMAGE} <eoi> ")

    def given(self, text: str, given: list[Any]) -> Any:
        clips = [one for one in given if isinstance(one, np.ndarray)]
        images = [one for one in given if not isinstance(one, np.ndarray)]
        beside = {"images": images} if images else {}
        if not clips:
            return self.processor(text=[text], return_tensors="pt", **beside)
        if self.case.architecture.startswith("AudioFlamingo3") and len(clips) != 1:  # takes one clip of a text
            return self._one_by_one(text, clips)
        return self.processor(text=[text], audio=clips, sampling_rate=RATE, return_tensors="pt", **beside)

    def _one_by_one(self, text: str, clips: list[Clip]) -> Any:
        """What the processor makes of each clip, joined."""
        each = [self.processor(text=[AUDIO], audio=[clip], sampling_rate=RATE) for clip in clips]
        first, *others = text.split(AUDIO)
        lengths = [one["input_ids"].shape[1] for one in each]
        whole = first + "".join(f"{AUDIO * length}{other}" for length, other in zip(lengths, others, strict=True))
        found = dict(self._words([whole], return_tensors="pt"))
        for name in ("input_features", "input_features_mask"):
            found[name] = torch.cat([one[name] for one in each])
        return found

    def logits(self, text: str, given: list[Any], tokens: list[int]) -> torch.Tensor:
        """transformers' own of a prompt, as its processor gives it, and these tokens behind: [1 + tokens, vocab]."""
        out = dict(self.given(self.spelled(text), given))
        length = out["input_ids"].shape[1]
        behind = {"input_ids": torch.tensor([tokens]).long(), "attention_mask": torch.ones(1, len(tokens)).long()}
        for name, value in behind.items():
            out[name] = torch.cat((out[name], value.to(out[name].dtype)), dim=1)
        for name in [name for name in _NOT_TENSORS if name not in behind]:
            out.pop(name, None)
        if hasattr(self.theirs.model, "rope_deltas"):
            self.theirs.model.rope_deltas = None
        with torch.no_grad():
            found: torch.Tensor = self.theirs(**out).logits[0, length - 1 :]
        return found


def clip(seed: int, num_samples: int) -> Clip:
    """A chord of some notes with noise: no two are alike."""
    generator = np.random.default_rng(seed)
    times = np.arange(num_samples) / RATE
    notes = generator.uniform(100, 4000, 4)
    sound = np.sin(2 * np.pi * np.outer(notes, times)).mean(axis=0) + generator.normal(0, 0.05, num_samples)
    found: Clip = sound.astype(np.float32)
    return found
