"""Models with recurrent states on a GPU: the Triton kernels, inside graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of
from msgspec.structs import replace
from near_transformers import HYBRIDS, errors_of_rows, transformers_model

from meshlm.protocol.layers import StateSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.attention import triton_backend
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.states.self_test import self_test_states

pytestmark = pytest.mark.gpu

MAMBA2 = StateSpec(kind="mamba2", num_heads=128, head_dim=64, state_size=128)
DELTA = StateSpec(kind="gated_delta_net", num_heads=32, head_dim=128, state_size=128, n_groups=16, conv_bias=False)
SIZES = {
    "bamba-9b": (MAMBA2, 528, None),
    "nemotron-h-8b": (replace(MAMBA2, n_groups=8), 1040, torch.float32),
    "qwen3-next-80b-a3b": (DELTA, 544, None),
    "qwen3-next-80b-a3b in float32": (DELTA, 1056, torch.float32),
    "falcon-mamba-7b": (StateSpec(kind="mamba", num_heads=8192, head_dim=1, state_size=16), 512, None),
    "lfm2-1.2b": (StateSpec(kind="short_conv", num_heads=2048, head_dim=1, state_size=0, conv_kernel=3), 16, None),
}


def history(made: ModelEngine) -> Driver:
    """A prompt in two chunks beside another one's decodes, decodes of both, and one that is computed anew."""
    driver = Driver(made, prompts_of([333, 40]), SamplingParams(max_tokens=16, temperature=0.0))
    driver.step({1: 40})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    for _ in range(4):
        driver.step({0: 1, 1: 1})
    driver.again(1, 0)
    driver.step({0: 1, 1: driver.length(1)})
    driver.step({0: 1, 1: 1})
    return driver


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_kernels_of_real_sizes(name: str, dtype: torch.dtype) -> None:
    """Pieces of prompts as long as they get."""
    state, page, ssm = SIZES[name]
    assert self_test_states(state, page, ssm or dtype, dtype, torch.device("cuda")) == ""


def test_as_many_heads_of_values_as_of_keys(tmp_path: Path) -> None:
    """As Qwen3.5's small models have them: the start proves the kernels on the layers' own inputs."""
    transformers_model("qwen3-next", tmp_path, linear_num_value_heads=4)
    assert engine(tmp_path, load_format="auto", cudagraph_mode="NONE").compute.attention.name == "triton"


@pytest.mark.parametrize("mode", ["FULL", "NONE", "plain torch"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_error_is_no_worse_than_transformers_bfloat16(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks and beside decodes, decodes, a preempted request: against float32. Graphs are for the kernels alone.

    With experts the median of rows: where two are all but equal, a rounding chooses between them, and one row is far from float32.
    """
    if mode == "plain torch":
        monkeypatch.setattr(triton_backend, "KINDS", ())
    graphs = "NONE" if mode == "plain torch" else mode
    theirs = transformers_model(name, tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=graphs)
    assert made.compute.attention.name == ("torch" if mode == "plain torch" else "triton"), (
        "the start has found them wrong"
    )
    ours, error = errors_of_rows(theirs, history(made))
    typical = torch.median if made.spec.moe else torch.mean
    assert typical(ours) <= 1.1 * typical(error), f"ours {ours.tolist()}, transformers' own {error.tolist()}"
