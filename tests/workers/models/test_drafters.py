"""Drafters that read a target's states, against the formula in plain torch with transformers' layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from quantised_models import Quantised, compressed, quantised
from safetensors.torch import load_file, save_file
from sharded_models import Threads, load_shards, shards, together
from small_models import BLOCK, CLASSIC, CPU, DEEPSEEK, SMALL, batch_of, caches, load, resolved
from torch import Tensor

from meshlm.architectures.drafters import fitted, nextn_spec
from meshlm.architectures.registry import family_of
from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import choose
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.models.decoder import Decoder, linears_of
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.weights.load import load_model, weight_bytes

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
PASSES = 3  # on the drafter's own states, behind the first
MTP = {name: (CLASSIC | DEEPSEEK)[name] for name in ("deepseek-v3", "deepseek-v3.2", "glm-5", "glm4-moe")}


class Checkpoint(NamedTuple):
    """A target with its drafter, by transformers, with random weights."""

    theirs: Any  # of one layer more than the target has: that is the drafter's
    own: dict[str, Tensor]  # tensors of the drafter's layer that transformers has no modules for


def written(folder: Path, case: str) -> Checkpoint:
    """The checkpoint of both, in the names that such files have."""
    import transformers

    torch.manual_seed(0)
    name, extra = MTP[case]
    sizes: dict[str, Any] = {**SMALL, **extra, "num_hidden_layers": 4}
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
    hidden = SMALL["hidden_size"]
    own = {f"{norm}.weight": 1 + torch.randn(hidden) * 0.3 for norm in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    file = folder / "model.safetensors"
    tensors = load_file(file)
    copies = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
    layer = own | {f"{name}.weight": tensor.clone() for name, tensor in copies.items()}
    save_file(tensors | {f"model.layers.3.{name}": tensor for name, tensor in layer.items()}, file, {"format": "pt"})
    change(folder, num_hidden_layers=3, num_nextn_predict_layers=1)
    return Checkpoint(theirs, own)


def change(folder: Path, **keys: Any) -> None:
    """config.json with other keys. layer lists are as long as the target has layers."""
    config = json.loads((folder / "config.json").read_text()) | keys
    config.pop("num_mtp_layers", None)
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if config.get(key):
            config[key] = config[key][:3]
    (folder / "config.json").write_text(json.dumps(config))


def drafter_of(folder: Path) -> Resolved:
    target = resolved(folder)
    family = family_of(target.spec.architecture)
    assert family is not None
    return replace(target, spec=nextn_spec(target.spec, family))


def loaded(found: Resolved, shard: Shard = WHOLE) -> StateDrafter:
    with torch.inference_mode():
        model = load_model(found, CPU, 0, lambda done, total: None, shard)
    assert isinstance(model, StateDrafter)
    return model


def states_of(model: Decoder, kv: list[LayerCache], ids: list[int], start: int, given: Tensor | None = None) -> Tensor:
    """[t, hidden] of a step. given: states that a drafter takes."""
    batch = batch_of([(ids, start, TABLE)])
    with torch.inference_mode():
        ops = model.ops.base if isinstance(model.ops, SummingOps) else model.ops
        backend = choose("torch" if isinstance(ops, TorchOps) else "cpu", model.local, CPU, torch.float32, BLOCK)
        found: Tensor = model(batch, kv, backend.step(batch, BLOCK), given)
        return found


def drafted(target: Decoder, drafter: StateDrafter, tokens: list[int]) -> Tensor:
    """[passes, vocab]: logits behind a prompt, all but the last of whose tokens have states of the target, and then behind drafts."""
    states = states_of(target, caches(target.local, 24), tokens[:-1], 0)
    kv = caches(drafter.local, 24)
    found = states_of(drafter, kv, tokens[1:9], 0, states[:8])
    found = states_of(drafter, kv, tokens[9:], 8, states[8:])[-1:]
    with torch.inference_mode():
        logits = [drafter.logits(found)]
        for place in range(len(tokens) - 1, len(tokens) - 1 + PASSES):
            found = states_of(drafter, kv, [int(logits[-1].argmax())], place, found)
            logits.append(drafter.logits(found))
    return torch.cat(logits)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def expected_of(given: Checkpoint, tokens: list[int]) -> Tensor:
    """What `drafted` should be: the layer computes all positions anew in each pass."""
    theirs, own = given
    inner, eps = theirs.model, theirs.config.rms_norm_eps
    with torch.no_grad():
        seen = theirs(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        before = list(norm(seen[3][0], inner.norm.weight, eps))  # behind the target's last layer
        ids, logits = tokens[1:], list[Tensor]()
        for _ in range(1 + PASSES):
            embedded = norm(inner.embed_tokens(torch.tensor(ids)), own["enorm.weight"], eps)
            pair = torch.cat((embedded, norm(torch.stack(before), own["hnorm.weight"], eps)), dim=1)
            states = layer_of(theirs, (pair @ own["eh_proj.weight"].t())[None])[0]
            found = norm(states, own["shared_head.norm.weight"], eps)[-1]
            logits.append(theirs.lm_head(found))
            before.append(found)
            ids = [*ids, int(logits[-1].argmax())]
    return torch.stack(logits)


def layer_of(theirs: Any, x: Tensor) -> Tensor:
    """The drafter's layer, of transformers: [1, t, hidden] -> the same."""
    inner, length = theirs.model, x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    found = inner.layers[3](
        x, attention_mask=mask, position_ids=positions, position_embeddings=inner.rotary_emb(x, positions)
    )
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("case", MTP)
@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_mtp_is_the_formula(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    given = written(tmp_path, case)
    tokens = torch.randint(0, 211, (21,)).tolist()
    target, drafter = load(tmp_path), loaded(drafter_of(tmp_path))
    drafter.share(target)
    torch.testing.assert_close(drafted(target, drafter, tokens), expected_of(given, tokens), atol=2e-5, rtol=1e-4)


def test_mtp_on_two_ranks(tmp_path: Path) -> None:
    given = written(tmp_path, "deepseek-v3")
    tokens = torch.randint(0, 211, (21,)).tolist()
    drafters = {shard: loaded(drafter_of(tmp_path), shard) for shard in shards(2, 1)}

    def work(target: Decoder, comm: Threads) -> Tensor:
        drafter = drafters[target.shard]
        drafter.join(comm)
        drafter.share(target)
        return drafted(target, drafter, tokens)

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
    copies = ("embed_tokens.weight", "shared_head.head.weight", *own)
    drop = {f"model.layers.3.{name}" for name in copies}
    of_theirs = {name: tensor for name, tensor in meant.items() if name not in drop}
    save_file(of_theirs, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    save_file(stored, file, {"format": "pt"})
    change(tmp_path, quantization_config=form.config)
    tokens = torch.randint(0, 211, (21,)).tolist()
    target, drafter = load(tmp_path), loaded(drafter_of(tmp_path))
    formats = {type(linear.format) for linear in linears_of(drafter)}
    assert len(formats) == 2, "eh_proj has another one"
    drafter.share(target)
    expected = expected_of(Checkpoint(theirs, own), tokens)
    torch.testing.assert_close(drafted(target, drafter, tokens), expected, atol=2e-5, rtol=1e-4)


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


def _without(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.3.hnorm.weight"]


def _with(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.gate.weight"] = torch.ones(3)


def _wrong(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 48)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_without, r"1 tensor missing: layers\.3\.hnorm\.weight"),
        (_with, r"1 tensor that \w+NextN of this configuration does not have: model\.layers\.3\.gate"),
        (_wrong, r"layers\.3\.eh_proj\.weight \(48, 48\) instead of \(48, 96\)"),
    ],
)
def test_tensors_at_fault_are_named(edit: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path) -> None:
    written(tmp_path, "glm4-moe")
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ProcessFatal, match=said):
        loaded(drafter_of(tmp_path))


EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 60},
    "of the target's vocabulary": {"draft_vocab_size": 211},
    "with the target's head": {"head_dim": 16, "attention_bias": True},
    "of other sizes": {
        "hidden_size": 36,
        "head_dim": 8,
        "target_hidden_size": 48,
        "draft_vocab_size": 60,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    },
    "normed before the residual": {"draft_vocab_size": 60, "norm_before_residual": True, "rope_theta": 5e5}
    | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
}


class Eagle(NamedTuple):
    target: Any  # transformers'
    layer: Any  # of a Llama of transformers, whose attention takes two vectors
    rotary: Any
    own: dict[str, Tensor]  # all tensors


def eagle3(folder: Path, case: str) -> Eagle:
    """A Llama of 6 layers and its drafter, in the names that such files have."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 6, "initializer_range": 0.2})
    target = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().float()
    target.save_pretrained(folder / "target")
    keys = {**SMALL, "num_hidden_layers": 1, "initializer_range": 0.2, **EAGLE3[case]}
    sizes = transformers.LlamaConfig(**keys)
    model = transformers.LlamaModel._from_config(sizes, attn_implementation="eager").eval().float()
    layer, hidden, few = model.layers[0], keys["hidden_size"], keys.get("draft_vocab_size", 0)
    for name in "qkv":
        old = getattr(layer.self_attn, f"{name}_proj")
        wide = torch.nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None)
        setattr(layer.self_attn, f"{name}_proj", wide)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
    own = {f"midlayer.{name}": tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    own |= {f"{name}.weight": 1 + torch.randn(hidden) * 0.3 for name in ("midlayer.hidden_norm", "norm")}
    own["fc.weight"] = torch.randn(hidden, 3 * 48) * 0.1
    if hidden != 48:
        own["embed_tokens.weight"] = torch.randn(211, hidden)
    if few:
        own["lm_head.weight"] = torch.randn(few, hidden) * 0.2
        chosen = torch.randperm(211)[:few].sort().values
        own["d2t"] = chosen - torch.arange(few)
        own["t2d"] = torch.isin(torch.arange(211), chosen)
    (folder / "drafter").mkdir()
    save_file(own, folder / "drafter" / "model.safetensors", {"format": "pt"})
    text = json.dumps({**keys, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"})
    (folder / "drafter" / "config.json").write_text(text)
    return Eagle(target, layer, model.rotary_emb, own)


def eagle3_of(folder: Path) -> Resolved:
    target, drafter = resolved(folder / "target"), resolved(folder / "drafter")
    return replace(drafter, spec=fitted(drafter.spec, target.spec, "eagle3"))


def drafted_from_taps(target: Decoder, drafter: StateDrafter, tokens: list[int]) -> Tensor:
    """As `drafted`; the target leaves the states of each step behind some of its layers."""
    target.tap(drafter.taps, 32)
    kv, own = caches(target.local, 24), caches(drafter.local, 24)
    for ids, begin in ((tokens[:8], 0), (tokens[8:-1], 8)):
        states_of(target, kv, ids, begin)
        after = tokens[begin + 1 : begin + 1 + len(ids)]
        found = states_of(drafter, own, after, begin, target.tapped[: len(ids)])
    with torch.inference_mode():
        found = found[-1:]
        logits = [drafter.logits(found)]
        for place in range(len(tokens) - 1, len(tokens) - 1 + PASSES):
            found = states_of(drafter, own, [int(logits[-1].argmax())], place, found)
            logits.append(drafter.logits(found))
    return torch.cat(logits)


def expected_of_eagle3(given: Eagle, tokens: list[int], case: str) -> Tensor:
    keys, own, eps = EAGLE3[case], given.own, given.target.config.rms_norm_eps
    inner = given.target.model
    table = own.get("embed_tokens.weight", inner.embed_tokens.weight)
    with torch.no_grad():
        seen = inner(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = list(torch.cat([seen[layers][0] for layers in taps_of(keys)], dim=1) @ own["fc.weight"].t())
        ids, logits = tokens[1:], list[Tensor]()
        for _ in range(1 + PASSES):
            both = torch.stack(states)
            normed = norm(both, own["midlayer.hidden_norm.weight"], eps)
            embedded = norm(table[torch.tensor(ids)], own["midlayer.input_layernorm.weight"], eps)
            positions = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            pair = torch.cat((embedded, normed), dim=1)[None]
            angles = given.rotary(pair, positions)
            out, _ = given.layer.self_attn(hidden_states=pair, attention_mask=mask, position_embeddings=angles)
            a = (normed if keys.get("norm_before_residual") else both) + out[0]
            states.append((a + given.layer.mlp(norm(a, own["midlayer.post_attention_layernorm.weight"], eps)))[-1])
            logits.append(spread(norm(states[-1], own["norm.weight"], eps), given))
            ids = [*ids, int(logits[-1].argmax())]
    return torch.stack(logits)


def taps_of(keys: dict[str, Any]) -> tuple[int, ...]:
    """Behind so many of 6 layers."""
    return (2, 4, 5) if "eagle" in str(keys) else (2, 3, 3)


def spread(state: Tensor, given: Eagle) -> Tensor:
    """Logits of the target's vocabulary."""
    if "lm_head.weight" not in given.own:
        found: Tensor = given.target.lm_head(state)
        return found
    few = given.own["lm_head.weight"] @ state
    whole = torch.full((211,), float("-inf"))
    whole[torch.arange(len(few)) + given.own["d2t"]] = few
    return whole


@pytest.mark.parametrize("case", EAGLE3)
@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_eagle3_is_the_formula(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    given = eagle3(tmp_path, case)
    tokens = torch.randint(0, 211, (21,)).tolist()
    target, drafter = load(tmp_path / "target"), loaded(eagle3_of(tmp_path))
    fuse_decoder(target, "cpu")
    drafter.share(target)
    found = drafted_from_taps(target, drafter, tokens)
    torch.testing.assert_close(found, expected_of_eagle3(given, tokens, case), atol=2e-5, rtol=1e-4)


def test_eagle3_on_two_ranks(tmp_path: Path) -> None:
    given = eagle3(tmp_path, "of other sizes")
    tokens = torch.randint(0, 211, (21,)).tolist()
    drafters = {shard: loaded(eagle3_of(tmp_path), shard) for shard in shards(2, 1)}

    def work(target: Decoder, comm: Threads) -> Tensor:
        drafter = drafters[target.shard]
        drafter.join(comm)
        drafter.share(target)
        return drafted_from_taps(target, drafter, tokens)

    for found in together(load_shards(tmp_path / "target", 2, 1), work):
        torch.testing.assert_close(found, expected_of_eagle3(given, tokens, "of other sizes"), atol=2e-5, rtol=1e-4)


def eagle(folder: Path, *, bias: bool) -> Eagle:
    """A Llama and its drafter, in the names that such files have."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "initializer_range": 0.2})
    target = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().float()
    target.save_pretrained(folder / "target")
    keys: dict[str, Any] = {
        **SMALL,
        "num_hidden_layers": 1,
        "initializer_range": 0.1,
    }  # states are not normed, and what rounds differently grows
    model = (
        transformers.LlamaModel._from_config(transformers.LlamaConfig(**keys), attn_implementation="eager")
        .eval()
        .float()
    )
    layer = model.layers[0]
    layer.post_attention_layernorm.weight.data += torch.randn(48) * 0.3
    own = {f"layers.0.{name}": tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    del own["layers.0.input_layernorm.weight"]
    own |= {"fc.weight": torch.randn(48, 96) * 0.1, "embed_tokens.weight": torch.zeros(211, 48)}
    own |= {"fc.bias": torch.randn(48)} if bias else {}
    (folder / "drafter").mkdir()
    torch.save(own, folder / "drafter" / "pytorch_model.bin")
    keys |= {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"} | ({} if bias else {"bias": False})
    (folder / "drafter" / "config.json").write_text(json.dumps(keys))
    return Eagle(target, layer, model.rotary_emb, own)


def expected_of_eagle(given: Eagle, tokens: list[int]) -> Tensor:
    own, inner, eps = given.own, given.target.model, given.target.config.rms_norm_eps
    with torch.no_grad():
        states = list(inner(torch.tensor([tokens[:-1]])).last_hidden_state[0])
        ids, logits = tokens[1:], list[Tensor]()
        for _ in range(1 + PASSES):
            pair = torch.cat((inner.embed_tokens(torch.tensor(ids)), torch.stack(states)), dim=1)
            x = pair @ own["fc.weight"].t() + own.get("fc.bias", torch.zeros(48))
            positions = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            angles = given.rotary(x[None], positions)
            out, _ = given.layer.self_attn(hidden_states=x[None], attention_mask=mask, position_embeddings=angles)
            a = x + out[0]
            states.append((a + given.layer.mlp(norm(a, own["layers.0.post_attention_layernorm.weight"], eps)))[-1])
            logits.append(given.target.lm_head(states[-1]))
            ids = [*ids, int(logits[-1].argmax())]
    return torch.stack(logits)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_eagle_is_the_formula(bias: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    given = eagle(tmp_path, bias=bias)
    tokens = torch.randint(0, 211, (21,)).tolist()
    found = resolved(tmp_path / "drafter")
    target, drafter = load(tmp_path / "target"), loaded(found)
    assert replace(found, spec=fitted(found.spec, target.spec, "eagle")) == found
    drafter.share(target)
    torch.testing.assert_close(drafted(target, drafter, tokens), expected_of_eagle(given, tokens), atol=2e-5, rtol=1e-4)


def test_a_model_that_nobody_taps_leaves_nothing(tmp_path: Path) -> None:
    """And one that is tapped gives the same states."""
    eagle3(tmp_path, "plain")
    target, tokens = load(tmp_path / "target"), torch.randint(0, 211, (21,)).tolist()
    plain = states_of(target, caches(target.spec, 24), tokens, 0)
    assert target.tapped.numel() == 0
    target.tap((2, 3, 3), 32)
    torch.testing.assert_close(states_of(target, caches(target.spec, 24), tokens, 0), plain, atol=2e-5, rtol=1e-4)
    with pytest.raises(ProcessFatal, match=r"LlamaForCausalLM does not give the states behind its layers \(2, 3, 7\)"):
        target.tap((2, 3, 7), 32)


def test_tokens_that_are_none_are_refused(tmp_path: Path) -> None:
    eagle3(tmp_path, "plain")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] = 200
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ProcessFatal, match="tensor d2t names tokens beyond the vocabulary, which has 211"):
        loaded(eagle3_of(tmp_path))
    tensors["d2t"] = tensors["d2t"].float()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ProcessFatal, match=r"d2t \(F32\)"):
        loaded(eagle3_of(tmp_path))
