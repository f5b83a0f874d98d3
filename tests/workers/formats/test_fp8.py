"""FP8 checkpoints compute what their formats say, whole and in shards; what is wrong with one is named before anything is computed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quantised_models import FP8, KINDS, Reference, write
from safetensors.torch import save_file
from sharded_models import load_shards, logits_of, together
from small_models import caches, load, resolved, run
from torch import Tensor

from meshlm.architectures.quantization import formats
from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.formats.eight_bits import Fp8Format
from meshlm.workers.formats.format import ProductOps, WeightedLayer
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.elements import Linear
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.weights.load import load_model

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
EXACT, JUMPS = 1e-4, 0.05
"""Mean distances. Codes jump: what float32 rounds otherwise may become the next code, and all that follows differs a little.

Without the rounding of activations the distance is 0.12.
"""


def distance(found: Tensor, expected: Tensor) -> float:
    """Mean, in standard deviations."""
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize(("ops", "most"), [("torch", EXACT), ("cpu", JUMPS)])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_definition(
    name: str, ops: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole prompt, and its tokens in chunks: a token's scale is its own."""
    theirs, _ = write(tmp_path, KINDS[name])
    if ops == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    ours = load(tmp_path)
    fuse_decoder(ours, "cpu")
    assert ours.executor is None, "these kernels know no scales"
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert distance(run(ours, caches(ours.spec, 24), [(tokens, 0, TABLE)]), expected) < most
    kv = caches(ours.spec, 24)
    chunks = [run(ours, kv, [(tokens[:20], 0, TABLE)]), run(ours, kv, [(tokens[20:], 20, TABLE)])]
    assert distance(torch.cat(chunks), expected) < JUMPS


@pytest.mark.parametrize(
    "name", ["fp8-dynamic", "fp8-static", "fp8-fine", "compressed-head", "compressed-weights", "compressed-static"]
)
def test_shards_have_the_scales_of_their_rows(name: str, tmp_path: Path) -> None:
    theirs, _ = write(tmp_path, KINDS[name])
    for path, module in theirs.named_modules():
        if isinstance(module, Reference) and path.endswith(("o_proj", "down_proj")):
            module.ranks = 2
    tokens = torch.randint(0, 211, (21,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, tokens))
    assert torch.equal(found[0], found[1])
    assert distance(found[0], expected) < JUMPS


def test_ranks_cannot_share_a_group_of_inputs(tmp_path: Path) -> None:
    write(tmp_path, KINDS["fp8-blocks"])
    with pytest.raises(
        ProcessFatal, match=r"--tensor-parallel-size: .*o_proj has 24 inputs on a rank, no multiple of the 16"
    ):
        load_shards(tmp_path, 2, 1)


def test_weights_are_decoded_when_they_are_used_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does it: here the device is called another name while the model is finished."""
    from types import SimpleNamespace

    write(tmp_path, KINDS["fp8-static"])
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    expected = load(tmp_path)
    finish = Fp8Format.finish

    def elsewhere(self: Fp8Format, layer: WeightedLayer, ops: ProductOps) -> None:
        seen = SimpleNamespace(
            outputs=layer.outputs, weight=SimpleNamespace(device=SimpleNamespace(type="cuda")),
            matrices=layer.matrices, stack=layer.stack, dtype=layer.dtype,
        )  # fmt: skip
        finish(self, seen, ops)  # type: ignore[arg-type]
        assert layer.weight.dtype == FP8

    monkeypatch.setattr(Fp8Format, "finish", elsewhere)
    tokens = list(range(20))
    found = run(load(tmp_path), caches(expected.spec, 24), [(tokens, 0, TABLE)])
    assert torch.equal(found, run(expected, caches(expected.spec, 24), [(tokens, 0, TABLE)]))


LAYER = "model.layers.1."
UP, QUERY = LAYER + "mlp.up_proj.", LAYER + "self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("fp8-static", {UP + "weight_scale": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.weight_scale$"),
        ("fp8-static", {UP + "input_scale": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.input_scale$"),
        ("fp8-static", {UP + "weight_scale": torch.tensor(torch.nan)}, "up_proj.weight_scale: a scale must be a positive"),
        ("fp8-static", {UP + "input_scale": torch.tensor(0.0)}, "up_proj.input_scale: a scale must be a positive"),
        ("fp8-dynamic", {UP + "input_scale": torch.tensor(1.0)}, "does not have: .*up_proj.input_scale"),
        ("fp8-dynamic", {UP + "weight_scale": torch.ones(3)}, r"up_proj.weight_scale \(3,\) instead of \(\)"),
        ("fp8-dynamic", {UP + "weight_scale_inv": torch.ones(1)}, "does not have: .*up_proj.weight_scale_inv"),
        ("compressed-channel", {UP + "weight_scale": torch.ones(48, 1)}, r"weight_scale \(48, 1\) instead of \(80, 1\)"),
        ("fp8-blocks", {UP + "weight_scale_inv": torch.ones(3, 4)}, r"weight_scale_inv \(3, 4\) instead of \(3, 3\)"),
        ("compressed-channel", {UP + "weight_zero_point": torch.ones(1)}, "does not have: .*weight_zero_point"),
        ("compressed-channel", {UP + "weight": torch.ones(80, 48)}, r"of a type that is not read .*up_proj.weight \(F32\)"),
        ("compressed-channel", {"lm_head.weight": torch.ones(211, 48).to(FP8)}, "lm_head.weight is of type F8_E4M3"),
        ("compressed-channel", {UP + "weight": torch.ones(80, 48).to(torch.float8_e5m2)}, "is of type F8_E5M2"),
        ("compressed-channel", {UP + "weight_scale": torch.ones(80, 1).to(FP8)}, "weight_scale is of type F8_E4M3|not read"),
        ("fp8-dynamic", {QUERY + "weight": torch.full((48, 48), torch.nan).to(FP8)}, "qkv.weight hold NaN"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name: str, changed: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    _, tensors = write(tmp_path, KINDS[name])
    kept = {**tensors, **changed}
    save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises((ProcessFatal, ModelFilesError), match=said) as told:
        load(tmp_path)
    assert "\n" not in str(told.value)


def test_projections_that_are_one_product_are_quantised_alike(tmp_path: Path) -> None:
    kind = KINDS["fp8-some"]
    config = {**kind.config, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"]}
    kind = kind._replace(config=config, ignore=("layers.1.mlp.up_proj",))
    write(tmp_path, kind)
    with pytest.raises(ProcessFatal, match=r"mlp.gate_proj, model.layers.1.mlp.up_proj are one product here"):
        load(tmp_path)


def plain(folder: Path) -> None:
    """The weights of which `write` makes codes, as floats."""
    import json

    import transformers

    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config)).eval().float()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


def online(folder: Path, **changes: Any) -> Resolved:
    found = resolved(folder)
    spec = formats()["fp8"].online
    assert spec is not None
    return msgspec.structs.replace(found, spec=msgspec.structs.replace(found.spec, quantization=spec), **changes)


def test_floats_are_rounded_while_they_are_loaded(tmp_path: Path) -> None:
    """To what a checkpoint of a scale for each channel holds; whole and in shards, which find scales of their own inputs."""
    theirs, _ = write(tmp_path, KINDS["compressed-channel"])
    plain(tmp_path)
    tokens = torch.randint(0, 211, (21,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    with torch.inference_mode():
        ours = load_model(online(tmp_path), torch.device("cpu"), 0, lambda done, total: None)
        shards = [
            load_model(online(tmp_path), torch.device("cpu"), 0, lambda done, total: None, Shard(rank, 2))
            for rank in (0, 1)
        ]
    assert distance(run(ours, caches(ours.spec, 24), [(tokens, 0, TABLE)]), expected) < JUMPS
    found = together(shards, lambda model, comm: logits_of(model, comm, tokens))
    assert distance(found[0], expected) < 3 * JUMPS


@pytest.mark.parametrize("name", ["fp8-128", "fp8-static", "compressed-channel"])
def test_dummy_weights_are_of_the_kind_that_the_config_names(name: str, tmp_path: Path) -> None:
    write(tmp_path, KINDS[name])
    model = load(tmp_path, "dummy")
    product = model.get_submodule("layers.0.mlp.down")
    assert isinstance(product, Linear)
    assert isinstance(product.format, Fp8Format)
    tokens = list(range(9))
    assert run(model, caches(model.spec, 24), [(tokens, 0, TABLE)]).isfinite().all()
