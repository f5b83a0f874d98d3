"""The .gguf files of BERT, written as llama.cpp does, against transformers."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from encoder_models import GREEDY, PROMPTS, WHOLE, loaded, same, saved
from engine_driver import Driver
from gguf.quants import dequantize, quantize
from gguf_files import write_model
from model_folders import resolve_model
from msgspec.structs import replace

from meshlm.protocol.pool import Pool, PoolKind
from meshlm.runtime.errors import ModelFilesError
from meshlm.supervisor.errors import UsageError

Q8_0 = gguf.GGMLQuantizationType.Q8_0
KEYS: dict[str, Any] = {
    "attention.layer_norm_epsilon": 1e-12,
    "attention.causal": False,
    "pooling_type": 1,
    "tokenizer.ggml.model": "bert",
}


def of(path: Path) -> dict[str, str]:
    return {"model": str(path), "tokenizer": str(path.with_name("tokenizer.json"))}


def written(theirs: Any, folder: Path, **changes: Any) -> Path:
    path = folder / "m.gguf"
    spec = resolve_model(str(folder)).spec
    kinds = changes.pop("kinds", {})
    write_model(folder, path, "bert", spec, theirs.state_dict(), KEYS | changes, kinds=kinds)
    return path


def test_a_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    theirs = saved("Bert", tmp_path)
    path = written(theirs, tmp_path)
    files = resolve_model(str(path), tokenizer=str(tmp_path))
    assert files.modules is not None
    assert (files.modules.kind, files.modules.normalize) == (PoolKind.MEAN, True)
    spec = resolve_model(str(tmp_path)).spec
    assert replace(files.spec, rms_norm_eps=spec.rms_norm_eps) == spec  # the file's is rounded to float32
    driver = Driver(loaded(tmp_path, **of(path)), PROMPTS, GREEDY, {row: Pool(PoolKind.ALL) for row in WHOLE})
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        same(driver.pooled[row], theirs(torch.tensor([prompt])).last_hidden_state[0])


def test_xlm_r_in_a_gguf_file(tmp_path: Path) -> None:
    """Its positions begin behind that of padding, and the file leaves out the rows before."""
    theirs = saved("XLMRoberta", tmp_path, hidden_act="gelu")
    path, spec = tmp_path / "m.gguf", resolve_model(str(tmp_path)).spec
    assert spec.position_offset == 2
    positions = theirs.embeddings.position_embeddings.weight.detach()[spec.position_offset :]
    keys = {**KEYS, "tokenizer.ggml.model": "t5", "attention.layer_norm_epsilon": spec.rms_norm_eps}
    write_model(tmp_path, path, "bert", spec, theirs.state_dict(), keys, {"position_embd.weight": positions})
    driver = Driver(loaded(tmp_path, **of(path)), PROMPTS, GREEDY, {row: Pool(PoolKind.ALL) for row in WHOLE})
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        same(driver.pooled[row], theirs(torch.tensor([prompt])).last_hidden_state[0])


def test_weights_of_a_quantised_file_are_decoded(tmp_path: Path) -> None:
    theirs = saved("Bert", tmp_path, hidden_size=64, num_attention_heads=4, intermediate_size=96)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 3)
    kinds = {}
    for name, parameter in theirs.named_parameters():
        own = names.get_name(name, (".weight",))
        if own is not None and own.startswith(("blk.", "token_embd.")) and parameter.dim() == 2:
            kinds[own] = Q8_0
    path = written(theirs, tmp_path, kinds=kinds)
    assert len(kinds) == 19
    for name, parameter in theirs.named_parameters():
        if names.get_name(name, (".weight",)) in kinds:
            parameter.data = torch.from_numpy(dequantize(quantize(parameter.detach().numpy(), Q8_0), Q8_0))
    driver = Driver(loaded(tmp_path, **of(path)), PROMPTS, GREEDY, {row: Pool(PoolKind.MEAN) for row in WHOLE})
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        same(driver.pooled[row], theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokenizer.ggml.model": "gpt2"},
            "tokenizer.ggml.model 'gpt2' is not supported for bert; supported: bert, t5",
        ),
        ({"attention.causal": True}, "bert.attention.causal must be false"),
        ({"pooling_type": 4}, "bert.pooling_type 4 is not supported"),
    ],
)
def test_what_is_not_honoured_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(saved("Bert", tmp_path), tmp_path, **changes)
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(str(path))


def test_weights_of_an_encoder_do_not_stay_packed(tmp_path: Path) -> None:
    path = written(saved("Bert", tmp_path), tmp_path)
    with pytest.raises(UsageError, match="--gguf-weights packed: weights of an encoder are decoded; use auto"):
        loaded(tmp_path, **of(path), gguf_weights="packed")
