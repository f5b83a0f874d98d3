"""Kernels of recurrent states are tried before they are used: what is right is taken, what is wrong is named."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine_driver import engine
from served_engines import made

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import Pieces
from meshlm.protocol.layers import StateSpec
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import KnownRequests, Prompt, StepInputs
from meshlm.workers.engine import state_self_test
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.engine.state_self_test import self_test_model
from meshlm.workers.models.qwen3_next import GatedDeltaNet
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.states import triton_states
from meshlm.workers.states.self_test import self_test_states
from meshlm.workers.states.triton_states import TritonStates, pieces_of

if torch.cuda.is_available():
    pytest.skip("by the interpreter; cuda/test_hybrid.py has the GPU", allow_module_level=True)

CPU = torch.device("cpu")
MAMBA2 = StateSpec(kind="mamba2", num_heads=3, head_dim=24, state_size=20, n_groups=1)
GROUPS = StateSpec(kind="mamba2", num_heads=4, head_dim=16, state_size=16, n_groups=2, conv_bias=False)
SHORT = StateSpec(kind="short_conv", num_heads=50, head_dim=1, state_size=0, conv_kernel=3)
KINDS = ["odd sizes", "groups", "short convolution", "gated delta net", "mamba", "one number a channel"]
DELTA = StateSpec(kind="gated_delta_net", num_heads=2, head_dim=24, state_size=20, conv_bias=False)
MAMBA = StateSpec(kind="mamba", num_heads=19, head_dim=1, state_size=5)
UNIT = StateSpec(kind="mamba", num_heads=24, head_dim=1, state_size=1)  # RecurrentGemma's


def reason(state: StateSpec) -> str:
    self_test_states.cache_clear()
    return self_test_states(state, 48, torch.float32, torch.float32, CPU)


def in_graphs(state: StateSpec, page: int = 48) -> str:
    self_test_states.cache_clear()
    return self_test_states(state, page, torch.float32, torch.float32, CPU, in_graphs=True)


@pytest.mark.parametrize("state", [MAMBA2, GROUPS, SHORT, DELTA, MAMBA, UNIT], ids=KINDS)
def test_the_kernels_are_right(state: StateSpec) -> None:
    """Pieces as long as they get, chunks behind a state, checkpoints, decodes, in parts of one product."""
    assert reason(state) == ""


@pytest.mark.parametrize("state", [MAMBA2, GROUPS, SHORT, DELTA, MAMBA, UNIT], ids=KINDS)
def test_as_a_graph_launches_them(state: StateSpec) -> None:
    """Nobody knows which requests decode, and padding, which is not a number, changes nothing."""
    assert in_graphs(state) == ""


def test_pages_that_are_longer_than_a_piece_in_a_graph() -> None:
    assert in_graphs(GROUPS, 200) == ""


def test_a_graph_that_cuts_prompts_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Pieces:
        found = right(*given)
        found.pieces[1, 2] -= 1
        return found

    right = Pieces.of_columns
    monkeypatch.setattr(Pieces, "of_columns", wrong)
    assert "of the norm away from plain torch" in in_graphs(GROUPS)


def test_a_scan_that_is_wrong_behind_its_first_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a GPU was, whose tests had short pieces alone."""

    def wrong(*given: Any) -> None:
        chunk_scan(*given)
        given[7][100:] *= 1.1

    monkeypatch.setattr(triton_states, "chunk_scan", wrong)
    assert "of the norm away from plain torch" in reason(GROUPS)


def test_a_state_that_is_not_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> None:
        before = given[6].clone()
        state_update(*given)
        given[6].copy_(before)

    monkeypatch.setattr(triton_states, "state_update", wrong)
    assert "of the norm away from plain torch" in reason(GROUPS)


def test_kernels_that_cannot_be_launched_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nmore")

    monkeypatch.setattr(triton_states, "state_update", broken)
    assert reason(GROUPS) == "RuntimeError: Triton Error [CUDA]: invalid argument"


class KernelsOfStates:
    """A backend whose attention is plain torch's, and whose states are the kernels'."""

    name, graphs, fp8 = "states by the interpreter", False, False

    def __init__(self, made: ModelEngine) -> None:
        self._made, self.used = made, 0

    def unsupported(self, *given: object) -> str:
        return ""

    def inputs(self, step: StepColumns) -> StepInputs:
        batch, first = TorchInputs(self._made.rows).of_step(step), step.num_decodes
        begins = np.cumsum(step.counts) - step.counts
        columns = [torch.tensor(one, dtype=torch.int32) for one in (step.rows, step.starts, np.cumsum(step.counts))]
        known = (column[first:].tolist() for column in (step.rows, step.starts, begins, step.counts))
        of_all = Columns(columns[0], columns[1], columns[2], step.n, self._made.rows.block_tables[0])
        return replace(batch, columns=of_all, known=KnownRequests(first, first, tuple(map(Prompt, *known))))

    def step(self, batch: StepInputs, block_size: int) -> TorchAttention:
        attention = TorchAttention(batch, block_size)
        whole = replace(batch, block_tables=self._made.rows.block_tables.unbind())

        def states(group: int) -> TritonStates:
            self.used += 1
            return TritonStates(whole, group, block_size, pieces_of(whole, block_size))

        attention.states = states  # type: ignore[method-assign, assignment]
        return attention


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "mamba": ("MambaConfig", {"num_hidden_layers": 2, "state_size": 4, "expand": 1, "time_step_rank": 3}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        },
    ),
}


def tried(name: str, folder: Path) -> tuple[ModelEngine, KernelsOfStates]:
    made(MODELS[name], folder)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "max_model_len": 128}
    whole = engine(folder, load_format="auto", kv_cache_memory=4 << 20, max_num_batched_tokens=64, **settings)
    return whole, KernelsOfStates(whole)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_is_tried_and_left_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of pages, prompts in chunks beside one another, decodes; in float32 they are equal but for the last digits."""
    monkeypatch.setattr(state_self_test, "NEAR", 1e-4)
    whole, kernels = tried(name, tmp_path)
    before = whole.rows.state.clone()
    assert self_test_model(whole, kernels, kernels.inputs) == ""
    assert kernels.used > 0
    assert torch.equal(whole.rows.state, before)


def test_what_is_wrong_in_a_whole_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: a wrong result, a state that is not left, and what cannot be launched."""
    whole, kernels = tried("lfm2", tmp_path)
    monkeypatch.setattr(triton_states, "causal_conv", lambda *given, **more: causal_conv(*given, **more).flip(1))
    assert "conv: 1" in self_test_model(whole, kernels, kernels.inputs)

    def unwritten(*given: Any, **more: Any) -> Tensor:
        before = given[3].clone()
        out = causal_conv(*given, **more)
        given[3].copy_(before)
        return out

    monkeypatch.setattr(triton_states, "causal_conv", unwritten)
    assert "states of conv: 1" in self_test_model(whole, kernels, kernels.inputs)

    def broken(*given: Any, **more: Any) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    monkeypatch.setattr(triton_states, "causal_conv", broken)
    assert (
        self_test_model(whole, kernels, kernels.inputs) == "conv: RuntimeError: Triton Error [CUDA]: invalid argument"
    )


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_parts_of_a_gated_delta_net_lie_in_one_piece(groups: int, each: int) -> None:
    """The numbers of a token, side by side: kernels take them so, and gave up their work where they were not."""
    state = SimpleNamespace(n_groups=groups, state_size=20, head_dim=24, num_heads=groups * each)
    sizes = [groups * (2 * 20 + each * 2 * 24), 2 * groups * each]
    net: Any = SimpleNamespace(_state=state, _each=each, _sizes=sizes)
    for part in GatedDeltaNet.parts(net, torch.arange(3.0 * sum(sizes)).unflatten(0, (3, -1))):
        assert part[:1].is_contiguous()
