"""The mode of CUDA graphs that is used, and why it is another one than was asked for."""

import pytest

from meshlm.protocol.config.engine import WorkerConfig
from meshlm.workers.graphs.keys import graph_keys, mode_of

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_asked_for(mode: str) -> None:
    assert mode_of(WorkerConfig(cudagraph_mode=mode), str) == (mode, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        ("NONE", "NONE"),
        ("PIECEWISE", "NONE"),
        ("FULL", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    ],
)
def test_models_whose_prompts_are_launched_kernel_by_kernel(mode: str, used: str) -> None:
    """Said where it is less than was asked for."""
    found, why = mode_of(WorkerConfig(cudagraph_mode=mode), lambda: "they are wrong")  # type: ignore[arg-type]
    assert found == used
    assert why == ("they are wrong" if mode != used else "")


@pytest.mark.parametrize("flag", ["enforce_eager", "profile_layers"])
def test_flags_that_need_each_kernel_launched(flag: str) -> None:
    def never() -> str:
        raise AssertionError("nothing is tried for graphs that nobody wants")

    assert mode_of(WorkerConfig(**{flag: True}), never) == ("NONE", "--" + flag.replace("_", "-"))  # type: ignore[arg-type]
    assert mode_of(WorkerConfig(cudagraph_mode="NONE", **{flag: True}), never) == ("NONE", "")  # type: ignore[arg-type]


def test_what_the_modes_capture() -> None:
    """As docs/from-vllm.md has it: decodes, mixed steps, or both; both whole."""
    kinds = {mode: {key.uniform for key in graph_keys(mode, 64, 2048, (), 10**8)} for mode in MODES}
    assert kinds == {
        "NONE": set(),
        "PIECEWISE": {False},
        "FULL": {True, False},
        "FULL_DECODE_ONLY": {True},
        "FULL_AND_PIECEWISE": {True, False},
    }
    assert graph_keys("FULL", 64, 2048, (), 10**8) == graph_keys("FULL_AND_PIECEWISE", 64, 2048, (), 10**8)
