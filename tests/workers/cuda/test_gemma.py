"""Gemma 2 and 3 on a GPU: heads of 256, soft caps, windows and two rotations in the Triton kernels, inside graphs and outside."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshlm.protocol.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import MODEL, Driver, engine, prompts_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {
    "vocab_size": MODEL["vocab_size"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CASES: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"num_hidden_layers": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "Gemma3TextConfig": {"num_hidden_layers": 7},
}


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("kind", CASES)
def test_error_is_no_worse_than_transformers_bfloat16(kind: str, mode: str, tmp_path: Path) -> None:
    """A prompt in two chunks beside another one's decode, then decodes of both: against float32."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **CASES[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().cuda()
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += torch.randn_like(parameter) * 0.1
    theirs = theirs.bfloat16()
    theirs.save_pretrained(tmp_path)
    prompts = prompts_of([333, 40])
    driver = Driver(
        engine(tmp_path, load_format="auto", cudagraph_mode=mode),
        prompts,
        SamplingParams(max_tokens=8, temperature=0.0),
    )
    driver.step({1: 40})
    driver.step({0: 200, 1: 1})
    rows = [driver.step({0: 133, 1: 1})[0]]
    rows += [driver.step({0: 1, 1: 1})[0] for _ in range(5)]
    tokens = torch.tensor([prompts[0] + driver.tokens[0][:-1]], device="cuda")
    with torch.no_grad():
        rounded = theirs(tokens).logits[0, 332:].float()
        exact = theirs.float()(tokens).logits[0, 332:]
    ours = (torch.stack(rows) - exact).abs().mean()
    error = (rounded - exact).abs().mean()
    # Measured on an H200: 1.5 and 1.7 times.
    assert ours <= 2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
