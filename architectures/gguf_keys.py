"""Every key of a .gguf file's metadata that is known: read, needless, or one that changes what a model computes and is not honoured.

Called by runtime/model_files/gguf_model.py. Keys of a model's shape begin with its architecture; their names are those of the GGUF
specification.
"""

from collections.abc import Set
from typing import Any

from meshlm.architectures.config_values import shown, words

HONOURED = words("""
    context_length embedding_length block_count feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length nextn_predict_layers pooling_type
""")
NEEDLESS = frozenset(("rope.scaling.finetuned", "tensor_data_layout"))
# What asks for nothing beside false, 0 and what is empty; a key of the architecture that stands nowhere is not honoured either.
NEUTRAL: dict[str, frozenset[Any]] = {
    "attention.causal": frozenset((True,)),
    "embedding_scale": frozenset((1,)),
    "residual_scale": frozenset((1,)),
    "logit_scale": frozenset((1,)),
    "rope.scale_linear": frozenset((1,)),
    "rope.scaling.attn_factor": frozenset((1,)),
    "rope.scaling.yarn_attn_factor": frozenset((1,)),
    "rope.scaling.yarn_beta_fast": frozenset((32,)),
    "rope.scaling.yarn_beta_slow": frozenset((1,)),
    "rope.scaling.yarn_ext_factor": frozenset((1, -1)),
    "rope.scaling.alpha": frozenset((1,)),
}
_TOP = ("general.", "tokenizer.", "quantize.", "split.")


def check(fields: dict[str, Any], architecture: str, honoured: Set[str] = frozenset()) -> tuple[str, ...]:
    """honoured: keys of this family alone; those before which the architecture does not stand by their whole names. Notes for the
    user. ValueError names what is not honoured."""
    kind = fields.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"general.type is {shown(kind)}; a model is what can be served")
    unknown = []
    for name, value in fields.items():
        key = name.removeprefix(f"{architecture}.")
        if key == name:
            if not name.startswith(_TOP) and name not in honoured:
                unknown.append(name)
        elif key not in HONOURED | honoured and key not in NEEDLESS and not _neutral(key, value):
            raise ValueError(f"{name} {shown(value)} changes what the model computes, and it is not honoured")
    notes = [f"unknown metadata is ignored: {', '.join(sorted(unknown))}"] if unknown else []
    sampling = sorted(name for name in fields if name.startswith("general.sampling."))
    if sampling:
        notes.append(
            f"sampling defaults are not applied: {', '.join(sampling)} (--override-generation-config gives defaults)"
        )
    return tuple(notes)


def _neutral(key: str, value: Any) -> bool:
    if key == "attention.causal":
        return value is True
    return not value or (isinstance(value, int | float | str) and value in NEUTRAL.get(key, ()))
