"""How much KV cache there is, of which dtype, and what is said where it cannot be."""

from pathlib import Path

import pytest
import torch
from model_folders import resolve_model

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ContextTooLong, ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import is_needless
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import memory
from meshlm.workers.attention.backend import TorchBackend
from meshlm.workers.attention.cpu_backend import CpuBackend
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.kv.layout import KVLayout
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights import load
from meshlm.workers.weights.source import Mapped
from meshlm.workers.weights.weights_plan import WeightsPlan, weights_plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Fp8Backend(TorchBackend):
    fp8 = True


@pytest.fixture
def spec(smollm2: Path) -> ModelSpec:
    return resolve_model(str(smollm2)).spec


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


def test_auto_is_the_models_dtype() -> None:
    assert memory.cache_dtype("auto", torch.float32, CPU, TorchBackend()) == torch.float32


def test_fp8_halves_a_block(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 9, 0)
    fp8 = memory.cache_dtype("fp8", torch.bfloat16, CUDA, Fp8Backend())
    assert fp8 == torch.float8_e4m3fn
    assert memory.cache_dtype("fp8_e5m2", torch.bfloat16, CUDA, Fp8Backend()) == torch.float8_e5m2
    assert 2 * KVLayout(spec, 16, 256, fp8).page_bytes == KVLayout(spec, 16, 256, torch.bfloat16).page_bytes


def test_fp8_needs_a_gpu_that_has_it_and_a_backend_that_reads_it(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability(monkeypatch, 8, 0)
    with pytest.raises(ProcessFatal, match=r"--kv-cache-dtype fp8: it needs compute capability 8.9, this GPU has 8.0"):
        memory.cache_dtype("fp8", torch.bfloat16, CUDA, Fp8Backend())
    capability(monkeypatch, 9, 0)
    with pytest.raises(ProcessFatal, match=r"--kv-cache-dtype fp8: the attention backend cpu cannot read it; use auto"):
        memory.cache_dtype("fp8", torch.float32, CPU, CpuBackend())


def test_what_cannot_be_in_8_bits_is_refused_before_anything_starts(smollm2: Path) -> None:
    config = flags.build({"model": str(smollm2), "device": "fake", "kv_cache_dtype": "fp8"}, None)
    with pytest.raises(UsageError, match="--kv-cache-dtype fp8: --device fake keeps no keys and values in 8 bits"):
        resolve.resolve(config)
    config = flags.build({"model": str(smollm2), "device": "cpu", "calculate_kv_scales": True}, None)
    with pytest.raises(UsageError, match="--calculate-kv-scales: it needs --kv-cache-dtype fp8 or fp8_e5m2"):
        resolve.resolve(config)


def test_compile_is_refused_where_it_cannot_be(smollm2: Path) -> None:
    with pytest.raises(UsageError, match="--compile inductor: it needs a GPU, not --device cpu"):
        resolve.resolve(flags.build({"model": str(smollm2), "device": "cpu", "compile": "inductor"}, None))
    wide = {"model": str(smollm2), "device": "cuda", "compile": "inductor", "tensor_parallel_size": 2}
    with pytest.raises(UsageError, match="--compile inductor: it needs --tensor-parallel-size 1"):
        resolve.resolve(flags.build(wide, None))


def test_scales_are_of_an_fp8_cache_only(spec: ModelSpec) -> None:
    scales = [(0.5, 0.25)] * spec.num_hidden_layers
    (first, *_) = memory.make_caches(KVLayout(spec, 16, 256, torch.float8_e4m3fn), 2, CPU, scales)
    assert (first.k_scale, first.v_scale) == (0.5, 0.25)
    assert first.keys.dtype == torch.float8_e4m3fn
    assert not first.keys.float().any()
    (first, *_) = memory.make_caches(KVLayout(spec, 16, 256, torch.float32), 2, CPU, scales)
    assert (first.k_scale, first.v_scale) == (1.0, 1.0)


@pytest.mark.parametrize(
    "form",
    [
        f"self_attn.{name}"
        for name in (
            "k_scale",
            "attn.k_scale",
            "k_proj.k_scale",
            "k_proj.output_scale",
            "k_cache.scale",
            "qkv_proj.k_scale",
        )
    ],
)
def test_scales_come_from_the_checkpoint(spec: ModelSpec, form: str) -> None:
    with torch.device("meta"):
        model = Decoder(spec, 16)
    assert load._take_kv_scale(f"model.layers.1.{form}", Mapped(torch.tensor([0.5])), model)
    assert load._take_kv_scale("model.layers.1.self_attn.v_scale", Mapped(torch.tensor(0.25)), model)
    assert not load._take_kv_scale("model.layers.1.self_attn.k_proj.weight", Mapped(torch.zeros(1)), model)
    assert model.kv_scales()[:2] == [(None, None), (0.5, 0.25)]
    assert load._take_kv_scale("model.layers.2.self_attn.kv_scale", Mapped(torch.tensor(2.0)), model)
    assert model.kv_scales()[2] == (2.0, 2.0)
    assert not load._take_kv_scale("model.layers.1.self_attn.q_scale", Mapped(torch.tensor(0.25)), model)
    assert is_needless("model.layers.1.self_attn.q_scale"), "queries are not rounded"
    for bad in (torch.ones(2), torch.tensor(0.0), torch.tensor(float("nan"))):
        with pytest.raises(ProcessFatal, match=r"layers.0.self_attn.k_scale: one positive number"):
            load._take_kv_scale("model.layers.0.self_attn.k_scale", Mapped(bad), model)


def test_a_full_step_is_filled() -> None:
    assert memory.full_step(100, 30) == [30, 30, 30, 10]
    assert memory.full_step(60, 30) == [30, 30]
    assert memory.full_step(20, 30) == [20]


def test_what_is_known_before_a_gguf_file_is_loaded(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 layers keep two lines of 3 heads of 64 numbers of each token; others have 1000 bytes of the GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80 << 30))
    values = {"model": str(smollm2), "device": "cuda", "max_model_len": 1024, "gpu_memory_utilization": 0.5}
    config = resolve.resolve(flags.build(values, None))
    plan = weights_plan(config, CUDA, 1000, Shard(tp_size=3), torch.bfloat16)
    assert plan == WeightsPlan("auto", "cuda", False, (40 << 30) - 1000, 30 * 2 * 64 * 2 * 1024, None, 3)
    assert weights_plan(config, CPU, 0, Shard(), torch.float32).device == "cpu"


def test_too_little_for_one_request_names_what_fits(smollm2: Path) -> None:
    config = resolve.resolve(flags.build({"model": str(smollm2), "device": "cpu", "max_model_len": 256}, None))
    assert config.resolved is not None
    layout = KVLayout(config.resolved.spec, 16, 256, torch.float32)
    each = layout.page_bytes
    with pytest.raises(ProcessFatal, match=r"--max-model-len 256 .* --max-model-len 160 would fit"):
        memory.num_pages(config, 10 * each, layout)
    with pytest.raises(ProcessFatal, match="not even one block fits"):
        memory.num_pages(config, -5, layout)
    assert memory.num_pages(config, 17 * each, layout) == 17


def test_the_share_is_the_workers_own_and_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 100 GiB: 1 of others, 20 of weights; a full step has 5 at most and leaves a workspace of 2."""
    gib = 1 << 30
    state = {"others": 1, "torch": 0, "peak": 0}
    monkeypatch.setattr(memory, "_gpu", lambda: ((100 - state["others"] - state["torch"]) * gib, 100 * gib))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: state["torch"] * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["peak"] * gib)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    others = memory.taken_by_others()
    assert others == gib
    state["torch"] = 20

    def run(caches: object) -> None:
        state.update(torch=22, peak=25)

    def found(utilization: float) -> int:
        state.update(torch=20)
        return memory.profile(utilization, others, list, run)

    assert found(0.9) == (90 - 20 - 2 - 3) * gib
    state["others"] = 51
    others = memory.taken_by_others()
    assert others == 51 * gib
    assert found(0.9) == (100 - 51 - 22 - 3) * gib - memory.ROOM_FOR_GRAPHS, "no more than there is"
    assert found(0.4) == (40 - 22 - 3) * gib, "what others have does not count"
    state["others"] = 1
    assert found(0.4) == (40 - 22 - 3) * gib, "and when it is gone, that is no room of this worker's"


def test_a_number_of_blocks_is_taken_whatever_the_memory(smollm2: Path) -> None:
    """16 blocks and a step's more hold the longest request; what all requests could fill is no limit."""
    values = {"model": str(smollm2), "device": "cpu", "max_model_len": 256, "max_num_seqs": 1}
    for wanted in (17, 1000):
        config = resolve.resolve(flags.build(values | {"num_gpu_blocks_override": wanted}, None))
        assert config.resolved is not None
        layout = KVLayout(config.resolved.spec, 16, 256, torch.float32)
        assert memory.num_pages(config, 100 * layout.page_bytes, layout) == wanted
    few = resolve.resolve(flags.build(values | {"num_gpu_blocks_override": 10}, None))
    with pytest.raises(
        ProcessFatal, match=r"override 10: .* 256 tokens needs 1\d KV blocks; with 10 --max-model-len 160 would"
    ):
        memory.num_pages(few, 100 * layout.page_bytes, layout)


def test_auto_tells_what_fits(smollm2: Path) -> None:
    config = resolve.resolve(flags.build({"model": str(smollm2), "device": "cpu", "max_model_len": -1}, None))
    assert config.resolved is not None
    layout = KVLayout(config.resolved.spec, 16, 256, torch.float32)
    with pytest.raises(ContextTooLong, match="8192 tokens needs") as error:
        memory.num_pages(config, 10 * layout.page_bytes, layout)
    assert error.value.fits == 160
    with pytest.raises(ProcessFatal, match="not even one block") as fatal:
        memory.num_pages(config, -5, layout)
    assert not isinstance(fatal.value, ContextTooLong)
