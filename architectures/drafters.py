"""Drafters that read the states of the model that they draft for, its target: what they are, and their tensors.

mtp (DeepSeek-AI 2024, section 2.2): a layer behind the last one of the target's own checkpoint. Its embedding and its output projection
are the target's; the copies that some checkpoints have of them (embed_tokens, shared_head.head) are not loaded.

How they compute is in workers/models/drafters.py. They have no architecture that a user could serve.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from meshlm.architectures.family import Family, Serves, Weight
from meshlm.protocol.layers import Layers
from meshlm.protocol.model import DraftSpec, ModelSpec

NEXTN = "NextN"
"""What stands behind the name of a target's architecture in that of the layer that drafts for it."""
_SHARED = ("embed_tokens.", "shared_head.head.")


def nextn_spec(target: ModelSpec, family: Family) -> ModelSpec:
    """The layer that drafts for a model, of the checkpoint of that model; family: the model's. ValueError: there is none."""
    if not family.nextn:
        raise ValueError(f"{target.architecture} has no layers that draft")
    if (count := target.num_nextn_predict_layers) != 1:
        found = "none" if count < 1 else f"{count}, of which each drafts a token; one that drafts them all is read"
        raise ValueError(f"num_nextn_predict_layers: the checkpoint of {target.architecture} has {found}")
    last = target.num_hidden_layers
    layer = target.layers[last - 1]
    if layer.attention is not None and layer.attention.mla is not None:  # an index of another model is none of its own
        layer = replace(layer, attention=replace(layer.attention, mla=replace(layer.attention.mla, index_shared=False)))
    return replace(
        target,
        architecture=target.architecture + NEXTN,
        layers=Layers.alike(layer, 1),
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        draft=DraftSpec(method="mtp", first_layer=last),
    )


def nextn_family(target: Family) -> Family:
    """The family of the layer that drafts for models of another."""

    def weights(spec: ModelSpec) -> Iterator[Weight]:
        assert spec.draft is not None
        stem, hidden = f"model.layers.{spec.draft.first_layer}.", spec.hidden_size
        for name, parameter in (("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head.norm", "norm")):
            yield Weight(f"{stem}{name}.weight", "", f"{parameter}.weight", (hidden,))
        yield Weight(f"{stem}eh_proj.weight", "", "eh_proj.weight", (hidden, 2 * hidden))
        for weight in target.weights(spec):
            if weight.layer is not None:
                yield weight._replace(name=stem + weight.name.removeprefix("model.layers.0."), gguf="")

    return target._replace(
        architecture=target.architecture + NEXTN,
        weights=weights,
        gguf=None,
        serves=Serves.DRAFTS,
        compiles=False,
        model=target.nextn,
        nextn="",
    )


def is_own(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of the checkpoint, by the family's name, is of this drafter: the target's stand beside a layer's."""
    assert spec.draft is not None
    if spec.draft.method != "mtp":
        return True
    inner = name.removeprefix("model.")
    stem = f"layers.{spec.draft.first_layer}."
    return inner.startswith(stem) and not inner.removeprefix(stem).startswith(_SHARED)
