"""transformers' real processors of small models that see, and a tokenizer with their special tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

WORDS = 120  # ids of words: w0, w1 ... behind them stand those of special tokens
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
TILES = [[16, 16], [16, 32], [32, 16]]
IDS = {name: WORDS + nth for nth, name in enumerate(_NAMES)}


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


def without_video(name: str) -> Any:
    """A processor of transformers that does not insist on the processor of videos, which needs torchvision."""
    import transformers

    kind: Any = getattr(transformers, name)
    return type(name, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})


def qwen_processor(name: str) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        images = Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=64 * 24)
        return without_video(name)(images, words, None)

    return made


def glm_processor(name: str) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        size = {"shortest_edge": 64, "longest_edge": 2 * 64 * 24}  # of two frames
        images = Glm4vImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
        return without_video(name)(images, words, None)

    return made


def deepseek_processor(words: Any) -> Any:
    from transformers import DeepseekVLProcessor
    from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

    images = DeepseekVLImageProcessorPil(size={"height": 16, "width": 16}, min_size=4)
    return DeepseekVLProcessor(images, words, num_image_tokens=16)


def tiles_processor(name: str, **options: Any) -> Callable[[Any], Any]:
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
        return without_video(name)(images, words, **options)

    return made


def lfm2_processor(words: Any) -> Any:
    """Its own reader of images needs torchvision; it gets SigLIP 2's, of one tile."""
    from transformers import Lfm2VlProcessor
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    class Options(Siglip2ImageProcessorPil.valid_kwargs, total=False):  # type: ignore[call-arg, misc, name-defined, unused-ignore]
        return_row_col_info: bool

    class OneTile(Siglip2ImageProcessorPil):  # type: ignore[misc, unused-ignore]
        valid_kwargs = Options
        tile_size, encoder_patch_size, downsample_factor, use_thumbnail = 16, 4, 2, False

        def preprocess(self, images: Any, **kwargs: Any) -> Any:
            flat = [image for group in images for image in (group if isinstance(group, list) else [group])]
            sizes = [(16 + 8 * (image.width > image.height), 16 + 8 * (image.height > image.width)) for image in flat]
            resized = [image.resize(size) for image, size in zip(flat, sizes, strict=True)]
            out = super().preprocess(resized, return_tensors="pt")
            out["image_sizes"] = (out["spatial_shapes"] * 4).tolist()
            out["image_rows"] = out["image_cols"] = [1] * len(flat)
            return out

    named = {"image_start_token": "<boi>", "image_end_token": "<eoi>", "image_thumbnail_token": "<global-img>"}
    for key, value in named.items():
        setattr(words, key, value)
    kind = type(
        "Lfm2VlProcessor",
        (Lfm2VlProcessor,),
        {"check_argument_for_proper_class": lambda self, name, given: type(given)},
    )
    return kind(OneTile(patch_size=4, max_num_patches=24), words)


def paddle_processor(words: Any) -> Any:
    from transformers import PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 64 * 24}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(patch_size=4, merge_size=2, size=size), words)


def llava_processor(words: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaProcessor(images, words, 4, "default", num_additional_image_tokens=1)


def gemma3_processor(words: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), words, image_seq_length=4)


def gemma4_processor(name: str, *, patch: int, pooling: int) -> Callable[[Any], Any]:
    """The processor of Gemma 4 Unified gets Gemma 4's images, of whole patches: its own needs torchvision."""

    def made(words: Any) -> Any:
        from transformers.models.gemma4 import image_processing_pil_gemma4 as own

        setattr(own, "_SUPPORTED_SOFT_TOKENS", (14, 280))  # noqa: B010 - it takes 70 at the least
        images = own.Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=pooling, max_soft_tokens=14)
        return without_video(name)(None, images, words, None)

    return made


def idefics3_processor(words: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, words, image_seq_len=4)


def internvl_processor(words: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    sizes: dict[str, Any] = {"size": {"height": 16, "width": 16}, "crop_to_patches": True}
    images = GotOcr2ImageProcessorPil(**sizes, min_patches=1, max_patches=3)
    return without_video("InternVLProcessor")(images, words, None, image_seq_length=4)


def pixtral_processor(merge: int) -> Callable[[Any], Any]:
    def made(words: Any) -> Any:
        pytest.importorskip("torchvision", reason="transformers' processor of Pixtral wants it")
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

        side = 4 * merge
        sizes = {"size": {"longest_edge": 16 * merge}, "patch_size": {"height": side, "width": side}}
        images = PixtralImageProcessorPil(**sizes)
        return PixtralProcessor(images, words, patch_size=4, spatial_merge_size=merge, image_token=IMAGE)

    return made


def onevision_processor(words: Any) -> Any:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    images = LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=TILES)
    return without_video("LlavaOnevisionProcessor")(images, words, None, 16, "full")


def llava_next_processor(words: Any) -> Any:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=TILES)
    return LlavaNextProcessor(images, words, 4, "default", num_additional_image_tokens=1)
