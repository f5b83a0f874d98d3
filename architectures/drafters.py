"""Drafters that read the states of the model that they draft for, its target: what they are, and their tensors.

mtp (DeepSeek-AI 2024, section 2.2): layers behind the last one of the target's own checkpoint, of which each drafts one token further.
Their embedding and their output projection are the target's; the copies that some checkpoints have of them (embed_tokens,
shared_head.head) are not loaded. Qwen3-Next and Qwen3.5 have one, which attends, and names of their own for it.

EAGLE 3 (Li et al. 2025): one layer in files of its own, which reads the target's states behind three of its layers. Its embedding is
the target's where both have one size of states; its output projection is its own, of fewer tokens, whose ids are their number and d2t's
entry. Where config.json names no draft_vocab_size the target's is taken. Files name the target's layers in one of two ways:
eagle_config's ids are those of layers, from 0, behind which states are read (SGLang's, NVIDIA's), others count the layers before
(vLLM's). Without them they are read behind the first 2, half, and all but 3 of the layers.

EAGLE (Li et al. 2024): one layer in files of its own, without a norm before attention. Embedding and output projection are the
target's.

How they compute is in workers/models/drafters.py. They have no architecture that a user could serve.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, shown, words
from meshlm.architectures.dense import full_spec
from meshlm.architectures.family import Family, NextN, Serves, Split, Weight
from meshlm.architectures.weights import PRE_NORMS, transformer_weights
from meshlm.protocol.layers import Layers
from meshlm.protocol.model import DraftSpec, ModelSpec

NEXTN = "NextN"
"""What drafts for a target by mtp has the name of the target's architecture, and this behind it."""
_SHARED = ("embed_tokens.", "shared_head.head.")


def nextn_spec(target: ModelSpec, family: Family) -> ModelSpec:
    """The layers that draft for a model, of the checkpoint of that model; family: the model's. ValueError: there are none."""
    if family.nextn is None:
        raise ValueError(f"{target.architecture} has no layers that draft")
    count, prefix = target.num_nextn_predict_layers, family.nextn.prefix
    if count < 1:
        raise ValueError(f"num_nextn_predict_layers: the checkpoint of {target.architecture} has none")
    if prefix and count > 1:
        raise ValueError(f"num_nextn_predict_layers {count}: of {target.architecture} one layer is read")
    layer = next(layer for layer in reversed(list(target.layers)) if layer.attention is not None)
    if layer.attention is not None and layer.attention.mla is not None:  # an index of another model is none of its own
        layer = replace(layer, attention=replace(layer.attention, mla=replace(layer.attention.mla, index_shared=False)))
    return replace(
        target,
        architecture=target.architecture + NEXTN,
        layers=Layers.alike(layer, count),
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        draft=DraftSpec(method="mtp", first_layer=0 if prefix else target.num_hidden_layers, prefix=prefix),
    )


def nextn_family(target: Family) -> Family:
    """The family of the layers that draft for models of another."""
    names = target.nextn
    assert names is not None
    prefix = names.prefix

    def weights(spec: ModelSpec) -> Iterator[Weight]:
        assert spec.draft is not None
        plus = 0.0
        for weight in target.weights(spec):
            if weight.layer is not None:
                inner = weight.name.removeprefix(f"model.layers.{weight.layer}.")
                yield weight._replace(name=_stem(prefix, spec.draft.first_layer + weight.layer) + inner, gguf="")
            elif weight.parameter == "norm.weight":
                plus = weight.plus
        for layer in range(spec.num_hidden_layers):
            stem = prefix or _stem(prefix, spec.draft.first_layer + layer)
            yield from _around(stem, f"around.{layer}", names, spec.hidden_size, plus)

    return target._replace(
        architecture=target.architecture + NEXTN, weights=weights, gguf=None, serves=Serves.DRAFTS, compiles=False,
        model=names.model, rename=_without_model if prefix else target.rename, unread="", nextn=None,
    )  # fmt: skip


def _stem(prefix: str, layer: int) -> str:
    """What stands before the names of a layer's tensors."""
    return f"{prefix or 'model.'}layers.{layer}."


def _around(stem: str, module: str, names: NextN, hidden: int, plus: float) -> Iterator[Weight]:
    """What makes the input of a layer that drafts, and the norm behind it. stem: before the names of the tensors."""
    for name, parameter in ((names.embedding_norm, "enorm"), (names.state_norm, "hnorm"), (names.norm, "norm")):
        yield Weight(f"{stem}{name}.weight", "", f"{module}.{parameter}.weight", (hidden,), plus=plus)
    yield Weight(f"{stem}{names.projection}.weight", "", f"{module}.eh_proj.weight", (hidden, 2 * hidden))


def _without_model(name: str) -> str:
    """A tensor's name, whether the file has the inner model's prefix or not."""
    return name.removeprefix("model.")


def is_own(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of the checkpoint, by the family's name, is of this drafter: the target's stand beside a layer's."""
    assert spec.draft is not None
    if spec.draft.method != "mtp":
        return True
    inner, first = name.removeprefix("model."), spec.draft.first_layer
    if prefix := spec.draft.prefix:
        return inner.startswith(prefix) and not inner.removeprefix(prefix).startswith(_SHARED)
    stems = (f"layers.{layer}." for layer in range(first, first + spec.num_hidden_layers))
    stem = next((stem for stem in stems if inner.startswith(stem)), None)
    return stem is not None and not inner.removeprefix(stem).startswith(_SHARED)


def fitted(spec: ModelSpec, target: ModelSpec, method: str) -> ModelSpec:
    """A drafter of files of its own, with what the model that it drafts for tells of it. ValueError names what does not fit."""
    draft, layers = spec.draft, target.num_hidden_layers
    if draft is None:
        raise ValueError(f"{spec.architecture} reads no states of another model")
    if draft.method != method:
        raise ValueError(f"{spec.architecture} drafts by the method {draft.method}")
    embeds_less = target.layer_norms is not None and target.layer_norms.embedding_dim
    own_ways = (target.altup, target.per_layer_input, target.audio_encoder)  # of computing layers: nobody taps them
    if target.transformers or embeds_less or (any(own_ways) and method == "eagle3"):
        raise ValueError(f"{target.architecture} does not give the states that it reads")
    for what, own, of_target in (
        ("a vocabulary of {} tokens", spec.vocab_size, target.vocab_size),
        ("states of {} numbers", draft.target_hidden_size or spec.hidden_size, target.hidden_size),
    ):
        if own != of_target:
            raise ValueError(f"it is for {what.format(own)}, and {target.architecture} has {what.format(of_target)}")
    if draft.method != "eagle3":
        return spec
    taps = draft.taps or (2, layers // 2, layers - 3)
    if not all(0 < tap <= layers for tap in taps):
        raise ValueError(f"it reads states behind {taps} layers, and {target.architecture} has {layers}")
    return replace(spec, draft=replace(draft, taps=taps))


_TAPS = 3


def _of_one_layer(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = full_spec(config, architecture)
    if spec.num_hidden_layers != 1:
        raise ValueError(
            f"num_hidden_layers {spec.num_hidden_layers} is not supported for {architecture}; supported: 1"
        )
    return spec


def _eagle3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec, own = _of_one_layer(config, architecture), config.get("eagle_config") or {}
    if not isinstance(own, dict) or own.get("use_aux_hidden_state", True) is not True:
        raise ValueError(f"eagle_config {shown(own)} is not supported: states behind several layers are read")
    ids, before = own.get("eagle_aux_hidden_state_layer_ids"), 1
    if not ids:
        ids, before = config.get("eagle_aux_hidden_state_layer_ids") or [], 0
    if not isinstance(ids, list) or len(ids) not in (0, _TAPS) or any(type(one) is not int for one in ids):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids must name {_TAPS} layers, got {shown(ids)}")
    draft = DraftSpec(
        method="eagle3",
        target_hidden_size=integer(config, "target_hidden_size", 0),
        taps=tuple(one + before for one in ids),
        draft_vocab_size=integer(config, "draft_vocab_size", 0),
        norm_before_residual=boolean(config, "norm_before_residual"),
    )
    if not 0 <= draft.draft_vocab_size <= spec.vocab_size or draft.target_hidden_size < 0:
        raise ValueError(
            f"draft_vocab_size is {draft.draft_vocab_size}; it may be vocab_size, {spec.vocab_size}, at most"
        )
    return replace(spec, tie_word_embeddings=False, draft=draft)


def _eagle3_weights(spec: ModelSpec) -> Iterator[Weight]:
    draft, hidden = spec.draft, spec.hidden_size
    assert draft is not None
    of_target, few = draft.target_hidden_size or hidden, draft.draft_vocab_size
    yield Weight("fc.weight", "", "fc.weight", (hidden, _TAPS * of_target))
    yield Weight("midlayer.hidden_norm.weight", "", "hidden_norm.weight", (hidden,))
    yield Weight("norm.weight", "", "norm.weight", (hidden,))
    if of_target != hidden:
        yield Weight("embed_tokens.weight", "", "embed.weight", (spec.vocab_size, hidden), Split.VOCABULARY)
    for weight in transformer_weights(spec, PRE_NORMS):
        if weight.layer is not None:
            shape = (weight.shape[0], 2 * hidden) if weight.parameter == "attention.qkv.weight" else weight.shape
            yield weight._replace(
                name=weight.name.replace("model.layers.0.", "midlayer."), gguf="", shape=shape, quantises=False
            )
    if few:
        yield Weight("lm_head.weight", "", "draft_head.weight", (few, hidden))
    if few and few < spec.vocab_size:
        yield Weight("d2t", "", "d2t", (few,), integers=True)


def _renamed(name: str) -> str:
    inner = name.removeprefix("model.")
    return inner.replace("layers.0.", "midlayer.", 1) if inner.startswith("layers.0.") else inner


def _eagle_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = _of_one_layer(config, architecture)
    bias = "bias" not in config or boolean(config, "bias")  # as the authors' code has it
    return replace(spec, tie_word_embeddings=False, draft=DraftSpec(method="eagle", fc_bias=bias))


def _eagle_weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden = spec.hidden_size
    yield Weight("fc.weight", "", "fc.weight", (hidden, 2 * hidden))
    if spec.draft is not None and spec.draft.fc_bias:
        yield Weight("fc.bias", "", "fc.bias", (hidden,))
    for weight in transformer_weights(spec, PRE_NORMS[1:]):
        if weight.layer is not None:
            yield weight._replace(name=weight.name.removeprefix("model."), gguf="", quantises=False)


_EAGLE3 = Family(
    architecture="LlamaForCausalLMEagle3",
    model_type="llama",
    spec=_eagle3_spec,
    weights=_eagle3_weights,
    keys=words("""
        draft_vocab_size target_hidden_size norm_before_residual eagle_config eagle_aux_hidden_state_layer_ids
    """),
    rename=_renamed,
    unread=r"t2d|d2t|embed_tokens\.weight|lm_head\.weight",
    serves=Serves.DRAFTS,
    compiles=False,
    model="meshlm.workers.models.drafters:Eagle3",
)
_EAGLE = _EAGLE3._replace(
    spec=_eagle_spec,
    weights=_eagle_weights,
    keys=frozenset(("bias",)),
    rename=lambda name: name.removeprefix("model."),
    unread=r"embed_tokens\.weight|lm_head\.weight",
    model="meshlm.workers.models.drafters:Eagle",
)
PLAIN_NAMES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
"""By method: the architecture of a drafter whose config.json calls it LlamaForCausalLM, as the first ones do."""
DRAFTERS = {
    name: family._replace(architecture=name)
    for family, names in (
        (_EAGLE, (PLAIN_NAMES["eagle"], "EagleLlamaForCausalLM")),
        (_EAGLE3, (PLAIN_NAMES["eagle3"], "Eagle3LlamaForCausalLM")),
    )
    for name in names
}
