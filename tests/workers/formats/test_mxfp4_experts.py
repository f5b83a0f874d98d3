"""Experts of gpt-oss that stay MXFP4: loaded as the files have them, and the same model as when they are decoded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_files import EXPERT, as_mxfp4, change
from gluon_on_torch import on_torch
from small_models import caches, load, resolved, run

from meshlm.kernels.mxfp4.reference import decode_mxfp4
from meshlm.kernels.packed_experts import direct
from meshlm.kernels.packed_experts import kernel as usual
from meshlm.kernels.packed_experts.layout import ExpertWeight, encode_mxfp4, unpack
from meshlm.kernels.packed_experts.plan import DirectShape
from meshlm.kernels.tuning.core import OPERATIONS
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.layers import cpu_ops
from meshlm.workers.models.counts import active_parameters
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.moe.experts import self_test
from meshlm.workers.moe.experts.triton import epilogues
from meshlm.workers.weights import layer_formats
from meshlm.workers.weights.layouts import MXFP4Source
from meshlm.workers.weights.reload import reload_weights
from meshlm.workers.weights.source import Mapped


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels have proven themselves."""
    monkeypatch.setattr("meshlm.workers.weights.load.keeps_mxfp4", lambda *given: True)


def logits(model: Decoder) -> torch.Tensor:
    """Of a prompt of 19 tokens."""
    tokens = torch.arange(19) * 7 % 211
    found: torch.Tensor = run(model, caches(model.spec, 8), [(tokens.tolist(), 0, [5, 1, 3, 2, 6])])
    return found


def test_kept_and_decoded_are_one_model(kept: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_mxfp4(tmp_path)
    monkeypatch.setattr(cpu_ops, "available", lambda: False)  # whose kernels pack values
    packed = load(tmp_path)
    monkeypatch.setattr("meshlm.workers.weights.load.keeps_mxfp4", lambda *given: False)
    decoded = load(tmp_path)
    for ours, theirs in zip(packed.mixtures(), decoded.mixtures(), strict=True):
        for one, other in zip(ours.experts.linears(), theirs.experts.linears(), strict=True):
            weight = one.grouped().kernel
            assert isinstance(weight, ExpertWeight)
            assert not isinstance(other.grouped().kernel, ExpertWeight)
            assert one.weight.nbytes + one.get_parameter("weight_scale").nbytes < other.weight.nbytes / 3
            assert one.num_weights() == other.num_weights() == other.weight.numel()
            assert torch.equal(unpack(weight, torch.float32), other.weight)
    assert torch.equal(logits(packed), logits(decoded))
    assert active_parameters(packed) == active_parameters(decoded)
    monkeypatch.setattr("meshlm.workers.weights.load.keeps_mxfp4", lambda *given: True)
    codes = next(packed.mixtures()[0].experts.parameters())
    before = codes.clone()
    with torch.inference_mode():
        codes.zero_()
        reload_weights(packed, resolved(tmp_path), torch.device("cpu"), 0, only_experts=True)
    assert torch.equal(codes, before)


def test_a_scale_that_is_no_number_is_refused(kept: None, tmp_path: Path) -> None:
    as_mxfp4(tmp_path)
    change(tmp_path, {f"{EXPERT}.down_proj_scales": torch.full((6, 64, 3), 255, dtype=torch.uint8)})
    with pytest.raises(ProcessFatal, match=r"weights of layers\.1\.mlp\.experts\.down\.weight_scale hold NaN"):
        load(tmp_path)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    """As while a model is loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_what_was_mxfp4_is_encoded_as_it_was(bfloat16: None) -> None:
    blocks = torch.randint(0, 256, (40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(90, 140, (40, 5), dtype=torch.uint8)
    values = decode_mxfp4(blocks, scales, torch.bfloat16)
    parts = encode_mxfp4(values)
    weight = ExpertWeight(parts["weight"].view(torch.int16), parts["weight_scale"], 160)
    assert torch.equal(unpack(weight, torch.bfloat16), values)
    zeros = encode_mxfp4(torch.zeros(2, 32))
    assert not zeros["weight"].any()
    near = torch.randn(64, 96)
    parts = encode_mxfp4(near)
    found = unpack(ExpertWeight(parts["weight"].view(torch.int16), parts["weight_scale"], 96), torch.float32)
    assert float((found - near).norm() / near.norm()) < 0.15


def test_dummy_weights_are_mxfp4_too(kept: None, tmp_path: Path) -> None:
    as_mxfp4(tmp_path)
    model = load(tmp_path, "dummy")
    weight = model.mixtures()[0].experts.down.grouped().kernel
    assert isinstance(weight, ExpertWeight)
    assert 0.01 < float(unpack(weight, torch.float32).std()) < 0.03


def test_parts_of_a_matrix() -> None:
    """Outputs that alternate between gate and up, and inputs in whole groups: what decoding gives."""
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(118, 130, (3, 10, 4), dtype=torch.uint8)
    source = MXFP4Source(Mapped(blocks), Mapped(scales), 2, range(1, 10, 2))
    for dim, begin, end in ((0, 0, 5), (0, 1, 4), (1, 0, 128), (1, 32, 96)):
        found = decode_mxfp4(*source.packed(dim, begin, end), torch.float32)
        assert torch.equal(found, source.part(dim, begin, end))


def test_reasons_to_decode(tmp_path: Path) -> None:
    as_mxfp4(tmp_path)
    spec = resolved(tmp_path).spec
    assert layer_formats.why_unfit(spec, Shard()) == ""
    two = Shard(tp_rank=1, tp_size=2)
    assert (
        layer_formats.why_unfit(spec, two)
        == "on this rank down has 48 inputs, no multiple of the 32 that have a scale together"
    )
    assert layer_formats._of_device(torch.device("cuda"), torch.float32).startswith("the kernels compute in float16")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels that are wrong for what the GPU gives are not launched there"
)
def test_kernels_prove_themselves(bfloat16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: as they are, with another limit, and where they raise."""
    monkeypatch.setattr(self_test, "ROWS", (3,))
    monkeypatch.setattr(self_test, "EXPERTS", 4)
    monkeypatch.setattr(self_test, "HIDDEN", 64)
    monkeypatch.setattr(self_test, "WIDE", 32)
    device = torch.device("cpu")
    for ask in (self_test.of_packed.__wrapped__, self_test.of_extras.__wrapped__):
        assert ask(torch.float16, device) == ""
    for act in ("gelu_pytorch_tanh", "relu2"):
        assert self_test.of_extras.__wrapped__(torch.float16, device, act) == ""
    module = "meshlm.workers.moe.experts.packed"
    monkeypatch.setattr(
        f"{module}.epilogues", lambda extras, act: (epilogues(extras)[0]._replace(limit=3.0), epilogues(extras)[1])
    )
    assert "of a row's norm away from plain torch" in self_test.of_packed.__wrapped__(torch.float16, device)
    monkeypatch.setattr("meshlm.kernels.packed_experts.kernel.few", None)
    assert "the kernels fail: TypeError" in self_test.of_packed.__wrapped__(torch.float16, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for the interpreter")
def test_kernels_of_few_rows_prove_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan that is proven, and what is wrong is found. The interpreter has no products of bfloat16: those that the usual kernels
    compute are computed alike."""
    theirs, shape = on_torch(direct), DirectShape(2, 2)
    monkeypatch.setattr(direct, "few", theirs.few)
    monkeypatch.setattr(direct, "sorted_rows", theirs.sorted_rows)
    monkeypatch.setattr(
        usual,
        "sorted_rows",
        lambda x, w, out, own, *given, **named: theirs.sorted_rows(x, w, out, shape, own.block_m, *given, **named),
    )
    assert {len(numbers) for numbers in self_test.DIRECT.values()} == {OPERATIONS["packed_experts"].num_config}
    plans = self_test.DIRECT
    monkeypatch.setattr(self_test, "DIRECT", {1: plans[1], 3: plans[3], 20: plans[40]})
    for name, value in (("EXPERTS", 5), ("HIDDEN", 160), ("WIDE", 96)):  # no whole chunks
        monkeypatch.setattr(self_test, name, value)
    device = torch.device("cpu")
    assert self_test._is_direct_right.__wrapped__(device)
    monkeypatch.setattr(direct, "few", lambda x, w, experts, weights, out, *given: out.zero_())
    assert not self_test._is_direct_right.__wrapped__(device)
