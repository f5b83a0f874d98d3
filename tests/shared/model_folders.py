"""Folders of models for tests that read them: whatever files, the least ones that are needed beside them."""

import json
import struct
from pathlib import Path
from typing import Any

from meshlm.protocol.config import ModelConfig
from meshlm.runtime.model_files import model_files

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def safetensors(*names: str, dtype: str = "F32", shape: tuple[int, ...] = (1,), size: int = 4) -> bytes:
    """A file with these tensors, all of zeros, `size` bytes each."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [at * size, (at + 1) * size]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size * len(names))


def folder_with(folder: Path, **files: object) -> str:
    """A model's folder. Bytes are written as they are, all else as JSON; None leaves a file out."""
    for name, content in {"config.json": CONFIG, "model.safetensors": safetensors(), **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(folder)


def resolve_model(model: str, *, head_tokens: tuple[int, ...] = (), **flags: Any) -> model_files.ModelFiles:
    """The model's files, with these flags."""
    return model_files.resolve_model(ModelConfig(model=model, **flags), head_tokens)
