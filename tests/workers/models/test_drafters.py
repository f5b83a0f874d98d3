"""Drafters of files of their own that read a target's states, against the formula in plain torch with transformers' layers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafter_models import PASSES, drafted, loaded, norm, states_of
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from sharded_models import Threads, load_shards, shards, together
from small_models import SMALL, caches, load, resolved
from torch import Tensor

from meshlm.architectures.drafters import fitted
from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.layers import cpu_ops
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.drafters import StateDrafter

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
    torch.testing.assert_close(
        drafted(drafter, states_of(target, caches(target.local, 24), tokens[:-1], 0), tokens),
        expected_of_eagle(given, tokens),
        atol=2e-5,
        rtol=1e-4,
    )


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
