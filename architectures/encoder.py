"""What encoders have in common: sizes, classifiers, and the names under which checkpoints hold the same weights."""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures.config_values import integer, number, shown
from meshlm.architectures.dense import ACTIVATIONS, decoder_layers, dtype_of
from meshlm.architectures.family import Weight
from meshlm.protocol.model import HeadSpec, ModelSpec

ENCODER_ACTIVATIONS = {**ACTIVATIONS, "relu": "relu"}
KEYS = frozenset(
    [
        "type_vocab_size",
        "layer_norm_eps",
        "position_embedding_type",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
    ]
    + ["sentence_transformers", "sbert_ce_default_activation_function", "classifier_dropout", "pad_token_id"]
)
_SCORES = {"single_label_classification": "softmax", "multi_label_classification": "sigmoid", "regression": "none"}


def encoder_spec(config: dict[str, Any], architecture: str, **more: Any) -> ModelSpec:
    """The sizes that every config.json of an encoder gives. KeyError, ValueError."""
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    given: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": hidden,
        "layers": decoder_layers(
            integer(config, "num_hidden_layers"), heads, hidden // heads, integer(config, "intermediate_size")
        ),
        "num_attention_heads": heads,
        "max_position_embeddings": integer(config, "max_position_embeddings"),
        "tie_word_embeddings": True,
        "encoder_only": True,
        "dtype": dtype_of(config),
    }
    return ModelSpec(**(given | more))


def encoder_activation(config: dict[str, Any], key: str, default: str = "gelu") -> str:
    """The function of the MLP. ValueError."""
    act = config.get(key) or default
    if not isinstance(act, str) or act not in ENCODER_ACTIVATIONS:
        raise ValueError(f"{key} {shown(act)} is not supported; supported: {', '.join(ENCODER_ACTIVATIONS)}")
    return ENCODER_ACTIVATIONS[act]


def layer_norm_eps(config: dict[str, Any], key: str, default: float) -> float:
    return number(config.get(key, default), key)


def num_labels(config: dict[str, Any]) -> int:
    """The number of labels, as transformers finds it: two where the file names none."""
    if isinstance(names := config.get("id2label"), dict) and names:
        return len(names)
    return integer(config, "num_labels", 2)


def scores(config: dict[str, Any], labels: int) -> str:
    """The function that makes scores of logits, by what the file says of the model's training. ValueError."""
    kind = config.get("problem_type")
    if kind is not None and (not isinstance(kind, str) or kind not in _SCORES):
        raise ValueError(f"problem_type {shown(kind)} is not supported; supported: {', '.join(_SCORES)}")
    if kind is not None:
        return "sigmoid" if _SCORES[kind] == "softmax" and labels < 2 else _SCORES[kind]
    trained = config.get("sentence_transformers")
    name = trained.get("activation_fn") if isinstance(trained, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    last = str(name).rpartition(".")[2] if name else ""
    if last not in ("", "Identity", "Sigmoid", "Softmax"):
        raise ValueError(f"activation function {shown(name)} is not supported; supported: Identity, Sigmoid, Softmax")
    if last == "Identity":
        return "none"
    return "softmax" if labels > 1 else "sigmoid"


def head_weights(spec: ModelSpec, names: tuple[str, ...], norm: str = "") -> Iterator[Weight]:
    """The tensors of a classifier, by what stands before weight and bias of each product. norm: the same of its layer norm."""
    head = spec.head
    if head is None or head.token_ids:
        return
    for place, (name, bias) in enumerate(zip(names, head.bias, strict=True)):
        rows = head.num_labels if place == len(names) - 1 else spec.hidden_size
        yield Weight(f"{name}.weight", "", f"classifier.products.{place}.weight", (rows, spec.hidden_size))
        if bias:
            yield Weight(f"{name}.bias", "", f"classifier.products.{place}.bias", (rows,))
    if norm:
        yield from norm_weights(spec, norm, "classifier.norm")


def norm_weights(spec: ModelSpec, name: str, parameter: str, gguf: str = "") -> Iterator[Weight]:
    """A layer norm's weight, and its bias where the model has them. gguf: llama.cpp's name, where it has one."""
    for part in ("weight", "bias") if spec.norm_bias else ("weight",):
        yield Weight(f"{name}.{part}", gguf and f"{gguf}.{part}", f"{parameter}.{part}", (spec.hidden_size,))


def classifier(config: dict[str, Any], **more: Any) -> HeadSpec:
    """The classifier that a config.json describes. ValueError."""
    labels = num_labels(config)
    return HeadSpec(num_labels=labels, activation=scores(config, labels), **more)  # type: ignore[arg-type]
