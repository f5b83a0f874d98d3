"""Encoders of transformers with small random weights, and ours for the same folder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_driver import engine
from numpy.typing import NDArray
from small_models import SMALL

from meshlm.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SIZES = {**SMALL, "pad_token_id": 1, "max_position_embeddings": 130, "initializer_range": 0.3}
SIZES.pop("num_key_value_heads")
MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3}
CASES: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": 128, "type_vocab_size": 2},
    "Roberta": {"type_vocab_size": 1, "hidden_act": "relu"},
    "XLMRoberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    "ModernBert": MODERN | {"max_position_embeddings": 128},
}
PROMPTS = [[5, 9, 200, 3, 77, 8, 13, 40, 12, 31, 32, 33], [7], [30, 31, 32], list(range(10, 60)), [50, 51, 52, 53]]
WHOLE = {row: len(prompt) for row, prompt in enumerate(PROMPTS)}


def saved(name: str, folder: Path, kind: str = "Model", **more: Any) -> Any:
    """transformers' model with random weights, norms included, saved to the folder."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **CASES[name], **more})
    theirs = getattr(transformers, f"{name}{kind}")(config).eval().float()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(folder)
    return theirs


def loaded(folder: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "cpu_threads": 1,
        "max_num_batched_tokens": 256,
        "max_model_len": 128,
    }
    return engine(folder, load_format="auto", **settings, **more)


def same(found: bytes, expected: torch.Tensor) -> None:
    flat: NDArray[np.float32] = expected.detach().float().flatten().numpy()
    np.testing.assert_allclose(np.frombuffer(found, np.float32), flat, rtol=1e-4, atol=2e-5)
