"""GPTQ, AWQ and pack-quantized checkpoints compute what their formats say, whole and in shards; what is wrong with one is named."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from packed_models import KINDS, Packed, gptq, write
from safetensors.torch import save_file
from sharded_models import load_shards, logits_of, together
from small_models import caches, load, run
from torch import Tensor

from meshlm.kernels.packed_gemm.reference import PackedWeight, decode
from meshlm.protocol.model import QuantizationScheme
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.formats.format import UNQUANTIZED, ProductOps, WeightedLayer
from meshlm.workers.formats.packed import PACKED_ROWS, PackedFormat, packed_linear
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.elements import Linear
from meshlm.workers.models.counts import active_parameters
from meshlm.workers.weights.scales import tensors_of
from meshlm.workers.weights.sources import sources

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
TOKENS = torch.arange(37).mul(17).remainder(211).tolist()


def expected_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-3 * float(expected.std()), rtol=2e-3)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU computes, for some; and with words that stay packed."""
    theirs, _ = write(tmp_path, KINDS[name])
    expected = expected_of(theirs)
    if name in ("gptq-act-order", "awq-some"):
        ours = load(tmp_path)
        close(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), expected)
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    ours = load(tmp_path)
    product = ours.get_submodule("layers.1.attention.qkv")
    assert isinstance(product, Linear)
    assert product.weight.dtype == torch.int32
    close(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), expected)


def as_on_a_gpu(self: PackedFormat, linear: WeightedLayer, ops: ProductOps) -> None:
    """Words stay, as a GPU has them."""
    self.weight = self._packed_matrix(linear.matrices()[0], linear.dtype)
    linear.weight = torch.nn.Parameter(self.weight.low, requires_grad=False)


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "w8a16"])
def test_values_beside_words_are_for_many_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, for as few rows as the words take and for more; and what is kept is said to be."""
    theirs, _ = write(tmp_path, KINDS[name])
    expected = expected_of(theirs)
    monkeypatch.setattr(cpu_ops, "available", lambda: False)

    def finish(self: PackedFormat, linear: WeightedLayer, ops: ProductOps) -> None:
        self.keeps_values = True
        as_on_a_gpu(self, linear, ops)
        assert self.weight is not None
        linear.weight_values = torch.nn.Parameter(decode(self.weight, torch.float32), requires_grad=False)

    monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    whole = active_parameters(load(tmp_path))
    monkeypatch.setattr(PackedFormat, "finish", finish)
    ours, packed_rows = load(tmp_path), []
    assert active_parameters(ours) == whole

    def counted(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        packed_rows.append(len(x))
        return packed_linear(x, weight, bias)

    monkeypatch.setattr("meshlm.workers.formats.packed.packed_linear", counted)
    close(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), expected)
    assert len(TOKENS) > PACKED_ROWS
    assert packed_rows == []
    few = TOKENS[:PACKED_ROWS]
    close(run(ours, caches(ours.spec, 24), [(few, 0, TABLE)]), expected[: len(few)])
    assert set(packed_rows) == {PACKED_ROWS}


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "w4a16-zeros", "w4a16-order", "w8a16", "mxfp4"])
def test_shards(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's inputs of row-parallel products are some of each group, where inputs are out of order."""
    theirs, _ = write(tmp_path, KINDS[name])
    monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    found = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS))
    assert torch.equal(found[0], found[1])
    close(found[0], expected_of(theirs))


HEADS = {
    "gptq": KINDS["gptq-zeros"]._replace(config=gptq(lm_head=True), head=True),
    "w4a16": KINDS["w4a16-zeros"]._replace(config={**KINDS["w4a16-zeros"].config, "ignore": []}, head=True),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("stays", [True, False], ids=["gpu", "cpu"])
def test_a_quantised_head(name: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in shards."""
    theirs, tensors = write(tmp_path, HEADS[name], vocab_size=240)
    assert "lm_head.weight" not in tensors
    if stays:
        monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    ours, expected = load(tmp_path), expected_of(theirs)
    assert ours.head is not None
    assert ours.head.is_fusible is not stays
    close(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), expected)
    if stays:
        out, hidden = torch.empty(len(TOKENS), 240), torch.randn(len(TOKENS), ours.spec.hidden_size)
        assert ours.logits(hidden, out) is out
        torch.testing.assert_close(out, ours.logits(hidden))
    for found in together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS)):
        close(found, expected)


def test_a_group_is_of_one_rank(tmp_path: Path) -> None:
    write(tmp_path, KINDS["gptq-v2"])
    with pytest.raises(ProcessFatal, match=r"o_proj has 32 inputs on a rank, no multiple of the 64"):
        load_shards(tmp_path, 2, 1)


def test_zero_points_that_are_all_the_same_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, KINDS["gptq"])
    monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    method = load(tmp_path).get_submodule("layers.0.mlp.down").format
    assert isinstance(method, PackedFormat)
    assert isinstance(method.weight, PackedWeight)
    assert method.weight.zeros is None
    assert method.weight.zero == 8
    assert method.weight.scales.dtype == torch.float16


def test_settings_of_some_layers(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: layers left out, and layers with other bits."""
    kind = KINDS["gptq"]._replace(ignore=("layers.0.mlp",))
    theirs, tensors = write(tmp_path, kind._replace(config=gptq(sym=True, dynamic={r"-:model\.layers\.0\.mlp": {}})))
    close(run(load(tmp_path), caches(load(tmp_path).spec, 24), [(TOKENS, 0, TABLE)]), expected_of(theirs))
    assert "model.layers.0.mlp.down_proj.weight" in tensors


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("says", [{"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}, {}])
@pytest.mark.parametrize("sym", [True, None])
@pytest.mark.parametrize("files", ["gptq", "gptq_v2"])
def test_zero_points_of_symmetric_weights_tell_how_they_are_written(
    files: str, sym: bool | None, says: dict[str, Any], bits: int, tmp_path: Path
) -> None:
    """Whatever checkpoint_format says of them."""
    kind = Packed(gptq(sym=sym, bits=bits, **says), files, bits=bits, symmetric=True)
    theirs, _ = write(tmp_path, kind)
    model = load(tmp_path)
    close(run(model, caches(model.spec, 24), [(TOKENS, 0, TABLE)]), expected_of(theirs))


def test_other_zero_points_contradict_sym_true(tmp_path: Path) -> None:
    write(tmp_path, Packed(gptq(sym=True), "gptq"))
    with pytest.raises(ProcessFatal, match=r"qzeros: quantization_config says sym true, and zero points are not all 7"):
        load(tmp_path)


UP, QUERY = "model.layers.1.mlp.up_proj.", "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("gptq", {UP + "scales": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.scales$"),
        ("gptq", {UP + "qzeros": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.qzeros$"),
        ("gptq", {UP + "scales": torch.full((2, 128), torch.nan).half()}, "up_proj.scales: a scale must be a number"),
        ("gptq", {UP + "scales": torch.ones(1, 128)}, r"scales \(1, 128\) instead of \(2, 128\)"),
        ("gptq", {UP + "qweight": torch.ones(8, 128)}, r"of a type that is not read .*qweight \(F32\)"),
        ("gptq", {UP + "g_idx": torch.zeros(64, dtype=torch.int32)}, "g_idx is not groups in order, as desc_act false says"),
        ("gptq", {UP + "bias": torch.ones(128)}, "up_proj.bias is not zero, and the model has no such bias"),
        ("gptq", {UP + "weight": torch.ones(128, 64)}, "does not have: model.layers.1.mlp.up_proj.weight"),
        ("gptq-act-order", {QUERY + "g_idx": torch.arange(64).to(torch.int32) // 32}, "order their inputs in different ways"),
        ("gptq-act-order", {"model.layers.1.mlp.down_proj.g_idx": torch.full((128,), 9).to(torch.int32)}, "none of 4"),
        ("w4a16", {UP + "weight_shape": torch.tensor([128, 60])}, "weight_shape is not the weight's shape"),
        ("w4a16", {UP + "weight_zero_point": torch.ones(16, 2, dtype=torch.int32)}, "does not have: .*weight_zero_point"),
        ("awq", {"lm_head.weight": torch.ones(211, 64, dtype=torch.int32)}, "lm_head.weight is of type I32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    kind: str, changed: dict[str, Tensor | None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors = write(tmp_path, KINDS[kind])
    kept = {**tensors, **changed}
    save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises((ProcessFatal, ModelFilesError), match=said) as told:
        load(tmp_path)
    assert "\n" not in str(told.value)


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    """AutoGPTQ has written them for layers without any."""
    theirs, tensors = write(tmp_path, KINDS["gptq"])
    save_file(tensors | {UP + "bias": torch.zeros(128).half()}, tmp_path / "model.safetensors")
    ours = load(tmp_path)
    close(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), expected_of(theirs))


@pytest.mark.parametrize(
    ("files", "shape", "said"),
    [
        ("awq", (64, 144), "down_proj has 144 inputs, no multiple of group_size 32"),
        ("gptq", (132, 64), "down_proj.qweight: 132 outputs are no multiple of the 8 in a word"),
        ("gptq", (64, 132), "down_proj.qweight: 132 inputs are no multiple of the 8 in a word"),
    ],
)
def test_sizes_that_do_not_divide(files: Literal["awq", "gptq"], shape: tuple[int, int], said: str) -> None:
    scheme = QuantizationScheme(
        targets=("Linear",), weight="group", activation="none", bits=4, weight_group=32, zeros=True, files=files
    )
    with pytest.raises(ProcessFatal, match=said):
        tensors_of("down_proj.weight", shape, scheme, 0)


def test_unquantised_layers_are_not_touched(tmp_path: Path) -> None:
    write(tmp_path, KINDS["awq-some"])
    model = load(tmp_path)
    kept = model.get_submodule("layers.1.mlp.down")
    assert isinstance(kept, Linear)
    assert kept.format is UNQUANTIZED


@pytest.mark.parametrize("name", ["gptq-zeros", "w8a16", "gptq-act-order", "mxfp4"])
def test_dummy_weights_are_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the dummy weights of the plain model, to the nearest code."""
    write(tmp_path, KINDS[name])
    monkeypatch.setattr(PackedFormat, "finish", as_on_a_gpu)
    model = load(tmp_path, "dummy")
    product = model.get_submodule("layers.0.mlp.down")
    assert isinstance(product, Linear)
    assert isinstance(product.format, PackedFormat)
    assert product.format.weight is not None
    values = decode(product.format.weight, torch.float32)
    steps = product.format.weight.scales.float().max()
    source = dict(sources(tmp_path, "dummy", model.spec, torch.device("cpu"), 0))["model.layers.0.mlp.down_proj.weight"]
    widest = (
        2.0 if name == "mxfp4" else 0.51
    )  # from the largest number, 6, to those that round to a power of two further on
    assert float((values - source.whole()).abs().max()) <= widest * float(steps)
