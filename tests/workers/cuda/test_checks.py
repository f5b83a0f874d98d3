"""Wrong GPUs: one line that says what is wrong and what would do."""

import pytest
import torch
from tiny_models import spec_of

from meshlm.protocol.model import ModelSpec
from meshlm.runtime import platforms
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import memory
from meshlm.workers.attention.backend import choose
from meshlm.workers.cuda.start import check_gpu, runs_on
from meshlm.workers.graphs.dispatcher import Dispatcher, Recorder
from meshlm.workers.graphs.keys import Key, graph_keys

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Old 3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90", "compute_120"])
    return monkeypatch


def spec(**fields: object) -> ModelSpec:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    return spec_of(**{**sizes, "max_position_embeddings": 128, **fields})


def test_a_gpu_that_this_torch_has_no_code_for(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessFatal, match=r"--device cuda: NVIDIA Old 3 has compute capability 7.0; .*sm_75, sm_90"):
        check_gpu()
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    check_gpu()
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProcessFatal, match="--device cuda: torch sees no GPU"):
        check_gpu()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),
        ((7, 5), True),
        ((8, 0), False),
        ((9, 0), True),
        ((10, 0), False),
        ((12, 0), True),
        ((13, 1), True),
    ],
)
def test_what_runs_where(capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(["sm_75", "sm_90a", "compute_120", "other"], capability) == runs
    assert runs_on([], capability), "a build that does not say is given the benefit of the doubt"


def test_weights_that_do_not_fit_name_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    memory.check_weights(60 * GIB, CUDA)
    memory.check_weights(1 << 60, torch.device("cpu"))
    with pytest.raises(
        ProcessFatal, match=r"130.00 GiB .* 70.00 GiB free of 80.00 GiB: split .* 4 times .*--tensor-par"
    ):
        memory.check_weights(130 * GIB, CUDA)
    with pytest.raises(
        ProcessFatal, match=r"^--eplb-config num_redundant_experts: with 8.00 GiB .* 75.00 GiB, .* 70.00"
    ):
        memory.check_weights(75 * GIB, CUDA, 8 * GIB)
    with pytest.raises(ProcessFatal, match="--tensor-parallel-size"):
        memory.check_weights(130 * GIB, CUDA, 8 * GIB)
    with pytest.raises(
        ProcessFatal, match=r"^--decoded-copy: with 16.00 GiB .* 80.00 GiB, .* 70.00 GiB free; use never"
    ):
        memory.check_weights(80 * GIB, CUDA, 0, 16 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 80 * GIB))
    with pytest.raises(ProcessFatal, match="end what else runs on it"):
        memory.check_weights(16 * GIB, CUDA)


def test_a_step_that_does_not_fit_names_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 24 * GIB))

    def run(caches: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ProcessFatal, match=r"--max-num-batched-tokens .* 20.00 GiB of .* 24.00 GiB .*--max-num-seqs"):
        memory.profile(0.9, 0, list, run)


@pytest.mark.parametrize(
    ("changed", "dtype", "reason"),
    [
        ({}, torch.bfloat16, "it needs compute capability 8.0, this GPU has 7.0"),
        ({}, torch.float32, "--dtype float16 or bfloat16, not float32"),
        ({"head_dim": 1024}, torch.bfloat16, "head sizes from 16 to 512, this model has 1024"),
        ({"head_dim": 8}, torch.bfloat16, "head sizes from 16 to 512, this model has 8"),
    ],
)
def test_what_the_triton_backend_cannot(
    gpu: pytest.MonkeyPatch, changed: dict[str, object], dtype: torch.dtype, reason: str
) -> None:
    if "capability" not in reason:
        gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ProcessFatal, match=f"--attention-backend triton: .*{reason}"):
        choose("triton", spec(**changed), CUDA, dtype, 16)
    assert choose("auto", spec(**changed), CUDA, dtype, 16, platforms.named("cuda").attention_backends).name == "torch"


def test_graphs_that_find_no_memory_are_given_up() -> None:
    steps = Dispatcher(graph_keys("FULL", 64, 8192, (4, 16), 10**8), lambda key: None)
    steps._graphs[Key(16, 16)] = object()  # type: ignore[assignment]
    steps.abandon(torch.OutOfMemoryError())
    assert steps.complete
    assert steps.find(3, 3, uniform=True) == Key(16, 16)
    assert steps.find(17, 17, uniform=True) is None
    assert steps.find(300, 3, uniform=False) is None


def test_a_step_that_finds_no_memory_for_its_graph_is_launched_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Key] = []

    def full(recorder: Recorder, launch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorder, "record", full)
    steps = Dispatcher(graph_keys("FULL", 64, 8192, (4, 16), 10**8), ran.append)
    steps._graphs[Key(16, 16)] = object()  # type: ignore[assignment]
    steps.prepare(Key(4, 4))
    assert not ran
    steps.replay(Key(4, 4))
    assert ran == [Key(4, 4)]
    assert dict(steps.misses) == {"captured_now": 1, "no_memory": 1}
    assert not steps.replays
    assert steps.find(3, 3, uniform=True) == Key(16, 16), "it does not try again"
