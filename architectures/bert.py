"""BERT (Devlin et al. 2019), and what RoBERTa and XLM-R share with it: learned positions, and layer norms behind the sums."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, shown
from meshlm.architectures.dense import dense_gguf
from meshlm.architectures.encoder import (
    KEYS,
    classifier,
    encoder_activation,
    encoder_spec,
    head_weights,
    layer_norm_eps,
    norm_weights,
)
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Serves, Weight
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
    for name, gguf, rows in (
        ("word", "token_embd", spec.vocab_size),
        ("position", "position_embd", positions),
        ("token_type", "token_types", spec.type_vocab_size),
    ):
        table = f"{name}_embeddings.weight"
        yield Weight(f"embeddings.{table}", f"{gguf}.weight", table, (rows, hidden))
    yield from norm_weights(spec, "embeddings.LayerNorm", "embedding_norm", "token_embd_norm")
    for layer in range(spec.num_hidden_layers):
        stem, block = f"encoder.layer.{layer}", f"blk.{layer}"
        for name, gguf, parameter, shape in (
            ("attention.self.query", "attn_q", "qkv", (hidden, hidden)),
            ("attention.self.key", "attn_k", "qkv", (hidden, hidden)),
            ("attention.self.value", "attn_v", "qkv", (hidden, hidden)),
            ("attention.output.dense", "attn_output", "o", (hidden, hidden)),
            ("intermediate.dense", "ffn_up", "up", (wide, hidden)),
            ("output.dense", "ffn_down", "down", (hidden, wide)),
        ):
            yield Weight(f"{stem}.{name}.weight", f"{block}.{gguf}.weight", f"{parameter}.weight", shape, layer=layer)
            yield Weight(f"{stem}.{name}.bias", f"{block}.{gguf}.bias", f"{parameter}.bias", shape[:1], layer=layer)
        for name, gguf, parameter in (
            ("attention.output.LayerNorm", "attn_output_norm", "attention_norm"),
            ("output.LayerNorm", "layer_output_norm", "mlp_norm"),
        ):
            for weight in norm_weights(spec, f"{stem}.{name}", parameter, f"{block}.{gguf}"):
                yield weight._replace(layer=layer)
    yield from head_weights(spec, head[-len(spec.head.bias) :] if spec.head is not None else ())


_TOKENIZERS = ("bert", "t5")  # of .gguf files: BERT's, XLM-R's


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The spec of a .gguf file: what it does not say is as llama.cpp has it, biases everywhere and GELU. XLM-R's files are of this
    kind, too: their positions begin at 0, since the rows before that of the first token are left out. RoBERTa's are refused."""
    kind = metadata.fields.get("tokenizer.ggml.model")
    if kind not in _TOKENIZERS:
        known = ", ".join(_TOKENIZERS)
        raise MetadataError(
            f"tokenizer.ggml.model {shown(kind)} is not supported for {metadata.kind}; supported: {known}"
        )
    tables = {name: metadata.shapes.get(f"{name}.weight", ()) for name in ("position_embd", "token_types")}
    for name, shape in tables.items():
        if len(shape) != 2:
            raise MetadataError(f"tensor {name}.weight is missing, or no matrix")
    if metadata.get("attention.causal", True) is not False:
        raise MetadataError(f"metadata {metadata.kind}.attention.causal must be false")
    return replace(
        dense_gguf(metadata, architecture, "attention.layer_norm_epsilon"),
        hidden_act="gelu",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        max_position_embeddings=tables["position_embd"][0],
        type_vocab_size=tables["token_types"][0],
        encoder_only=True,
    )


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
    serves=Serves.VECTORS,
    spec=_spec,
    weights=bert_weights,
    keys=KEYS,
    compiles=False,
    gguf=GGUFFamily("bert", _gguf, frozenset(("attention.causal", "attention.layer_norm_epsilon"))),
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


OTHER = FAMILY._replace(gguf=None)
"""The same for models that llama.cpp does not write, or not so."""
FAMILIES = (
    OTHER._replace(
        architecture="BertSpladeSparseEmbeddingModel",
        spec=_splade_spec,
        weights=_splade_weights,
        unread=r"pooler\..*|cls\.seq_relationship\..*|cls\.predictions\.decoder\..*|.*position_ids|.*token_type_ids",
    ),
    OTHER._replace(
        architecture="HF_ColBERT",
        spec=_colbert_spec,
        weights=_colbert_weights,
        keys=KEYS | {"colbert_dim", "dim", "projection_dim"},
    ),
    FAMILY,
    OTHER._replace(architecture="BertForMaskedLM"),
    OTHER._replace(architecture="BertForSequenceClassification", spec=_sequence_spec, serves=Serves.CLASSES),
    OTHER._replace(architecture="BertForTokenClassification", spec=_token_spec, serves=Serves.TOKEN_CLASSES),
)
