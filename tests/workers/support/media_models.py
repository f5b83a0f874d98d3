"""Small models that see, with random weights: transformers' real processors, transformers' own model, and items as the media process
makes them: a processor is given an item's placeholder alone, and the ids that it gives stand for the item."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from small_models import GEMMA4, MOE, SMALL

from meshlm.protocol.media import Media, MediaItem, MediaTensor, Modality

Image: Any = pytest.importorskip("PIL.Image", reason="Pillow is what processors read images with")
WORDS = 120  # ids of words: w0, w1 ... behind them stand those of special tokens
LENGTH = 256
IMAGE = "<image>"
_NAMES: tuple[str, ...] = (
    "<image>",
    "<video>",
    "<boi>",
    "<eoi>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<fake_token_around_image>",
)
_NAMES += (
    *("<audio>", "<boa>", "<eoa>"),
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
)
IDS = {name: WORDS + nth for nth, name in enumerate(_NAMES)}
_NOT_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Case(NamedTuple):
    architecture: str
    config: str
    text: dict[str, Any]
    vision: dict[str, Any]
    more: dict[str, Any]  # of the outer configuration
    processor: Callable[[Any], Any]  # of a tokenizer
    merge: int = 0  # patches of a side that are a vector, where items have grids
    sees: tuple[str, ...] = ("image_token_id",)  # keys of the configuration that name the placeholder
    uncut: bool = False
    placeholder: str = IMAGE  # what a chat template renders for an image
    vector: str = IMAGE  # in whose places vectors come


def tokenizer() -> Any:
    import transformers

    words = tokenizers.models.WordLevel({f"w{nth}": nth for nth in range(WORDS)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in IDS])
    named = {"image_token": IMAGE, "video_token": "<video>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    named |= {"start_image_token": "<boi>", "end_image_token": "<eoi>", "context_image_token": IMAGE}
    named |= {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
    named["img_line_break_token"] = "[IMG_BREAK]"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<end_of_utterance>", extra_special_tokens=named
    )


def _without_video(name: str) -> Any:
    """A processor of transformers that does not insist on the processor of videos, which needs torchvision."""
    import transformers

    kind: Any = getattr(transformers, name)
    return type(name, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})


def _qwen(name: str) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        images = Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=64 * 24)
        return _without_video(name)(images, words, None)

    return made


def _glm(name: str) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        size = {"shortest_edge": 64, "longest_edge": 2 * 64 * 24}  # of two frames
        images = Glm4vImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
        return _without_video(name)(images, words, None)

    return made


def _deepseek(words: Any) -> Any:
    from transformers import DeepseekVLProcessor
    from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

    images = DeepseekVLImageProcessorPil(size={"height": 16, "width": 16}, min_size=4)
    return DeepseekVLProcessor(images, words, num_image_tokens=16)


def _tiles(name: str, **options: Any) -> Callable[[Any], Any]:
    """Processors whose own readers of images need torchvision get others' tiles: of the same size, cut in one row."""

    def made(words: Any) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        class Tiles(GotOcr2ImageProcessorPil):  # type: ignore[misc, unused-ignore]
            patch_size = 2

            def preprocess(self, images: Any, **kwargs: Any) -> Any:
                out = super().preprocess(images, **kwargs)
                if name == "Llama4Processor":
                    out["aspect_ratios"] = [(1, max(1, int(count) - 1)) for count in out.pop("num_patches")]
                return out

        images = Tiles(size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=3)
        return _without_video(name)(images, words, **options)

    return made


def _llava(words: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaProcessor(images, words, 4, "default", num_additional_image_tokens=1)


def _gemma3(words: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), words, image_seq_length=4)


def _gemma4(name: str, *, patch: int, pooling: int) -> Callable[[Any], Any]:
    """The processor of Gemma 4 Unified gets Gemma 4's images, of whole patches: its own needs torchvision."""

    def made(words: Any) -> Any:
        from transformers.models.gemma4 import image_processing_pil_gemma4 as own

        setattr(own, "_SUPPORTED_SOFT_TOKENS", (14,))  # noqa: B010 - it takes 70 at the least
        images = own.Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=pooling, max_soft_tokens=14)
        return _without_video(name)(None, images, words, None)

    return made


def _idefics3(words: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, words, image_seq_len=4)


def _internvl(words: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    sizes: dict[str, Any] = {"size": {"height": 16, "width": 16}, "crop_to_patches": True}
    images = GotOcr2ImageProcessorPil(**sizes, min_patches=1, max_patches=3)
    return _without_video("InternVLProcessor")(images, words, None, image_seq_length=4)


def _pixtral(words: Any) -> Any:
    pytest.importorskip("torchvision", reason="transformers' processor of Pixtral wants it")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    return PixtralProcessor(images, words, patch_size=4, spatial_merge_size=2, image_token=IMAGE)


def _onevision(words: Any) -> Any:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    images = LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=_TILES)
    return _without_video("LlavaOnevisionProcessor")(images, words, None, 16, "full")


def _llava_next(words: Any) -> Any:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=_TILES)
    return LlavaNextProcessor(images, words, 4, "default", num_additional_image_tokens=1)


_BOTH = ("image_token_id", "image_token_index")
_TILES = [[16, 16], [16, 32], [32, 16]]
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WIDE = {"head_dim": 16, "rope_parameters": _AXES | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "initializer_range": 0.2}
_QWEN = _TOWER | {"depth": 4, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4, "temporal_patch_size": 2}
_QWEN |= {"spatial_merge_size": 2}
_QWEN3 = _QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
_SQUARE = _TOWER | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
_GEMMA4 = _TOWER | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
_GEMMA4 |= {"pooling_kernel_size": 2, "position_embedding_size": 24}
_HEARS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_GLM: dict[str, Any] = {"head_dim": 16, "rope_parameters": _AXES | {"partial_rotary_factor": 0.5}}
_GLM_DENSE = {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": _GLM["rope_parameters"]}
_GLM_TOWER = _TOWER | {"depth": 2, "num_heads": 2, "image_size": 16, "patch_size": 4, "out_hidden_size": 48}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_DELTA: dict[str, Any] = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"rope_parameters": _AXES | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
CASES: dict[str, Case] = {
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"rope_parameters": _AXES},
        _QWEN | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
        {"tie_word_embeddings": True},
        _qwen("Qwen2_5_VLProcessor"),
        merge=2,
    ),
    "qwen2-vl": Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"rope_parameters": _AXES},
        {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 2, "patch_size": 4}
        | {"initializer_range": 0.2},
        {},
        _qwen("Qwen2VLProcessor"),
        merge=2,
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _WIDE, _QWEN3, {}, _qwen("Qwen3VLProcessor"), merge=2
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        _WIDE | _EXPERTS,
        _QWEN3,
        {},
        _qwen("Qwen3VLProcessor"),
        merge=2,
    ),
    "qwen3.5": Case(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        _DELTA,
        _QWEN | {"num_position_embeddings": 36},
        {},
        _qwen("Qwen3VLProcessor"),
        merge=2,
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 20},
        _QWEN | {"num_position_embeddings": 36},
        {"tie_word_embeddings": True},
        _qwen("Qwen3VLProcessor"),
        merge=2,
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "clip_vision_model"},
        {},
        _llava,
        sees=_BOTH,
    ),
    "llava-next": Case(
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "clip_vision_model"},
        {"image_grid_pinpoints": _TILES},
        _llava_next,
        sees=_BOTH,
    ),
    "llava-onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionConfig",
        {"model_type": "qwen2"},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"image_grid_pinpoints": _TILES},
        _onevision,
        sees=_BOTH,
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "boi_token_index": IDS["<boi>"], "eoi_token_index": IDS["<eoi>"]}
        | {"tie_word_embeddings": True},
        _gemma3,
        sees=_BOTH,
        uncut=True,
        placeholder="<boi>",
    ),
    "gemma4-e2b": Case(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        GEMMA4["gemma4-e2b"][1] | {"pad_token_id": 5},
        _GEMMA4 | {"use_clipped_linears": True},
        {"audio_config": _HEARS, "tie_word_embeddings": True},
        _gemma4("Gemma4Processor", patch=4, pooling=2),
    ),
    "gemma4-26b": Case(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        GEMMA4["gemma4-moe"][1] | {"use_bidirectional_attention": "vision", "sliding_window": 5, "pad_token_id": 0},
        _GEMMA4 | {"standardize": True},
        {"audio_config": None, "tie_word_embeddings": True},
        _gemma4("Gemma4Processor", patch=4, pooling=2),
        uncut=True,
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4UnifiedConfig",
        GEMMA4["gemma4-dense"][1] | {"pad_token_id": 0},
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 24, "output_proj_dims": 32}
        | {"initializer_range": 0.2},
        {"audio_config": None, "tie_word_embeddings": True},
        _gemma4("Gemma4UnifiedProcessor", patch=8, pooling=1),
        uncut=True,
    ),
    "glm4.1v": Case(
        "Glm4vForConditionalGeneration", "Glm4vConfig", _GLM_DENSE, _GLM_TOWER, {}, _glm("Glm4vProcessor"), merge=2
    ),
    "glm4.5v": Case(
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        _GLM | _ROUTED,
        _GLM_TOWER,
        {},
        _glm("Glm4vProcessor"),
        merge=2,
    ),
    "glm4.6v": Case(
        "Glm46VForConditionalGeneration", "Glm46VConfig", _GLM_DENSE, _GLM_TOWER, {}, _glm("Glm46VProcessor"), merge=2
    ),
    "glm-ocr": Case(
        "GlmOcrForConditionalGeneration", "GlmOcrConfig", _GLM, _GLM_TOWER, {}, _glm("Glm46VProcessor"), merge=2
    ),
    "deepseek-vl": Case(
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {},
        _deepseek,
    ),
    "cohere2-vision": Case(
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {"model_type": "cohere2", "sliding_window": 9, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"alignment_intermediate_size": 64},
        _tiles("Cohere2VisionProcessor"),
    ),
    "llama4": Case(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        MOE["llama4"][1],
        _SQUARE
        | {"intermediate_size": 128, "vision_output_dim": 24}
        | dict.fromkeys(("projector_input_dim", "projector_output_dim"), 24),
        {},
        _tiles("Llama4Processor", patch_size=4),
        sees=("image_token_index",),
        placeholder="<|image|>",
        vector="<|patch|>",
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"model_type": "llama"},
        _SQUARE,
        {"scale_factor": 2},
        _idefics3,
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"model_type": "llama"},
        _SQUARE,
        {"scale_factor": 2},
        _idefics3,  # its own needs num2words, for videos
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {"model_type": "qwen2"},
        _TOWER | {"num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4},
        _internvl,
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None},
        _SQUARE | {"model_type": "pixtral", "image_size": 32},
        {"spatial_merge_size": 2},
        _pixtral,
        sees=_BOTH,
    ),
}


class Seeing:
    """A model in a folder, transformers' own beside it, and prompts with images for both."""

    def __init__(self, case: Case, folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        self.case, self.folder = case, folder
        text = {**SMALL, "max_position_embeddings": LENGTH, "initializer_range": 0.2, **case.text}
        names = dict.fromkeys(case.sees, IDS[case.vector])
        config = getattr(transformers, case.config)(text_config=text, vision_config=case.vision, **names, **case.more)
        whole = getattr(transformers, case.architecture)._from_config(config, attn_implementation="eager")
        self.theirs = whole.eval().float()
        self.theirs.get_input_embeddings().weight.data *= 0.1
        self.theirs.get_output_embeddings().weight.data[IDS[case.vector]] = (
            0  # no answer has a placeholder, for which transformers would want an image
        )
        for name, parameter in self.theirs.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.data += torch.randn_like(parameter) * 0.1
        self.theirs.save_pretrained(folder)
        words = tokenizer()
        self.processor, self._words = case.processor(words), words
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))

    @property
    def placeholder(self) -> str:
        """What a chat template renders for an image."""
        return self.case.placeholder

    def item(self, image: Any) -> MediaItem:
        """As the media process leaves it in its file."""
        out = self.given(self.placeholder, [image])
        ids = out["input_ids"][0].numpy().astype(np.int32)
        values = {
            name: value.numpy() for name, value in out.items() if name not in _NOT_TENSORS and torch.is_tensor(value)
        }
        digest = hashlib.sha256(b"".join(value.tobytes() + repr(value.shape).encode() for value in values.values()))
        path, data, tensors = self.folder / f"{digest.hexdigest()}.media", b"", []
        for name, value in values.items():
            tensors.append(MediaTensor(name, str(value.dtype), value.shape, len(data)))  # type: ignore[arg-type]
            data += value.tobytes()
        path.write_bytes(data)
        is_vector = (ids == IDS[self.case.vector]).astype(np.uint8).tobytes()
        grid = (1, 1, is_vector.count(1))
        if self.case.merge:
            frames, rows, columns = values["image_grid_thw"][0].tolist()
            grid = frames, rows // self.case.merge, columns // self.case.merge
        return MediaItem(
            Modality.IMAGE,
            digest.digest(),
            ids.tobytes(),
            is_vector,
            -1,
            grid,
            str(path),
            tuple(tensors),
            is_uncut=self.case.uncut,
        )

    def prompt(self, text: str, images: list[Any]) -> tuple[list[int], Media | None]:
        """The ids of a text with placeholders, as the detokenizer expands it: they are the processor's own of the whole prompt."""
        ids: list[int] = []
        items = []
        waiting = [self.item(image) for image in images]
        for part in text.replace(self.placeholder, f" {self.placeholder} ").split():
            if part != self.placeholder:
                ids += self._words(part, add_special_tokens=False)["input_ids"]
                continue
            item = waiting.pop(0)
            items.append(
                MediaItem(**{name: getattr(item, name) for name in item.__struct_fields__} | {"position": len(ids)})
            )
            ids += np.frombuffer(item.replacement, np.int32).tolist()
        assert ids == self.given(text, images)["input_ids"][0].tolist()
        return ids, Media(tuple(items)) if items else None

    def given(self, text: str, images: list[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, about transformers
            return self.processor(text=[text], images=images or None, return_tensors="pt")

    def logits(self, text: str, images: list[Any], tokens: list[int]) -> torch.Tensor:
        """transformers' own of a prompt, as its processor gives it, and these tokens behind: [1 + tokens, vocab]."""
        out = dict(self.given(text, images))
        length = out["input_ids"].shape[1]
        for name in _NOT_TENSORS:
            if name in out:
                value = (
                    torch.tensor([tokens])
                    if name == "input_ids"
                    else torch.full((1, len(tokens)), int(name == "attention_mask"))
                )
                out[name] = torch.cat((out[name], value.to(out[name].dtype)), dim=1)
        for one in (self.theirs, getattr(self.theirs, "model", self.theirs)):
            if hasattr(one, "rope_deltas"):
                one.rope_deltas = None
        with torch.no_grad():
            found: torch.Tensor = self.theirs(**out).logits[0, length - 1 :]
        return found


def picture(seed: int, width: int, height: int) -> Any:
    """Of colours that vary with the place: no two are alike."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
