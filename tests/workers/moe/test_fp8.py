"""Experts whose weights are 8-bit floats: loaded as checkpoints have them, computed as the formats say, by the kernels too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_weights import fp8_experts
from quantised_models import Quantised, compressed, quantised, rounded
from safetensors.torch import load_file, save_file
from sharded_models import load_shards, logits_of, together
from small_models import CPU, MOE, SMALL, caches, load, resolved, run
from torch import Tensor

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.quantise_fp8.reference import quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts import triton
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.experts.triton import TritonExperts
from meshlm.workers.moe.fused_moe import ExpertWeights, FusedMoE, Routing, WeightAndReduce
from meshlm.workers.moe.registry import unsupported_groups
from meshlm.workers.partial_sum import Kind
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.reload import reload_weights

IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
KINDS = {
    "tensor": Quantised(compressed({"strategy": "tensor"}, None, ignore=IGNORED), activation="none"),
    "channel": Quantised(compressed({"strategy": "channel"}, None, ignore=IGNORED), "channel", "none"),
    "block": Quantised(
        compressed({"strategy": "block", "block_structure": [12, 16]}, None, ignore=IGNORED), "block", "none", (12, 16)
    ),
}


def checkpoint(kind: Quantised, folder: Path, **changes: Any) -> Any:
    """transformers' model with the values of its experts' codes; the codes and scales are in the folder."""
    import transformers

    torch.manual_seed(0)
    name, extra = MOE["qwen3-moe"]
    config = getattr(transformers, name)(**{**SMALL, **extra, "moe_intermediate_size": 48, "norm_topk_prob": True})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.save_pretrained(folder)
    file = folder / "model.safetensors"
    meant, stored = load_file(file), {}
    for key, values in meant.items():
        stored[key] = values
        if ".experts." in key:
            codes, scale, meant[key] = quantised(values, kind)
            stored[key], stored[key.replace(".weight", ".weight_scale")] = codes, scale.clone()
    plain = folder / "plain"
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    config.save_pretrained(plain)
    save_file(stored, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": kind.config, **changes}
    (folder / "config.json").write_text(json.dumps(described))
    return transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_means_what_its_codes_and_scales_say(name: str, tmp_path: Path) -> None:
    """Whole and on two ranks."""
    theirs, ours = checkpoint(KINDS[name], tmp_path), load(tmp_path)
    tokens = torch.randint(0, 211, (23,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 6), [(tokens, 0, [0, 1, 2, 3, 4, 5])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    if name == "block":
        with pytest.raises(
            ProcessFatal, match=r"--tensor-parallel-size: .*experts.0.down_proj has 24 inputs on a rank"
        ):
            load_shards(tmp_path, 2, 1)
        return
    for logits in together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, tokens)):
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_activation_scales_that_the_file_lacks_are_named(tmp_path: Path) -> None:
    static = compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, ignore=IGNORED)
    checkpoint(KINDS["tensor"], tmp_path, quantization_config=static)
    with pytest.raises(ProcessFatal, match=r"54 tensors missing: layers.0.mlp.experts.0.down_proj.input_scale"):
        load(tmp_path)


HIDDEN, WIDE, NUM, TOPK = 256, 128, 5, 2
SCHEMES = {
    "tokens and channels": QuantizationScheme(targets=(), weight="channel", activation="token"),
    "blocks": QuantizationScheme(targets=(), weight="block", block=(128, 128), activation="group", group=128),
    "blocks of 64, tokens": QuantizationScheme(targets=(), weight="block", block=(64, 64), activation="token"),
    "weights alone": QuantizationScheme(targets=(), weight="channel", activation="none"),
}


def weights(scheme: QuantizationScheme) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, and scales by row as layers have them."""
    kind = Quantised({}, scheme.weight, block=scheme.block)
    parts = []
    for outputs, inputs in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE)):
        made = [quantised(torch.randn(outputs, inputs) / inputs**0.5, kind) for _ in range(NUM)]
        codes, scale = torch.stack([each[0] for each in made]), torch.stack([each[1] for each in made])
        scale = scale.repeat_interleave(scheme.block[0], 1)[:, :outputs] if scheme.weight == "block" else scale
        parts.append((codes, scale.contiguous()))
    (gate_up, gate_up_scale), (down, down_scale) = parts
    return gate_up, down, gate_up_scale, down_scale


def by_definition(x: Tensor, routing: Routing, scheme: QuantizationScheme, given: tuple[Tensor, ...]) -> Tensor:
    """Token by token: the product of rounded activations with the values of the codes."""

    def seen(row: Tensor) -> Tensor:
        if scheme.activation == "none":
            return row
        groups = row.split(scheme.group or len(row))
        return torch.cat([rounded(group, group.abs().max() / 448) for group in groups])

    def values(codes: Tensor, scale: Tensor) -> Tensor:
        each = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        return codes.float() * each

    gate_up, down, gate_up_scale, down_scale = given
    out = torch.zeros_like(x)
    for token, (experts, scale) in enumerate(zip(*routing, strict=True)):
        for expert, weight in zip(experts.tolist(), scale, strict=True):
            gate, up = (values(gate_up[expert], gate_up_scale[expert]) @ seen(x[token])).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            out[token] += weight * (values(down[expert], down_scale[expert]) @ seen(inner))
    return out


def unsupported(scheme: QuantizationScheme, inputs: tuple[int, int]) -> str | None:
    return unsupported_groups(scheme.block[1], None if scheme.activation == "none" else scheme.group, inputs)


@pytest.mark.parametrize("name", SCHEMES)
def test_experts_round_as_the_scheme_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch, and in the kernels: one row, few and many."""
    if torch.cuda.is_available():
        pytest.skip("without the interpreter its kernels are on the GPU: tests/workers/cuda/test_moe.py")
    monkeypatch.setattr(triton, "quantise", quantise)  # Triton's interpreter loses carries of some codes
    torch.manual_seed(0)
    scheme = SCHEMES[name]
    assert unsupported(scheme, (HIDDEN, WIDE)) is None
    gate_up, down, gate_up_scale, down_scale = weights(scheme)
    dispatcher = NoDispatch(0, NUM, NUM, finishes=frozenset(WeightAndReduce))
    given = ExpertWeights(
        fp8_experts(gate_up, gate_up_scale, scheme, torch.float32), fp8_experts(down, down_scale, scheme, torch.float32)
    )
    plain = ReferenceExperts(given)
    kernels = TritonExperts(given)
    for rows in (1, 7, 70):
        x = torch.randn(rows, HIDDEN)
        routing = Routing(*select_experts(torch.randn(rows, NUM), Rule(TOPK, renormalise=True)))
        expected = by_definition(x, routing, scheme, (gate_up, down, gate_up_scale, down_scale))
        found, _ = FusedMoE(dispatcher, plain).forward(x, routing)
        torch.testing.assert_close(found.value, expected, atol=2e-4, rtol=1e-3)
        found, _ = FusedMoE(dispatcher, kernels).forward(x, routing)
        total = found.value.sum(0) if found.kind is Kind.SPLIT_K else found.value
        error = float((total - expected).abs().mean() / expected.abs().mean())
        assert error < 0.01, "an inner activation may round to the code beside"


def test_schemes_that_kernels_do_not_take() -> None:
    def why(inputs: int = 256, **changes: Any) -> str:
        scheme = {"targets": (), "weight": "channel", "activation": "none", **changes}
        return str(unsupported(QuantizationScheme(**scheme), (inputs, inputs)))

    assert "multiples of 16" in why(24)
    assert "no tiles of 32 inputs" in why(weight="block", block=(32, 32))
    assert "same size for activations and weights" in why(activation="group", group=128)


@pytest.mark.parametrize("name", KINDS)
def test_a_ranks_own_experts_are_read_again(name: str, tmp_path: Path) -> None:
    """Others have been in their slots; what computes holds the tensors that are filled."""
    checkpoint(KINDS[name], tmp_path)
    found = resolved(tmp_path)
    model = load_model(found, CPU, 0, lambda done, total: None, Shard(ep_rank=1, ep_size=2, redundant_experts=4))
    weights = [weight for mixture in model.mixtures() for weight in mixture.experts.parameters()]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        assert torch.equal(weight[3:], weight[[0, 1, 2, 0]]), "replicas of its own"
        weight.zero_()
    reload_weights(model, found, CPU, 0, only_experts=True)
    after = [weight for mixture in model.mixtures() for weight in mixture.experts.parameters()]
    for weight, same, wanted in zip(weights, after, before, strict=True):
        assert same is weight
        assert torch.equal(weight, wanted)
