"""Experts in every format that linear layers have: logits against the format's definition, whole, in chunks, in shards, by rank."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes_states
import int8_models
import packed_models
import pytest
import quantised_models
import torch
import torch.nn.functional as F
from packed_models import SIZES
from safetensors.torch import save_file
from sharded_models import load_shards, logits_of, together
from small_models import CPU, SMALL, caches, load, resolved, run
from torch import Tensor, nn

from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.protocol.config import ParallelConfig
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.layers.moe import GroupedLinear
from meshlm.workers.moe.experts import self_test
from meshlm.workers.weights import layer_formats
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.reload import reload_weights

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "head_dim": 16,
    "num_attention_heads": 8,
}
TOKENS = torch.arange(30).mul(17).remainder(211).tolist()
TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]


class Values(nn.Module):
    """A product with these numbers."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values)


Quantise = Callable[[str, Tensor], tuple[dict[str, Tensor], nn.Module]]
"""The name of a weight's layer, its numbers -> what a file has of it, and what the layer must compute."""


class Kind(NamedTuple):
    config: dict[str, Any]
    quantise: Quantise
    rounds: bool = False  # activations: a token's scale is found by each rank of its own share


def packed(name: str) -> Kind:
    kind = packed_models.KINDS[name]

    def quantise(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
        tensors, values = packed_models.tensors_of(kind, stem, weight)
        return tensors, Values(values)

    return Kind(kind.config, quantise)


def bitsandbytes(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
    found, values = bitsandbytes_states.state_of(weight, "nf4", nested=True)
    codes = found.pop("codes")
    return {f"{stem}.weight": codes} | {f"{stem}.weight.{last}": t for last, t in found.items()}, Values(values)


def int8(name: str) -> Kind:
    kind = int8_models.KINDS[name]

    def quantise(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
        scale = (weight.abs().amax(1, keepdim=True) if kind.strategy == "channel" else weight.abs().max()) / 127
        codes = (weight / scale).round().to(torch.int8)
        reference = int8_models.Reference(codes, scale, kind, stem)
        tensors = {f"{stem}.weight": codes, f"{stem}.weight_scale": scale.clone()}
        if reference.input_scale is not None:
            reference.kind = reference.kind._replace(input_scale=own_scale(stem))
            tensors[f"{stem}.input_scale"] = own_scale(stem).reshape(1)
        return tensors, reference

    return Kind(int8_models.config_of(kind), quantise, rounds=True)


def fp8_static(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
    kind = quantised_models.KINDS["compressed-static"]
    codes, scale, values = quantised_models.quantised(weight, kind)
    found = {"weight": codes, "weight_scale": scale.clone(), "input_scale": own_scale(stem)}
    reference = quantised_models.Reference(values, None, kind, float(own_scale(stem)))
    return {f"{stem}.{last}": tensor for last, tensor in found.items()}, reference


def own_scale(stem: str) -> Tensor:
    """Of a layer's inputs: other ones for each expert, and for gate and up."""
    number = re.search(r"experts\.(\d+)", stem)
    return torch.tensor(0.02 + 0.003 * (0 if number is None else int(number[1])) + 0.001 * stem.endswith("up_proj"))


KINDS = {
    **{name: packed(name) for name in ("gptq", "gptq-act-order", "gptq-8", "awq", "mxfp4", "w4a16-zeros", "w4a16-order", "w8a16")},
    "bitsandbytes": Kind({**bitsandbytes_states.CONFIG, "bnb_4bit_use_double_quant": True}, bitsandbytes),
    "int8-dynamic": int8("dynamic"),
    "int8-static": int8("static"),
    "fp8-static": Kind(quantised_models.KINDS["compressed-static"].config, fp8_static, rounds=True),
}  # fmt: skip


class Experts(nn.Module):
    """In the place of transformers' experts: one product after the other."""

    def __init__(self, products: dict[str, nn.Module]) -> None:
        super().__init__()
        self.products = nn.ModuleDict({name.replace(".", " "): product for name, product in products.items()})

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = (self.products[f"{expert} {name}_proj"] for name in ("gate", "up", "down"))
            found = down(F.silu(gate(hidden[rows])) * up(hidden[rows]))
            out.index_add_(0, rows, found * weights[rows, places, None])
        return out


def write(folder: Path, kind: Kind, seed: int = 0) -> nn.Module:
    """The checkpoint, and what it must compute."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**{**SMALL, **SIZES, **EXPERTS})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.experts." not in name}
    for layer, block in enumerate(model.get_submodule("model.layers").children()):
        products: dict[str, nn.Module] = {}
        for expert in range(EXPERTS["num_experts"]):
            sizes = {"gate": (128, 64), "up": (128, 64), "down": (64, 128)}
            for name, shape in sizes.items():
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                found, products[f"{expert}.{name}_proj"] = kind.quantise(stem, torch.randn(shape) * 0.2)
                tensors |= found
        block.set_submodule("mlp.experts", Experts(products))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            stem = f"model.layers.{layer}.self_attn.{name}"
            del tensors[f"{stem}.weight"]
            found, module = kind.quantise(stem, block.get_parameter(f"self_attn.{name}.weight").data)
            tensors |= found
            setattr(block.get_submodule("self_attn"), name, module)
    described = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "quantization_config": kind.config}
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return model


def distance(found: Tensor, model: nn.Module) -> float:
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """A prompt at once and in chunks. Codes of activations jump where sums round otherwise."""
    kind = KINDS[name]
    theirs, ours = write(tmp_path, kind), load(tmp_path)
    near = 0.02 if kind.rounds else 1e-4
    assert distance(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), theirs) < near
    cache = caches(ours.spec, 24)
    chunks = [run(ours, cache, [(TOKENS[begin:end], begin, TABLE)]) for begin, end in ((0, 7), (7, 8), (8, 30))]
    assert distance(torch.cat(chunks), theirs) < near


@pytest.mark.parametrize("name", KINDS)
def test_ranks_have_parts_of_experts_or_some_of_them(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    theirs = write(tmp_path, kind)
    near = 0.02 if kind.rounds else 1e-4
    references = [(path, module) for path, module in theirs.named_modules() if hasattr(module, "ranks")]
    for path, module in references:  # a token's scale is found by each rank of its own share of the inputs
        module.ranks = 2 if path.endswith(("o_proj", "down_proj")) else 1
    found = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS))
    assert distance(found[0], theirs) < near
    for path, module in references:
        module.ranks = 2 if path.endswith("o_proj") else 1
    parallel = ParallelConfig(tensor_parallel_size=2)
    ranks = [Shard.of_worker(parallel, rank, expert_parallel=True) for rank in range(2)]
    with torch.inference_mode():
        models = [load_model(resolved(tmp_path), CPU, 0, lambda done, total: None, shard) for shard in ranks]
    assert all(len(mixture.experts.down.weight) == 2 for model in models for mixture in model.mixtures())
    found = together(models, lambda model, comm: logits_of(model, comm, TOKENS))
    assert distance(found[0], theirs) < near


@pytest.mark.parametrize("name", KINDS)
def test_other_weights_are_read_into_the_same_tensors(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    write(tmp_path, kind)
    ours = load(tmp_path)
    places = {path: one.weight.data_ptr() for path, one in ours.named_modules() if isinstance(one, GroupedLinear)}
    theirs = write(tmp_path, kind, seed=1)
    near = 0.02 if kind.rounds else 1e-4
    assert distance(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), theirs) > 0.2
    reload_weights(ours, resolved(tmp_path), CPU, 0, pass_bytes=1)
    assert distance(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), theirs) < near
    assert places == {
        path: one.weight.data_ptr() for path, one in ours.named_modules() if isinstance(one, GroupedLinear)
    }


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.rounds])
def test_codes_that_are_kept_stand_for_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernels have shown that they are right; also after other weights are read into the same tensors."""
    monkeypatch.setattr(layer_formats, "why_decoded", lambda *given: "")
    kind = KINDS[name]
    theirs, ours = write(tmp_path, kind), load(tmp_path)
    layers = [layer for mixture in ours.mixtures() for layer in mixture.experts.linears()]
    for layer in layers:
        weight = layer.grouped().kernel
        assert isinstance(weight, ExpertWeight)
        stored = sum(tensor.nbytes for tensor in weight.tensors().values())
        assert stored == sum(parameter.nbytes for parameter in layer.parameters())
        assert layer.format.codes_format == weight.format  # type: ignore[attr-defined]
    assert distance(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), theirs) < 1e-4
    theirs = write(tmp_path, kind, seed=1)
    reload_weights(ours, resolved(tmp_path), CPU, 0, pass_bytes=1)
    assert distance(run(ours, caches(ours.spec, 24), [(TOKENS, 0, TABLE)]), theirs) < 1e-4


def test_why_experts_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU too old, an activation that kernels do not know, codes that they do not read, and kernels that are wrong."""
    write(tmp_path, KINDS["awq"])
    (mixture, *_) = load(tmp_path).mixtures()
    formats: Any = [layer.format for layer in mixture.experts.linears()]

    def why() -> str:
        return layer_formats.why_decoded(mixture, formats, CPU, torch.bfloat16)

    assert why().startswith("the kernels compute in float16 and bfloat16")
    monkeypatch.setattr(layer_formats, "has_kernels", lambda *given: True)
    monkeypatch.setattr(self_test, "of_packed", lambda dtype, device, format: f"wrong with {format.name}")
    assert why() == "wrong with 4 bits, groups of 32"
    monkeypatch.setattr(self_test, "of_packed", lambda *given: "")
    assert why() == ""
    monkeypatch.setattr(mixture, "act", "relu2")
    assert why().startswith("the kernels compute experts with a gate")
    monkeypatch.setattr(mixture, "act", "silu")
    formats[1]._has_part = True
    assert why().startswith("the kernels do not read the codes")
