"""The folder of a small model that sees: config, tokenizer, chat template and the real processor's settings, without weights."""

import json
from array import array
from pathlib import Path
from typing import Any

from fake_oracle import expected_token
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshlm.protocol.media import MediaItem
from meshlm.workers.fake.tokens import tokens_of_media

VOCAB = 400
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_SPECIAL = 256
IMAGE = FIRST_SPECIAL + SPECIAL.index("<|image_pad|>")
VIDEO = IMAGE + 1
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "model_type": "qwen2_vl_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
VISION = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE - 2,
    "text_config": TEXT,
    "vision_config": {**VISION, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "do_convert_rgb": True,
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def seeing_model(folder: Path) -> Path:
    """Made where it is not there yet."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}" for number in range(FIRST_SPECIAL + len(SPECIAL), VOCAB)]
    vocab = {text: number for number, text in enumerate([*letters, *SPECIAL, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    files = {
        "config.json": CONFIG,
        "preprocessor_config.json": PROCESSOR,
        "tokenizer_config.json": {**of_tokenizer, "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def seen_by_fake(prompt: list[int], items: list[MediaItem]) -> list[int]:
    """The tokens that the fake device reads of an expanded prompt with these items, in its order."""
    seen = array("i", prompt)
    for item in items:
        ids = iter(tokens_of_media(item, VOCAB))
        for place, is_vector in enumerate(item.is_vector, item.position):
            if is_vector:
                seen[place] = next(ids)
    return list(seen)


def fake_answer(prompt: list[int], items: list[MediaItem], count: int) -> list[int]:
    """What the fake device says to it."""
    tokens = seen_by_fake(prompt, items)
    for _ in range(count):
        tokens.append(expected_token(tokens, VOCAB))
    return tokens[len(prompt) :]
