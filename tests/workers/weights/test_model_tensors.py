"""Every tensor that a model keeps is found, in whatever form a quantisation has it: what sleeps has none of them on the GPU."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from family_models import CASES, config_of
from gguf_models import write_gguf
from packed_models import KINDS as PACKED
from quantised_models import KINDS as FP8
from small_models import SMALL, load
from torch import Tensor

from meshlm.workers.formats.format import ProductOps, Unquantized, WeightedLayer
from meshlm.workers.formats.packed import GGUFFormat, PackedFormat
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.elements import Linear
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights import load as loading
from meshlm.workers.weights.gguf_parameters import keep_spans
from meshlm.workers.weights.reload import tensors_of

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}
QUANTISED = {**{name: kind.config for name, kind in (FP8 | PACKED).items()}, "int8": INT8}
OTHERS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def reachable(model: Decoder) -> Iterator[Tensor]:
    """All tensors that Python's own garbage collector finds behind the model, but for those of the communicator and the ops."""
    seen, left = {id(model.comm), id(model.ops)}, [model]
    while left:
        one: Any = left.pop()
        if id(one) in seen or isinstance(one, OTHERS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        left += gc.get_referents(one)


def check(model: Decoder) -> None:
    found = {one.untyped_storage()._cdata for one in tensors_of(model)}
    there = {one.untyped_storage()._cdata: one for one in reachable(model) if one.numel()}
    lost = [tuple(one.shape) for storage, one in there.items() if storage not in found]
    assert not lost
    assert len(there) > 10


def loaded(folder: Path, config: dict[str, Any]) -> Decoder:
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder, "dummy")


@pytest.mark.parametrize("name", QUANTISED)
def test_of_every_quantisation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: PackedFormat, linear: WeightedLayer, ops: ProductOps) -> None:
        """Words stay, as a GPU has them."""
        self.weight = self._packed_matrix(linear.matrices()[0], linear.dtype)
        for last in ("weight_scale", "weight_zero", "input_group"):
            linear._parameters.pop(last, None)
        linear.weight = torch.nn.Parameter(self.weight.low, requires_grad=False)

    monkeypatch.setattr(PackedFormat, "finish", finish)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    model = loaded(
        tmp_path, {**SMALL, **sizes, "architectures": ["LlamaForCausalLM"], "quantization_config": QUANTISED[name]}
    )
    kinds = {type(linear.format).__name__ for linear in model.modules() if isinstance(linear, Linear)}
    assert kinds & {"Fp8Format", "PackedFormat", "Int8Format"}
    check(model)


def test_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows stay as the file has them, of several types."""
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    monkeypatch.setattr(loading, "keep", lambda model, tensors, exact: keep_spans(model, tensors))
    write_gguf(tmp_path / "m.gguf", {"v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"})
    model = load(tmp_path / "m.gguf")
    assert any(isinstance(linear.format, GGUFFormat) for linear in model.modules() if isinstance(linear, Linear))
    check(model)


def test_of_a_plug_ins_method(tmp_path: Path) -> None:
    class Method(Unquantized):
        def finish(self, linear: WeightedLayer, ops: ProductOps) -> None:
            self.scales = {"rows": [torch.ones(7)]}

    Method.__module__ = "elsewhere"
    model = loaded(tmp_path, {**SMALL, "architectures": ["LlamaForCausalLM"]})
    linear = next(one for one in model.modules() if isinstance(one, Linear))
    linear.format = Method()
    linear.format.finish(linear, model.ops)
    check(model)


@pytest.mark.parametrize("architecture", CASES)
def test_of_every_family(architecture: str, tmp_path: Path) -> None:
    check(loaded(tmp_path, config_of(architecture)))
