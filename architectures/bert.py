"""BERT (Devlin et al. 2019), and what RoBERTa and XLM-R share with it: learned positions, and layer norms behind the sums."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, shown
from meshlm.architectures.encoder import (
    KEYS,
    classifier,
    encoder_activation,
    encoder_spec,
    head_weights,
    layer_norm_eps,
    norm_weights,
)
from meshlm.architectures.family import Family, Weight
from meshlm.protocol.model import HeadSpec, ModelSpec

UNREAD = r"pooler\..*|cls\..*|lm_head\..*|.*position_ids|.*token_type_ids|qa_outputs\..*"
"""Tensors that other tasks need: the masked language model's head, and the pooler where there is no classifier behind it."""
POOLER_AND_CLASSIFIER = ("pooler.dense", "classifier")


def bert_spec(config: dict[str, Any], architecture: str, offset: int = 0) -> ModelSpec:
    """offset: the first token's place in the table of positions. KeyError, ValueError."""
    if (kind := config.get("position_embedding_type") or "absolute") != "absolute":
        raise ValueError(f"position_embedding_type {shown(kind)} is not supported; supported: absolute")
    return encoder_spec(
        config,
        architecture,
        max_position_embeddings=integer(config, "max_position_embeddings") - offset,
        position_offset=offset,
        type_vocab_size=integer(config, "type_vocab_size", 2),
        rms_norm_eps=layer_norm_eps(config, "layer_norm_eps", 1e-12),
        hidden_act=encoder_activation(config, "hidden_act"),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
    )


def bert_weights(spec: ModelSpec, head: tuple[str, ...] = POOLER_AND_CLASSIFIER) -> Iterator[Weight]:
    """Every tensor. head: the names of the classifier's products."""
    hidden, wide = spec.hidden_size, spec.intermediate_size
    positions = spec.max_position_embeddings + spec.position_offset
    for name, rows in (("word", spec.vocab_size), ("position", positions), ("token_type", spec.type_vocab_size)):
        yield Weight(f"embeddings.{name}_embeddings.weight", "", f"{name}_embeddings.weight", (rows, hidden))
    yield from norm_weights(spec, "embeddings.LayerNorm", "embedding_norm")
    for layer in range(spec.num_hidden_layers):
        stem = f"encoder.layer.{layer}"
        products = [(f"attention.self.{name}", "qkv", (hidden, hidden)) for name in ("query", "key", "value")]
        products += [
            ("attention.output.dense", "o", (hidden, hidden)),
            ("intermediate.dense", "up", (wide, hidden)),
            ("output.dense", "down", (hidden, wide)),
        ]
        for name, parameter, shape in products:
            yield Weight(f"{stem}.{name}.weight", "", f"{parameter}.weight", shape, layer=layer)
            yield Weight(f"{stem}.{name}.bias", "", f"{parameter}.bias", shape[:1], layer=layer)
        for name, parameter in (("attention.output.LayerNorm", "attention_norm"), ("output.LayerNorm", "mlp_norm")):
            for weight in norm_weights(spec, f"{stem}.{name}", parameter):
                yield weight._replace(layer=layer)
    yield from head_weights(spec, head[-len(spec.head.bias) :] if spec.head is not None else ())


def renamed(name: str) -> str:
    """The name without the prefix of models with a head, and with the newer names of a layer norm's weights."""
    for prefix in ("bert.", "roberta.", "xlm_roberta.", "model."):
        name = name.removeprefix(prefix)
    if name.endswith(("LayerNorm.gamma", "LayerNorm.beta")):
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
    return name


def of_sequences(config: dict[str, Any]) -> HeadSpec:
    """The pooler, a product and tanh, and the classifier behind it."""
    return classifier(config, layers=2, bias=(True, True), act="tanh")


def of_tokens(config: dict[str, Any]) -> HeadSpec:
    return classifier(config, bias=(True,))


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return bert_spec(config, architecture)


def _sequence_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(bert_spec(config, architecture), head=of_sequences(config))


def _token_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(bert_spec(config, architecture), head=of_tokens(config))


FAMILY = Family(
    architecture="BertModel",
    model_type="bert",
    spec=_spec,
    weights=bert_weights,
    keys=KEYS,
    compiles=False,
    model="meshlm.workers.models.bert:Bert",
    rename=renamed,
    unread=UNREAD,
)


def _colbert_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """ColBERT (Khattab and Zaharia 2020): `dim` says how many numbers a token's vector has."""
    name = next((key for key in ("colbert_dim", "dim", "projection_dim") if config.get(key) is not None), "dim")
    return replace(bert_spec(config, architecture), projection=integer(config, name))


def _colbert_weights(spec: ModelSpec) -> Iterator[Weight]:
    yield from bert_weights(spec)
    yield Weight("linear.weight", "", "projection.weight", (spec.projection, spec.hidden_size))


def _splade_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """SPLADE (Formal et al. 2021), by the name that vLLM gives it."""
    if config.get("tie_word_embeddings", True) is not True:
        raise ValueError("tie_word_embeddings false is not supported for SPLADE")
    return replace(bert_spec(config, architecture), lexical="splade")


def _splade_weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, head = spec.hidden_size, "cls.predictions"
    yield from bert_weights(spec)
    yield Weight(f"{head}.transform.dense.weight", "", "masked.transform.weight", (hidden, hidden))
    yield Weight(f"{head}.transform.dense.bias", "", "masked.transform.bias", (hidden,))
    yield from norm_weights(spec, f"{head}.transform.LayerNorm", "masked.norm")
    yield Weight(f"{head}.bias", "", "masked.bias", (spec.vocab_size,))


FAMILIES = (
    FAMILY._replace(
        architecture="BertSpladeSparseEmbeddingModel",
        spec=_splade_spec,
        weights=_splade_weights,
        unread=r"pooler\..*|cls\.seq_relationship\..*|cls\.predictions\.decoder\..*|.*position_ids|.*token_type_ids",
    ),
    FAMILY._replace(
        architecture="HF_ColBERT",
        spec=_colbert_spec,
        weights=_colbert_weights,
        keys=KEYS | {"colbert_dim", "dim", "projection_dim"},
    ),
    FAMILY,
    FAMILY._replace(architecture="BertForMaskedLM"),
    FAMILY._replace(architecture="BertForSequenceClassification", spec=_sequence_spec),
    FAMILY._replace(architecture="BertForTokenClassification", spec=_token_spec),
)
