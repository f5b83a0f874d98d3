"""Small models as .gguf files, with random quantised weights."""

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from tiny_models import spec_of

from meshlm.architectures.registry import weights_of
from meshlm.protocol.model import ModelSpec

SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]}
SCALES_AT |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
CODES = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q2_K": 45, "Q3_K": 128, "Q4_K": 945, "Q5_K": 1953}
CODES |= {"Q6_K": 4064}  # about the largest product of code and inner scale

SPEC = spec_of(
    vocab_size=301,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
)


def encoded(kind: str, n: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random rows of a quantised type [n, bytes], their values about as large as weights are."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, size=(n, k // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = (rng.normal(size=(n, k // block, 1)) * 0.1 / CODES[kind]).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(n, -1)


def writer_of(path: Path, architecture: str, spec: ModelSpec, each: int = 0) -> gguf.GGUFWriter:
    """A writer that has the sizes which every architecture names. each: tensors of a file; 0: one file has all."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=each)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    wide = spec.intermediate_size or (spec.moe.moe_intermediate_size if spec.moe is not None else spec.hidden_size)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    add_vocabulary(writer, spec.vocab_size)
    return writer


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A tokenizer, which no text is given to."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"token {index}" for index in range(size)])
    writer.add_token_merges(["to ken"])


def write_gguf(
    path: Path, kinds: dict[str, str], spec: ModelSpec = SPEC, each: int = 0, architecture: str = "llama", **keys: float
) -> None:
    """kinds: a part of a tensor's name -> its type; float32 for others. each: see `writer_of`. keys: metadata of the architecture."""
    writer = writer_of(path, architecture, spec, each)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        writer.add_float32(f"{architecture}.{key}", value)
    for seed, weight in enumerate(weights_of(spec).values()):
        shape = weight.shape
        kind = next((kind for part, kind in kinds.items() if part in weight.name), None)
        if kind is not None and len(shape) == 2:
            data = encoded(kind, *shape, seed)
            writer.add_tensor(weight.gguf, data, raw_dtype=GGMLQuantizationType[kind])
        else:
            values = np.random.default_rng(seed).normal(size=shape) * 0.05 + (len(shape) == 1)
            writer.add_tensor(weight.gguf, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
