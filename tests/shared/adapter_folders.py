"""Folders of adapters without peft: whatever tensors, and the least settings that are needed beside them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from meshlm.runtime.model_files.adapter_modules import CONFIG
from meshlm.runtime.model_files.adapter_tensors import TENSORS

QUERY = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def zeros(*shape: int, value: float = 0.0) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, np.full(shape, value, np.float32).tobytes()


def pair(module: str, rank: int, inputs: int, outputs: int) -> Tensors:
    stem = f"base_model.model.{module}"
    return {f"{stem}.lora_A.weight": zeros(rank, inputs), f"{stem}.lora_B.weight": zeros(outputs, rank)}


def folder_of(path: Path, tensors: Tensors | None = None, inputs: int = 8, **config: Any) -> Path:
    """Without tensors: those of the query of a first layer with so many inputs and outputs."""
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    header, data = dict[str, object](), b""
    for name, (dtype, shape, raw) in (pair(QUERY, 4, inputs, inputs) if tensors is None else tensors).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (path / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
