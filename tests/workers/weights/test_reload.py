"""Weights that are read again into a model that computes: the same tensors, the new files' logits; and what is refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import CPU, DEEPSEEK, DENSE, MOE, SMALL, caches, load, resolved, run
from torch import Tensor

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.rows.extras.extra import RowExtras
from meshlm.workers.weights import reload

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}),
    **{name: DEEPSEEK[name] for name in ("deepseek-v3",)},
    **{name: MOE[name] for name in ("qwen2-moe", "gpt-oss")},
    "cohere": DENSE["cohere"],
}
TOKENS, TABLE = torch.arange(19).mul(7).remainder(211).tolist(), [5, 1, 3, 2, 6]


def write(folder: Path, name: str, seed: int) -> None:
    import transformers

    torch.manual_seed(seed)
    kind, changes = FAMILIES[name]
    config = getattr(transformers, kind)(**{**SMALL, **changes})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def logits(model: Decoder) -> Tensor:
    return run(model, caches(model.spec, 8), [(TOKENS, 0, TABLE)])


def engine_of(folder: Path, model: Decoder) -> Any:
    """The part of an engine that is asked."""
    own = {"config": MeshConfig(), "resolved": resolved(folder), "device": CPU, "model": model, "weights_plan": None}
    extras: RowExtras[Tensor] = RowExtras((), 1)
    return SimpleNamespace(**own, draft_model=None, draft_plan=None, extras=extras)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_new_files(name: str, tmp_path: Path) -> None:
    """Of every kernel's form of a weight, on the CPU: some are packed by what holds them, and not parameters any more."""
    write(tmp_path, name, 0)
    ours = load(tmp_path)
    before, places = logits(ours), [parameter.data_ptr() for parameter in ours.parameters()]
    write(tmp_path, name, 1)
    engine = engine_of(tmp_path, ours)
    assert reload.why_not(engine, engine.resolved) == ""
    assert torch.equal(logits(ours), before), "to verify changes nothing"
    reload.load(engine, engine.resolved)
    after = logits(ours)
    assert not torch.allclose(after, before, atol=0.01)
    assert torch.equal(after, logits(load(tmp_path)))
    assert places == [parameter.data_ptr() for parameter in ours.parameters()]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.weight"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 48)}, "of another shape than the configuration says"),
        ({"model.layers.2.mlp.up_proj.weight": torch.full((80, 48), torch.nan)}, "hold NaN or infinity"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}, "layers.0: its scales of an FP8 KV cache are others"),
    ],
)
def test_files_that_cannot_be_read_leave_the_old_weights(
    changed: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    write(tmp_path, "llama", 0)
    ours = load(tmp_path)
    before, file = logits(ours), tmp_path / "model.safetensors"
    write(tmp_path, "llama", 1)
    tensors = {**load_file(file), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})
    engine = engine_of(tmp_path, ours)
    error = reload.why_not(engine, engine.resolved)
    with pytest.raises(ProcessFatal, match=said):
        raise ProcessFatal(error)
    assert torch.equal(logits(ours), before)
