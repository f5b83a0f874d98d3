"""Images in an engine with a GPU's inputs and attention, whose kernels the interpreter computes: tokens are transformers' own."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreted_engine import interpreter, made_alone
from media_cases import CASES, Case
from media_models import LENGTH, Seeing, picture
from served_engines import Engines
from serving_images import STEP, ask, behind

from meshlm.workers.engine.triton_inputs import TritonInputs

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

SMALLER = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "gemma4-e2b", "gemma4-26b"])
def test_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    text = case.text | SMALLER | (WINDOWS if "gemma" in name else {})
    seeing = Seeing(case._replace(text=text), tmp_path)
    asked = [
        (f"w1 w2 w3 {seeing.placeholder} w4 w5 {seeing.placeholder}", [picture(2, 45, 19), picture(1, 32, 32)]),
        ("w9 w8 w7 w6 w5", []),
        (f"{seeing.placeholder} w7 w8", [picture(3, 14, 37)]),
    ]
    with interpreter():
        engines = Engines(
            tmp_path, 40, "auto", make_alone=made_alone, max_model_len=LENGTH, max_num_batched_tokens=STEP
        )
        try:
            assert isinstance(engines.engines[0].inputs, TritonInputs)
            bench = behind(engines)
            for nth, one in enumerate(asked):
                ask(bench, nth, *seeing.prompt(*one))
            bench.finish()
        finally:
            engines.close()
    for nth, tokens in bench.tokens.items():
        assert tokens == seeing.logits(*asked[nth], tokens[:-1]).argmax(-1).tolist(), f"request {nth}"
    assert len(bench.tokens) == len(asked)
