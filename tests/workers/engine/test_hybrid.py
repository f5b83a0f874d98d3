"""Models with recurrent states behind a scheduler: tokens stay transformers' own, whole, in chunks, preempted, and behind checkpoints.

What no request needs any more is overwritten with NaN before each step, so whoever goes on from a state that was given back is seen.
"""

from pathlib import Path

import pytest
from hybrid_cases import CASES
from served_engines import AGAIN, Engines, Reference, made, served

from meshlm.protocol.kv import FullAttention, RecurrentState

ALONE = ("mamba2", "mamba", "falcon-mamba")  # nothing attends
PAGES = {**dict.fromkeys(ALONE, 4), "jamba": 16, "qwen3-next": 16, "qwen3.5": 16, "lfm2": 52, "lfm2-moe": 52}
SIZES = {**dict.fromkeys(ALONE, 16), "recurrentgemma": 32}  # of blocks, as states are large
WINDOWED = ("recurrentgemma",)  # what attends has a window


@pytest.fixture(params=CASES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, made(CASES[request.param], folder)


@pytest.mark.parametrize(("backend", "mode", "tp", "pp"), [("torch", "align", 1, 1), ("cpu", "all", 1, 1)])
def test_tokens_are_transformers(model: tuple[str, Path, Reference], backend: str, mode: str, tp: int, pp: int) -> None:
    case, folder, expected = model
    size = SIZES.get(case, 48)
    engines = Engines(folder, PAGES.get(case, 12), backend, tp, pp, mamba_cache_mode=mode, mamba_block_size=size)
    try:
        bench = served(engines, pp)
    finally:
        engines.close()
    assert any(isinstance(spec, RecurrentState) and spec.mode == mode for spec in engines.kv_specs)
    assert (FullAttention() in engines.kv_specs) == (case not in (*ALONE, *WINDOWED))
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    if case not in ("jamba", "qwen3-next", "qwen3.5"):  # nothing of them is left in so little memory; see below
        assert bench.cached[AGAIN[-1]] >= (32 if case in ALONE else 48), "too little was found in the prefix cache"


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("bamba", 2, 1),
        ("lfm2", 2, 1),
        ("falcon-h1", 2, 1),
        ("granite", 1, 2),
        ("nemotron", 2, 1),
        ("nemotron-experts", 2, 1),
        ("qwen3-next", 2, 1),
        ("jamba", 1, 2),
        ("recurrentgemma", 2, 1),
    ],
)
def test_ranks_and_stages(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Heads with their states, and groups of B and C, are split; each stage has the pages of its own layers."""
    expected = made(CASES[case], tmp_path)
    engines = Engines(tmp_path, 60, "torch", tp, pp, mamba_block_size=SIZES.get(case, 48))
    try:
        bench = served(engines, pp)
    finally:
        engines.close()
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.cached[AGAIN[-1]] >= 48, "too little was found in the prefix cache"
