"""A small model that hears, with weights and its real processor's settings in a folder, and transformers' own beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshlm.runtime.audio_samples import decode

VOCAB, FIRST_SPECIAL = 400, 256
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
AUDIO = FIRST_SPECIAL + SPECIAL.index("<|AUDIO|>")
SECONDS, MELS = 2, 16
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
TOWER = {"num_mel_bins": MELS, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}


class Hearer:
    """The model in its folder, and transformers' own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        config = transformers.Qwen2AudioConfig(
            text_config=TEXT,
            audio_config=TOWER | {"max_source_positions": 50 * SECONDS, "initializer_range": 0.2},
            audio_token_index=AUDIO,
            dtype="float32",
        )
        made = transformers.Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager")
        self.theirs: Any = made.eval().float()
        for name, parameter in self.theirs.named_parameters():
            if ("audio_tower" in name or "projector" in name) and "positions" not in name and parameter.dim() > 1:
                parameter.data.normal_(0, 0.25)  # that a clip changes the answer
        self.theirs.lm_head.weight.data[AUDIO] = 0  # no answer has a placeholder
        self.theirs.save_pretrained(folder)
        self.processor = transformers.Qwen2AudioProcessor(
            transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS), _tokenizer(folder), TEMPLATE
        )
        self.processor.save_pretrained(folder)

    def expected(self, prompt: list[int], tokens: list[int], *files: bytes) -> list[int]:
        """The likeliest token behind the prompt, and behind each of these but the last."""
        clips = [decode(data, SECONDS) for data in files]
        text = "<|AUDIO|>" * len(clips)
        given = self.processor(text=[text], audio=clips, sampling_rate=16_000, return_tensors="pt")
        assert int((given["input_ids"] == AUDIO).sum()) == prompt.count(AUDIO)
        ids = torch.tensor([prompt + tokens[:-1]])
        features = {name: given[name] for name in ("input_features", "feature_attention_mask")}
        with torch.no_grad():
            logits = self.theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **features).logits[0]
        return logits[len(prompt) - 1 :].argmax(-1).tolist()  # type: ignore[no-any-return]


def _tokenizer(folder: Path) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}" for number in range(FIRST_SPECIAL + len(SPECIAL), VOCAB)]
    made = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate([*letters, *SPECIAL, *words])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")


def samples_of(data: bytes) -> NDArray[np.float32]:
    return decode(data, SECONDS)
