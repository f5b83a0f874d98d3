"""Attention of prompts by packages that a user has: fakes of the same signatures, computed in plain torch, stand for them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from attention_modules import MODULES, BatchPrefillWithPagedKVCacheWrapper
from tiny_models import spec_of

from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.reference import attention
from meshlm.protocol.layers import MLASpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.attention_packages import PACKAGES
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention import triton_backend
from meshlm.workers.attention.backend import choose
from meshlm.workers.attention.packages import MAKE, NEAR, FlashInfer, PackageAttention, PackageBackend, Prompts, differs
from meshlm.workers.batch import KnownRequests, LayerCache, Prompt, StepInputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = sorted(PACKAGES)
LATENT = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


def spec(**changed: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 53,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    return spec_of(**{**values, **changed})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A GPU of a compute capability, as far as anybody asks for it."""

    def of(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    of(9, 0)
    return of


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both packages; importing them gives the fakes."""
    for name, about in PACKAGES.items():
        (tmp_path / f"{about.module}.py").write_text("")
        monkeypatch.setitem(sys.modules, about.module, MODULES[name])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [0, 1, 16])
@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize("page", [8, 64])
def test_it_computes_what_plain_torch_computes(name: str, window: int, cap: float, page: int) -> None:
    model = spec(attn_logit_softcapping=cap)
    assert differs(MAKE[name](MODULES[name]), model, CPU, torch.float16, page, window) < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("gpu", "installed")
def test_it_is_taken_where_it_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlm.workers.attention.packages.differs", lambda *_: NEAR)
    backend = choose(name, spec(sliding_window=16), CUDA, torch.bfloat16, 16)
    assert isinstance(backend, PackageBackend)
    assert (backend.name, backend.graphs, backend.fp8) == (name, True, False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("gpu", "installed")
@pytest.mark.parametrize("error", [NEAR * 1.1, float("inf"), RuntimeError("no kernel image is available")])
def test_it_is_refused_where_it_is_wrong(name: str, error: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with what was wrong, and before anything is served."""

    def wrong(*_: object) -> object:
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr("meshlm.workers.attention.packages.differs", wrong)
    why = "no kernel image" if isinstance(error, Exception) else "of the norm away from plain torch"
    with pytest.raises(ProcessFatal, match=f"--attention-backend {name}: .*{why}.*; use auto"):
        choose(name, spec(), CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_window_is_seen(name: str) -> None:
    """As it would be if a package counted the query's own key otherwise."""

    class Off:
        def attend(self, *arguments: Any) -> Tensor:
            query, keys, values, prompts, scale, extras, step = arguments
            off = Extras(window=extras.window + 1, cap=extras.cap)
            found: Tensor = MAKE[name](MODULES[name]).attend(query, keys, values, prompts, scale, off, step)
            return found

    assert differs(Off(), spec(), CPU, torch.float32, 16, 16) > NEAR


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("gpu")
def test_where_it_is_not_installed_that_is_said(name: str) -> None:
    about = PACKAGES[name]
    with pytest.raises(ProcessFatal, match=f"it needs the package {about.module}: .*, or use auto"):
        choose(name, spec(), CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize(
    ("name", "capability", "changed", "why"),
    [
        ("flash_attn", (8, 0), {}, "needs compute capability 9, this GPU has compute capability 8.0"),
        ("flash_attn", (10, 0), {}, "needs compute capability 9, this GPU has compute capability 10.0"),
        ("flashinfer", (9, 0), {"head_dim": 96}, "heads of 64, 128, 256 numbers, this model has 96"),
        ("flashinfer", (9, 0), {"mla": LATENT}, "no multi-head latent attention"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_it_cannot_do_is_refused_by_name(
    name: str, capability: tuple[int, int], changed: dict[str, Any], why: str, gpu: Callable[[int, int], None]
) -> None:
    gpu(*capability)
    with pytest.raises(ProcessFatal, match=f"--attention-backend {name}: .*{why}"):
        choose(name, spec(**changed), CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [0, 20])
def test_a_steps_prompts_are_its(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the decodes, whose lines it leaves alone; by the tables of the layer's group."""
    monkeypatch.setattr(triton_backend, "prefill", lambda *_, **__: pytest.fail("the Triton kernel computed prompts"))
    torch.manual_seed(0)
    group, page, decodes = 1, 8, 2
    prompts = (Prompt(4, 30, 2, 7), Prompt(1, 0, 9, 12))  # row, start, first, count
    blocks = torch.randperm(6 * 8, dtype=torch.int32).view(6, 8)
    rows, starts = torch.tensor([0, 3, 4, 1]), torch.tensor([9, 5, 30, 0])
    at = Columns(rows, starts, torch.tensor([1, 2, 9, 21]), 4, blocks)
    batch = StepInputs(
        torch.zeros(21), torch.zeros(21), (), (blocks.flip(0), blocks), None, decodes, columns=at,
        known=KnownRequests(decodes, decodes, prompts),
    )  # fmt: skip
    keys, values = torch.randn(2, 48, page, 2, 64)
    query, out = torch.randn(21, 4, 64), torch.full((21, 4, 64), 7.0)
    step = PackageAttention(batch, page, *(None,) * 3).use(MAKE[name](MODULES[name]))  # type: ignore[arg-type]
    extras = Extras(window=window)
    for _ in range(2):  # layers
        step._prompts(query, query, LayerCache(keys, values, group=group), 0.1, out, extras)
    wanted = attention(query, keys, values, at, 0.1, extras)
    torch.testing.assert_close(out[decodes:], wanted[decodes:])
    assert torch.equal(out[:decodes], torch.full_like(out[:decodes], 7.0))


@pytest.mark.parametrize("why", ["graph", "sinks", "chunks", "slopes", "decodes"])
def test_what_it_has_no_word_for_is_the_triton_kernels(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(triton_backend, "prefill", lambda *given, **_: seen.append(given[0]))
    known = KnownRequests(1, 1, () if why == "decodes" else (Prompt(0, 0, 1, 3),))
    at = Columns(torch.zeros(2), torch.zeros(2), torch.tensor([1, 4]), 2, torch.zeros(2, 4, dtype=torch.int32))
    batch = StepInputs(
        torch.zeros(4), torch.zeros(4), (), (at.blocks,), None, 1, columns=at, known=None if why == "graph" else known
    )
    step = PackageAttention(batch, 8, *(None,) * 3).use(MAKE["flash_attn"](MODULES["flash_attn"]))  # type: ignore[arg-type]
    query, cache = torch.zeros(4, 4, 64), LayerCache(*torch.zeros(2, 4, 8, 2, 64))
    of_heads = torch.zeros(4)
    kinds = {"sinks": Extras(sinks=of_heads), "chunks": Extras(chunk=8), "slopes": Extras(slopes=of_heads)}
    step._prompts(query, query, cache, 0.1, query, kinds.get(why, PLAIN))
    assert len(seen) == 1


def test_a_plan_is_made_once_for_the_layers_of_a_step() -> None:
    """With windows and without: each has its own, and another step has others."""
    package, keys = FlashInfer(MODULES["flashinfer"]), torch.zeros(4, 16, 2, 64)
    query, pages = torch.zeros(5, 4, 64), torch.arange(4, dtype=torch.int32)[None]
    begun = BatchPrefillWithPagedKVCacheWrapper.num_plans
    for _ in range(2):
        prompts = Prompts(0, 5, (5,), (40,), pages)
        for _ in range(3):
            for window in (0, 16):
                package.attend(query, keys, keys, prompts, 0.1, Extras(window=window), prompts)
    assert BatchPrefillWithPagedKVCacheWrapper.num_plans - begun == 4
