"""Models that draft on a GPU, by the interpreter: they draft what the CPU's drafters draft, so that as much is kept in each step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

pytest.importorskip("triton")

from cpu_steps import LENGTH, MODEL, PROMPTS
from drafted_steps import add, begun, decode, row_of, verify
from interpreted_engine import interpreted

from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.errors import ProcessFatal
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

MOST, STEPS = 3, 3
TARGET = MODEL | {"num_hidden_layers": 4}
EAGLE3 = MODEL | {"num_hidden_layers": 1, "tie_word_embeddings": False, "model_type": "llama", "draft_vocab_size": 120}
EAGLE3 |= {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 3}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "itself": ("draft_model", TARGET),
    "smaller": ("draft_model", MODEL | {"num_hidden_layers": 1}),
    "eagle": ("eagle", EAGLE3 | {"draft_vocab_size": None}),
    "eagle3": ("eagle3", EAGLE3),
}
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=0.5, logit_bias={5: 0.1}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
]


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return folder


def settings_of(folder: Path, name: str) -> dict[str, object]:
    method, config = DRAFTERS[name]
    asked = {"method": method, "model": str(folder_of(folder / "drafter", config)), "num_speculative_tokens": MOST}
    found: dict[str, object] = {"model": str(folder_of(folder / "model", TARGET)), "device": "cpu", "dtype": "float32"}
    found |= {"load_format": "dummy", "max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1, "cpu_exact": True}
    return found | {"speculative_config": json.dumps(asked)}


def kept(made: ModelEngine) -> list[list[int]]:
    """Tokens of each row in each step; a row begins anew on the way."""
    texts, found = begun(made, KINDS), list[list[int]]()
    for nth in range(STEPS):
        if nth == 1:
            tokens = PROMPTS[1] + texts[1].tokens
            again = row_of(made, 1, tokens, len(PROMPTS[1]), KINDS[1])
            result = verify(made, [(0, LENGTH - 20, 1), (1, 0, len(tokens))], [MOST, 0], (again,))
            rows = [0, 1]
        else:
            result, rows = decode(made, [2, 0, 1], [MOST, MOST, 2]), [2, 0, 1]
        add(texts, result, rows)
        found.append(np.frombuffer(result.counts, np.int32).tolist())
    return [*found, *(text.tokens for text in texts)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    values = settings_of(tmp_path, name)
    with interpreted(values) as engine:
        ours = kept(engine)
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    theirs = kept(make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None))
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)
    assert ours == theirs, f"{ours}\n{theirs}"
    if name == "itself":
        assert ours[0] == [1 + MOST, 1 + MOST, 3], "all drafts are right"


def test_several_layers_of_mtp_are_refused(tmp_path: Path) -> None:
    values = settings_of(tmp_path, "eagle") | {"speculative_config": '{"method": "suffix"}'}
    with pytest.raises(ProcessFatal, match="suffix drafts on --device cpu alone"), interpreted(values):
        pass
