"""Classifiers and embeddings of decoders, and the Dense modules of sentence-transformers, give what their files say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from engine_driver import Driver
from small_models import SMALL

from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.make import make_engine

GREEDY = SamplingParams(temperature=0.0)
SIZES = {**SMALL, "max_position_embeddings": 1024}
PROMPTS = [[5, 9, 200, 3, 77, 8, 13, 40, 12], [7], [30, 31, 32]]
WHOLE = {row: len(prompt) for row, prompt in enumerate(PROMPTS)}
CLASSIFY = {row: Pool(PoolKind.LAST, PoolHead.CLASSIFY, activation=row == 2) for row in WHOLE}


def loaded(folder: Path, **settings: Any) -> Any:
    """With the folder's own tokenizer, where it has one."""
    if not (folder / "tokenizer.json").exists():
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    given = {"model": str(folder), "device": "cpu", "kv_cache_memory": 1 << 24, "max_num_seqs": 4, "cpu_threads": 1}
    return make_engine(resolve.resolve(flags.build({**given, **settings}, None)), lambda *news: None)


def close(found: bytes, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(
        np.frombuffer(found, np.float32), expected.detach().flatten().numpy(), rtol=1e-4, atol=2e-5
    )


OWN = {"GPT2": {"num_key_value_heads": 6}}


@pytest.mark.parametrize("labels", [1, 4])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "GPT2"])
def test_sequence_classifiers_equal_transformers(name: str, labels: int, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **OWN.get(name, {}), "pad_token_id": 0, "num_labels": labels}
    )
    theirs = getattr(transformers, f"{name}ForSequenceClassification")(config).eval().float()
    theirs.save_pretrained(tmp_path)
    driver = Driver(loaded(tmp_path), PROMPTS, GREEDY, CLASSIFY)
    driver.step({0: 4, 1: 1, 2: 3})
    driver.step({0: 5})
    for row, prompt in enumerate(PROMPTS):
        logits = theirs(torch.tensor([prompt])).logits[0]
        scores = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        close(driver.pooled[row], scores if row == 2 else logits)


@pytest.mark.parametrize("tied", [True, False])
def test_two_answers_of_a_text_model_are_a_score(tied: bool, tmp_path: Path) -> None:
    """The recipe of Qwen3-Reranker: the likelihood of yes against no, from the output projection's rows."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 16, "tie_word_embeddings": tied})
    theirs = transformers.Qwen3ForCausalLM(config).eval().float()
    theirs.save_pretrained(tmp_path)
    vocabulary = {"no": 17, "yes": 91, **{f"t{n}": n for n in range(211) if n not in (17, 91)}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "no")).save(str(tmp_path / "tokenizer.json"))
    recipe = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    ours = loaded(tmp_path, hf_overrides=json.dumps({**recipe, "is_original_qwen3_reranker": True}))
    driver = Driver(ours, PROMPTS, GREEDY, CLASSIFY)
    driver.step(WHOLE)
    for row, prompt in enumerate(PROMPTS):
        two = theirs(torch.tensor([prompt])).logits[0, -1, [17, 91]]
        close(driver.pooled[row], two.softmax(-1)[1] if row == 2 else two[1] - two[0])


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_of_a_text_model_score_the_steps_of_a_solution(tied: bool, tmp_path: Path) -> None:
    """Math-Shepherd's recipe, by --pooler-config: behind each step the likelihoods of the tokens for a good one and a bad one."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(**{**SIZES, "head_dim": 16, "tie_word_embeddings": tied})
    theirs = transformers.MistralForCausalLM(config).eval().float()
    theirs.save_pretrained(tmp_path)
    pooler = json.dumps({"pooling_type": "STEP", "step_tag_id": 77, "returned_token_ids": [64, 12]})
    ours = loaded(tmp_path, runner="pooling", pooler_config=pooler)
    assert ours.resolved.pooling is not None
    prompts = [[5, 77, 200, 3, 77, 8], [77], [30, 31, 32]]
    tasks = {row: ours.resolved.pooling.pool("token_classify", activation=row != 1) for row in range(3)}
    driver = Driver(ours, prompts, GREEDY, tasks)
    driver.step({0: 4, 1: 1, 2: 3})
    driver.step({0: 2})
    for row, prompt in enumerate(prompts):
        logits = theirs(torch.tensor([prompt])).logits[0][:, [64, 12]]
        close(driver.pooled[row], logits if row == 1 else logits.softmax(-1))


def test_reward_model(tmp_path: Path) -> None:
    """Two products with a function between them, for every token."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    theirs = transformers.Qwen2Model(transformers.Qwen2Config(**SIZES)).eval().float()
    theirs.save_pretrained(tmp_path)
    head = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
    tensors = {f"model.{name}": tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(
        tensors | {f"score.{name}": p.data for name, p in head.named_parameters()}, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))
    tasks = {row: Pool(PoolKind.ALL, PoolHead.CLASSIFY, activation=True) for row in WHOLE}
    driver = Driver(loaded(tmp_path), PROMPTS, GREEDY, tasks)
    driver.step({0: 4, 1: 1, 2: 3})
    driver.step({0: 5})
    for row, prompt in enumerate(PROMPTS):
        close(driver.pooled[row], head(theirs(torch.tensor([prompt])).last_hidden_state[0]))


def test_dense_modules(tmp_path: Path) -> None:
    """Their products stand between pooling and norm; a model without an output projection needs none."""
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    theirs = transformers.Qwen2Model(transformers.Qwen2Config(**SIZES)).eval().float()
    theirs.save_pretrained(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": place, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for folder in ("1_Pooling", "2_Dense"):
        (tmp_path / folder).mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    act = "torch.nn.modules.activation.Tanh"
    dense = {"in_features": 48, "out_features": 20, "bias": True, "activation_function": act}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    linear = torch.nn.Linear(48, 20)
    save_file(
        {f"linear.{name}": p.data for name, p in linear.named_parameters()}, tmp_path / "2_Dense" / "model.safetensors"
    )
    ours = loaded(tmp_path)
    pooling = ours.config.resolved.pooling
    assert (pooling.size, pooling.kind, pooling.activation) == (20, PoolKind.MEAN, True)
    driver = Driver(ours, PROMPTS, GREEDY, {row: pooling.pool("embed", dimensions=row * 5) for row in WHOLE})
    driver.step({0: 4, 1: 1, 2: 3})
    driver.step({0: 5})
    for row, prompt in enumerate(PROMPTS):
        mean = theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        cut = linear(mean).tanh()[: row * 5 or None]
        close(driver.pooled[row], torch.nn.functional.normalize(cut, dim=0))
