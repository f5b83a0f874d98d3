"""Layers of mtp, against the formula in plain torch with transformers' layers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafter_models import LENGTH, PASSES, drafted, loaded, norm
from hybrid_cases import CASES as STATES
from msgspec.structs import replace
from quantised_models import Quantised, compressed, quantised
from safetensors.torch import load_file, save_file
from sharded_models import Threads, load_shards, shards, together
from small_models import CLASSIC, DEEPSEEK, SMALL, load, resolved
from torch import Tensor

from meshlm.architectures.drafters import nextn_spec
from meshlm.architectures.registry import family_of
from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.layers import cpu_ops
from meshlm.workers.models.decoder import Decoder, linears_of
from meshlm.workers.weights.load import weight_bytes

_KINDS = {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
MTP = {name: (CLASSIC | DEEPSEEK)[name] for name in ("deepseek-v3", "deepseek-v3.2", "glm-5", "glm4-moe")}
MTP |= {name: (STATES[name][0], STATES[name][1] | _KINDS) for name in ("qwen3-next", "qwen3.5")}
_DENSE = {key: value for key, value in MTP["qwen3.5"][1].items() if "expert" not in key and "moe" not in key}
MTP["qwen3.5-dense"] = ("Qwen3_5TextConfig", _DENSE)
OF_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
NORMS = ("enorm", "hnorm", "shared_head.norm")
LAYERS = 3  # of the target


class Checkpoint(NamedTuple):
    """A target with its drafter, by transformers, with random weights."""

    theirs: Any  # of more layers than the target has: those are the drafter's
    own: list[dict[str, Tensor]]  # of each: its tensors that transformers has no modules for


def written(folder: Path, case: str, drafting: int = 1) -> Checkpoint:
    """The checkpoint of both, in the names that such files have. drafting: layers that draft."""
    import transformers

    torch.manual_seed(0)
    name, extra = MTP[case]
    sizes: dict[str, Any] = {**SMALL, **extra, "num_hidden_layers": LAYERS + drafting}
    if "indexer_types" in sizes:
        sizes["indexer_types"] = ["full", "shared", "shared", "full"]
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**sizes), attn_implementation="eager"
    )
    theirs = theirs.eval().float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter.dim() == 1 or parameter_name.endswith("bias"):
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(folder)
    file, hidden, of_qwen = folder / "model.safetensors", SMALL["hidden_size"], "qwen" in case
    tensors, own = load_file(file), list[dict[str, Tensor]]()
    copies = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
    for layer in range(LAYERS, LAYERS + drafting):
        norms = {f"{norm}.weight": (not of_qwen) + torch.randn(hidden) * 0.3 for norm in NORMS}
        own.append(norms | {"eh_proj.weight": torch.randn(hidden, 2 * hidden) * 0.2})
        if of_qwen:
            inner = f"model.layers.{layer}."
            moved = {name: tensor for name, tensor in tensors.items() if name.startswith(inner)}
            tensors = {name: tensor for name, tensor in tensors.items() if name not in moved}
            tensors |= {name.replace(inner, "mtp.layers.0."): tensor for name, tensor in moved.items()}
            tensors |= {f"mtp.{OF_QWEN[name]}.weight": own[0][f"{name}.weight"] for name in OF_QWEN}
        else:
            named = own[-1] | {f"{name}.weight": tensor.clone() for name, tensor in copies.items()}
            tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in named.items()}
    save_file(tensors, file, {"format": "pt"})
    key = "mtp_num_hidden_layers" if "qwen3.5" in case else "num_nextn_predict_layers"
    change(folder, **{"num_hidden_layers": LAYERS} | ({} if case == "qwen3-next" else {key: drafting}))
    return Checkpoint(theirs, own)


def change(folder: Path, **keys: Any) -> None:
    """config.json with other keys. layer lists are as long as the target has layers."""
    config = json.loads((folder / "config.json").read_text()) | keys
    config.pop("num_mtp_layers", None)
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if config.get(key):
            config[key] = config[key][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))


def drafter_of(folder: Path) -> Resolved:
    target = resolved(folder)
    family = family_of(target.spec.architecture)
    assert family is not None
    return replace(target, spec=nextn_spec(target.spec, family))


def states_of_target(given: Checkpoint, tokens: list[int]) -> Tensor:
    """By transformers: [t, hidden] behind the last norm."""
    with torch.no_grad():
        seen = given.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        found: Tensor = given.theirs.model.norm(seen[LAYERS][0])
    return found


def expected_of(given: Checkpoint, tokens: list[int]) -> Tensor:
    """What `drafted` should be: a layer computes all positions anew in each pass."""
    theirs, own = given
    inner, eps = theirs.model, theirs.config.rms_norm_eps
    plus = float("Qwen" in type(theirs).__name__)
    before, ids, logits = list(states_of_target(given, tokens[:-1])), list(tokens), list[Tensor]()
    found: list[Tensor] = []
    for nth in range(1 + PASSES):
        layer = min(nth, len(own) - 1)
        before = before if nth == 0 else found if nth < len(own) else [*before, found[-1]]
        weights = {name: tensor + (plus if name[:-7] in NORMS else 0) for name, tensor in own[layer].items()}
        with torch.no_grad():
            embedded = norm(inner.embed_tokens(torch.tensor(ids[1 + layer :])), weights["enorm.weight"], eps)
            pair = torch.cat((embedded, norm(torch.stack(before), weights["hnorm.weight"], eps)), dim=1)
            states = layer_of(theirs, LAYERS + layer, (pair @ weights["eh_proj.weight"].t())[None])[0]
            found = list(norm(states, weights["shared_head.norm.weight"], eps))
            logits.append(theirs.lm_head(found[-1]))
        ids.append(int(logits[-1].argmax()))
    return torch.stack(logits)


def layer_of(theirs: Any, layer: int, x: Tensor) -> Tensor:
    """A drafter's layer, of transformers: [1, t, hidden] -> the same."""
    inner, length = theirs.model, x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    found = inner.layers[layer](
        x, attention_mask=mask, position_ids=positions, position_embeddings=inner.rotary_emb(x, positions)
    )
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize(
    ("case", "drafting"), [*((case, 1) for case in MTP), ("deepseek-v3", 2), ("deepseek-v3", 3), ("glm4-moe", 2)]
)
@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_mtp_is_the_formula(
    case: str, drafting: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    given = written(tmp_path, case, drafting)
    tokens = torch.randint(0, 211, (LENGTH,)).tolist()
    target, drafter = load(tmp_path), loaded(drafter_of(tmp_path))
    drafter.share(target)
    torch.testing.assert_close(
        drafted(drafter, states_of_target(given, tokens[:-1]), tokens), expected_of(given, tokens), atol=2e-5, rtol=1e-4
    )


def test_mtp_on_two_ranks(tmp_path: Path) -> None:
    given = written(tmp_path, "deepseek-v3")
    tokens = torch.randint(0, 211, (LENGTH,)).tolist()
    drafters = {shard: loaded(drafter_of(tmp_path), shard) for shard in shards(2, 1)}

    def work(target: Decoder, comm: Threads) -> Tensor:
        drafter = drafters[target.shard]
        drafter.join(comm)
        drafter.share(target)
        return drafted(drafter, states_of_target(given, tokens[:-1]), tokens)

    for found in together(load_shards(tmp_path, 2, 1), work):
        torch.testing.assert_close(found, expected_of(given, tokens), atol=2e-5, rtol=1e-4)


def test_mtp_in_8_bits_by_blocks(tmp_path: Path) -> None:
    """As the target's layers, which quantization_config names no more than this one; eh_proj is stored in full."""
    import transformers

    own = written(tmp_path, "deepseek-v3").own
    form = Quantised(compressed({"strategy": "block", "block_structure": [16, 4]}, None), "block", "none", (16, 4))
    file, plain = tmp_path / "model.safetensors", tmp_path / "plain"
    meant, stored = load_file(file), {}
    for name, values in meant.items():
        stored[name] = values
        in_full = ("mlp.gate.weight", "eh_proj.weight", "embed_tokens.weight", "head.weight")
        if values.dim() == 2 and ".layers." in name and not name.endswith(in_full):
            codes, scale, meant[name] = quantised(values, form)
            stored[name], stored[f"{name}_scale"] = codes, scale.clone()
    config = json.loads((tmp_path / "config.json").read_text())
    plain.mkdir()
    copies = ("embed_tokens.weight", "shared_head.head.weight", *own[0])
    drop = {f"model.layers.3.{name}" for name in copies}
    of_theirs = {name: tensor for name, tensor in meant.items() if name not in drop}
    save_file(of_theirs, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    save_file(stored, file, {"format": "pt"})
    change(tmp_path, quantization_config=form.config)
    tokens = torch.randint(0, 211, (LENGTH,)).tolist()
    target, drafter = load(tmp_path), loaded(drafter_of(tmp_path))
    formats = {type(linear.format) for linear in linears_of(drafter)}
    assert len(formats) == 2, "eh_proj has another one"
    drafter.share(target)
    given = Checkpoint(theirs, own)
    found = drafted(drafter, states_of_target(given, tokens[:-1]), tokens)
    torch.testing.assert_close(found, expected_of(given, tokens), atol=2e-5, rtol=1e-4)


def test_what_the_target_has_is_not_loaded_again(tmp_path: Path) -> None:
    """Nor is what is the drafter's part of the target."""
    written(tmp_path, "deepseek-v3")
    target, drafter = load(tmp_path), loaded(drafter_of(tmp_path))
    assert not any(name.startswith(("embed", "head")) for name, _ in drafter.named_parameters())
    before = weight_bytes(drafter)
    drafter.share(target)
    assert weight_bytes(drafter) == before
    tensors = load_file(tmp_path / "model.safetensors")
    left_out = [f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in left_out}, tmp_path / "model.safetensors"
    )
    assert weight_bytes(loaded(drafter_of(tmp_path))) == before


@pytest.mark.parametrize(
    ("case", "name", "shape", "said"),
    [
        ("glm4-moe", "model.layers.3.hnorm.weight", None, r"1 tensor missing: layers\.3\.hnorm\.weight"),
        ("glm4-moe", "model.layers.3.gate.weight", (3,), r"1 tensor that \w+NextN .* not have: model\.layers\.3\.gate"),
        ("glm4-moe", "model.layers.3.eh_proj.weight", (48, 48), r"layers\.3\.eh_proj\.weight \(48, 48\) .* \(48, 96\)"),
        ("qwen3-next", "mtp.fc.weight", None, r"1 tensor missing: mtp\.fc\.weight"),
        (
            "qwen3.5",
            "mtp.layers.1.mlp.gate.weight",
            (3,),
            r"1 tensor that \w+NextN .* not have: mtp\.layers\.1\.mlp\.gate",
        ),
        ("qwen3.5", "mtp.norm.weight", (47,), r"mtp\.norm\.weight \(47,\) instead of \(48,\)"),
    ],
)
def test_tensors_at_fault_are_named(
    case: str, name: str, shape: tuple[int, ...] | None, said: str, tmp_path: Path
) -> None:
    """shape: None, where it is missing."""
    written(tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({name: torch.ones(shape)} if shape else {}), tmp_path / "model.safetensors")
    with pytest.raises(ProcessFatal, match=said):
        loaded(drafter_of(tmp_path))
