"""The weight of words: BGE-M3's products and SPLADE's head are what transformers' states give, through the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import GREEDY, PROMPTS, WHOLE, loaded, same, saved
from engine_driver import Driver

from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.supervisor.errors import UsageError


def architecture(folder: Path, name: str, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name], **more}))


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("m3")
    theirs = saved("XLMRoberta", folder)
    architecture(folder, "BgeM3EmbeddingModel", bos_token_id=5, eos_token_id=31)
    for name, rows in (("sparse", 1), ("colbert", 48)):
        bias = torch.full((rows,), -0.92)  # so that some weights are cut off
        torch.save({"weight": torch.randn(rows, 48) * 0.1, "bias": bias}, folder / f"{name}_linear.pt")
    return folder, theirs


def test_bge_m3(m3: tuple[Path, Any]) -> None:
    folder, theirs = m3
    ours = loaded(folder)
    pooling = ours.config.resolved.pooling
    assert pooling.tasks == ("embed", "token_embed", "token_classify")
    weights, vectors = pooling.pool("token_classify"), pooling.pool("token_embed")
    assert (weights.bos_token_id, weights.eos_token_id, vectors.bos_token_id, vectors.eos_token_id) == (5, 31, 5, -1)
    tasks = {
        0: weights,
        1: vectors,
        2: pooling.pool("embed"),
        3: vectors,
        4: pooling.pool("token_classify", activation=False),
    }
    driver = Driver(ours, PROMPTS, GREEDY, tasks)
    driver.step(WHOLE)
    sparse, colbert = (torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert"))
    states = [theirs(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    linear, unit = torch.nn.functional.linear, torch.nn.functional.normalize
    lexical = [linear(one, sparse["weight"], sparse["bias"]) for one in states]
    same(driver.pooled[0], lexical[0].relu())
    assert torch.cat(lexical).min() < 0
    same(driver.pooled[4], lexical[4])
    same(driver.pooled[2], unit(states[2][0], dim=0))
    for row in (1, 3):
        same(driver.pooled[row], unit(linear(states[row], colbert["weight"], colbert["bias"]), dim=-1))


def test_bge_m3_without_its_files(m3: tuple[Path, Any], tmp_path: Path) -> None:
    for file in m3[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({"weight": torch.zeros(2, 48), "bias": torch.zeros(2)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ProcessFatal, match=r"sparse_linear.pt: its tensors are not those of a product of 48 by 1"):
        loaded(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(ProcessFatal, match=r"sparse_linear.pt: BgeM3EmbeddingModel needs this file"):
        loaded(tmp_path)


def test_splade(tmp_path: Path) -> None:
    """Of each word the greatest log(1 + relu(logit)) over the prompt, as transformers' masked language model has it."""
    theirs = saved("Bert", tmp_path, "ForMaskedLM")
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"idx": 1, "path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_SpladePooling").mkdir()
    settings = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": 211}
    (tmp_path / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="BertSpladeSparseEmbeddingModel"):
        loaded(tmp_path)
    architecture(tmp_path, "BertSpladeSparseEmbeddingModel")
    ours = loaded(tmp_path)
    pooling = ours.config.resolved.pooling
    assert (pooling.tasks, pooling.size, ours.facts.pooled_bytes) == (("embed",), 211, 4 * 211)
    task = pooling.pool("embed")
    assert task == Pool(PoolKind.SPLADE, PoolHead.EMBED)
    driver = Driver(ours, PROMPTS, GREEDY, dict.fromkeys(WHOLE, task))
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        logits = theirs(torch.tensor([prompt])).logits[0]
        same(driver.pooled[row], logits.relu().log1p().amax(0))
    with pytest.raises(UsageError, match="SPLADE gives one weight"):
        loaded(tmp_path, pooler_config='{"pooling_type": "MEAN"}')
    settings["pooling_strategy"] = "sum"
    (tmp_path / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    with pytest.raises((UsageError, ModelFilesError), match="pooling_strategy"):
        loaded(tmp_path)
