"""Encoders give transformers' hidden states, logits of classifiers and vectors, whatever prompts share their step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_models import CASES, GREEDY, PROMPTS, WHOLE, loaded, same, saved
from engine_driver import Driver, engine

from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.layers import cpu_ops
from meshlm.workers.models.cpu_layers import CpuEncoder


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_states_equal_transformers(name: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of many lengths in one step, some of one token and some of a pair of texts: all states as alone."""
    theirs = saved(name, tmp_path)
    if not kernels:
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    ours = loaded(tmp_path)
    assert ours.facts.num_blocks == 0
    assert isinstance(ours.model.executor, CpuEncoder) == (kernels and name != "ModernBert")
    second = 2 if CASES[name].get("type_vocab_size") == 2 else 0
    tasks = {row: Pool(PoolKind.ALL, second_from=second if row % 2 == 0 else 0) for row in WHOLE}
    driver = Driver(ours, PROMPTS, GREEDY, tasks)
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        types = {}
        if tasks[row].second_from:
            types = {"token_type_ids": torch.tensor([[0] * 2 + [1] * (len(prompt) - 2)])}
        same(driver.pooled[row], theirs(torch.tensor([prompt]), **types).last_hidden_state[0])


def test_neighbours_change_no_bit(tmp_path: Path) -> None:
    """The compiled layers compute a prompt the same way whatever stands beside it, in whatever order."""
    saved("Bert", tmp_path)
    ours = loaded(tmp_path)
    together = Driver(ours, PROMPTS, GREEDY, {row: Pool(PoolKind.ALL) for row in WHOLE})
    together.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        ours.reset()
        alone = Driver(ours, [prompt], GREEDY, {0: Pool(PoolKind.ALL)})
        alone.step({0: len(prompt)})
        assert alone.pooled[0] == together.pooled[row]


@pytest.mark.parametrize("name", CASES)
def test_vectors(name: str, tmp_path: Path) -> None:
    """Of each kind, cut and normalised, in one step."""
    theirs, ours = saved(name, tmp_path), loaded(tmp_path)
    tasks = {
        0: Pool(PoolKind.MEAN),
        1: Pool(PoolKind.CLS, PoolHead.EMBED, activation=True),
        2: Pool(PoolKind.LAST, PoolHead.EMBED, activation=True, dimensions=7),
        3: Pool(PoolKind.MEAN, PoolHead.EMBED, activation=True),
        4: Pool(PoolKind.ALL, PoolHead.EMBED, activation=True, dimensions=5),
    }
    driver = Driver(ours, PROMPTS, GREEDY, tasks)
    driver.step(WHOLE)
    states = [theirs(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    unit = torch.nn.functional.normalize
    expected = [states[0].mean(0), unit(states[1][0], dim=0), unit(states[2][-1, :7], dim=0)]
    expected += [unit(states[3].mean(0), dim=0), unit(states[4][:, :5], dim=-1)]
    for row, vector in enumerate(expected):
        same(driver.pooled[row], vector)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("name", CASES)
def test_classifiers(name: str, kind: str, labels: int, tmp_path: Path) -> None:
    """Logits are transformers', and scores their softmax, or sigmoid where there is one; calibrated where a pooler config says so."""
    theirs = saved(name, tmp_path, kind, num_labels=labels)
    mean, sigma = (0.0, 1.0) if labels == 1 else (0.5, 2.0)
    ours = loaded(tmp_path, pooler_config=json.dumps({"logit_mean": mean, "logit_sigma": sigma}) if mean else "")
    pool = PoolKind.CLS if "Sequence" in kind else PoolKind.ALL
    tasks = {row: Pool(pool, PoolHead.CLASSIFY, activation=bool(row % 2)) for row in WHOLE}
    driver = Driver(ours, PROMPTS, GREEDY, tasks)
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        logits = (theirs(torch.tensor([prompt])).logits[0] - mean) / sigma
        scores = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        same(driver.pooled[row], scores if row % 2 else logits)


def test_colbert(tmp_path: Path) -> None:
    """A projection of every token's state, whose size the weights tell."""
    from safetensors.torch import load_file, save_file

    theirs, file = saved("Bert", tmp_path), tmp_path / "model.safetensors"
    projection = torch.randn(20, 48)
    tensors = {f"bert.{name}": tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | {"linear.weight": projection}, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    ours = loaded(tmp_path)
    pooling = ours.config.resolved.pooling
    assert (pooling.tasks, pooling.size) == (("token_embed",), 20)
    driver = Driver(ours, PROMPTS, GREEDY, dict.fromkeys(WHOLE, pooling.pool("token_embed")))
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        states = theirs(torch.tensor([prompt])).last_hidden_state[0]
        same(driver.pooled[row], torch.nn.functional.normalize(states @ projection.T, dim=-1))


def test_names_of_a_checkpoint(tmp_path: Path) -> None:
    """A masked language model's checkpoint has a prefix and a head of its own; old ones call a norm's weights gamma and beta."""
    from safetensors.torch import load_file, save_file

    theirs = saved("Bert", tmp_path, "ForMaskedLM")
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor.clone() for name, tensor in load_file(file).items()
    }
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(128)[None]
    save_file(old, file, {"format": "pt"})
    driver = Driver(loaded(tmp_path), PROMPTS[:1], GREEDY, {0: Pool(PoolKind.ALL)})
    driver.step({0: len(PROMPTS[0])})
    same(driver.pooled[0], theirs.bert(torch.tensor(PROMPTS[:1])).last_hidden_state[0])
    del old["bert.encoder.layer.0.output.dense.weight"]
    save_file(old, file, {"format": "pt"})
    with pytest.raises(ProcessFatal, match=r"1 tensor missing: encoder\.layer\.0\.output\.dense\.weight"):
        loaded(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    """In bfloat16, by FlashAttention for prompts of different lengths, windows included."""
    theirs = saved(name, tmp_path, hidden_size=96, initializer_range=0.1)
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 128}
    driver = Driver(
        engine(tmp_path, load_format="auto", **settings), PROMPTS, GREEDY, dict.fromkeys(WHOLE, Pool(PoolKind.ALL))
    )
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        expected = theirs(torch.tensor([prompt])).last_hidden_state[0].detach()
        found = torch.from_numpy(np.frombuffer(driver.pooled[row], np.float32).copy()).view_as(expected)
        assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.99
