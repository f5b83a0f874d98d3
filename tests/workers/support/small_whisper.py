"""A small Whisper with random weights, transformers' own beside it, and audio."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from meshlm.protocol.audio import SAMPLE_RATE, Audio

VOCAB, BINS, SECONDS = 211, 20, 1
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_mel_bins": BINS,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_layers": 3,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 72,
    "max_source_positions": 50 * SECONDS,
    "max_target_positions": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
    "init_std": 0.2,
    "begin_suppress_tokens": None,
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 1,
    "no_timestamps_token_id": 9,
    "lang_to_id": {"<|en|>": 2, "<|de|>": 3, "<|fr|>": 4},
    "task_to_id": {"translate": 5, "transcribe": 6},
    "prev_sot_token_id": 8,
    "is_multilingual": True,
    "eos_token_id": 0,
}
PREPROCESSOR: dict[str, Any] = {
    "feature_size": BINS,
    "sampling_rate": SAMPLE_RATE,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": SECONDS,
}
NAMES = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>"]
NAMES += ["<|nospeech|>", "<|startofprev|>", "<|notimestamps|>", *(f"<|{nth * 0.02:.2f}|>" for nth in range(51))]


LARGER: dict[str, Any] = {
    "vocab_size": 4099,
    "d_model": 512,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 1024,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 1024,
    "max_target_positions": 448,
    "init_std": 0.05,
}
"""For GPUs: heads of 64."""


class WithAudio:
    """transformers' model as one that is given ids alone: it knows which audio goes with which prompt. Used by near_transformers.py."""

    def __init__(self, theirs: Any, prompts: list[list[int]]) -> None:
        self._theirs, self._prompts = theirs, prompts

    def to(self, device: torch.device) -> None:
        self._theirs.to(device)

    def bfloat16(self) -> None:
        self._theirs.bfloat16()

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []

    def __call__(self, ids: torch.Tensor) -> Any:
        told = ids[0].tolist()
        nth = next(nth for nth, prompt in enumerate(self._prompts) if told[: len(prompt)] == prompt)
        found = features(nth).to(ids.device, self._theirs.dtype)
        return self._theirs(input_features=found, decoder_input_ids=ids)


def made(folder: Path, sizes: dict[str, Any] | None = None, **generation: Any) -> Any:
    """The folder's files, and transformers' model with their weights. generation: further keys of generation_config.json."""
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**CONFIG, **(sizes or {})})
    theirs = transformers.WhisperForConditionalGeneration(config).eval().float()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data += torch.randn_like(parameter) * 0.3
        if name.endswith("decoder.embed_tokens.weight"):
            parameter.data *= 0.1  # what attention finds decides, not the last token
        if sizes is not None:
            parameter.data = parameter.data.bfloat16().float()  # which a GPU has them in
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    words = {**{name: nth for nth, name in enumerate(NAMES)}}
    words |= {f"w{nth} ": nth for nth in range(len(words), VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=NAMES[0]))
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in NAMES[:10]])
    tokenizer.add_tokens([tokenizers.AddedToken(name) for name in NAMES[10:]])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return theirs


def samples(nth: int, seconds: float = 0.7) -> NDArray[np.float32]:
    """An audio clip of its own for each number: some tones, and noise."""
    draws = np.random.default_rng(nth)
    at = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * pitch * at) for pitch in draws.uniform(80, 6000, 4))
    return np.asarray(0.1 * tones + 0.05 * draws.standard_normal(len(at)), np.float32)


def audio(nth: int) -> Audio:
    return Audio(samples(nth).tobytes())


def features(nth: int) -> torch.Tensor:
    """transformers' features of it: float32 [1, bins, windows]."""
    return features_of(samples(nth))


def features_of(given: NDArray[np.float32]) -> torch.Tensor:
    """The same of these samples."""
    import transformers

    extractor = transformers.WhisperFeatureExtractor(
        feature_size=BINS, chunk_length=SECONDS, sampling_rate=SAMPLE_RATE, n_fft=400, hop_length=160
    )
    found: torch.Tensor = extractor(given, sampling_rate=SAMPLE_RATE, return_tensors="pt")["input_features"]
    return found
