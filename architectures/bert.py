"""BERT (Devlin et al. 2019), and what RoBERTa and XLM-R share with it: learned positions, and layer norms behind the sums.
RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020): BERT whose positions begin behind that of padding.
ModernBERT (Warner et al. 2024): rotated positions, gated MLPs, and layers most of which see a window on both sides.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from meshlm.architectures import sequence
from meshlm.architectures.config_values import boolean, integer, number, shown
from meshlm.architectures.dense import dense_gguf
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Serves, Weight
from meshlm.architectures.layers import with_attention
from meshlm.protocol.model import HeadSpec, ModelSpec, RopeSpec

UNREAD = r"pooler\..*|cls\..*|lm_head\..*|.*position_ids|.*token_type_ids|qa_outputs\..*"
"""Tensors that other tasks need: the masked language model's head, and the pooler where there is no classifier behind it."""
POOLER_AND_CLASSIFIER = ("pooler.dense", "classifier")


def bert_spec(
    config: dict[str, Any],
    architecture: str,
    *,
    padded: bool = False,
    head: Callable[[dict[str, Any]], HeadSpec] | None = None,
    lexical: Literal["", "splade", "bge-m3"] = "",
) -> ModelSpec:
    """padded: positions begin behind that of padding, as RoBERTa's. head: the classifier. KeyError, ValueError."""
    offset = integer(config, "pad_token_id", 1) + 1 if padded else 0
    if (kind := config.get("position_embedding_type") or "absolute") != "absolute":
        raise ValueError(f"position_embedding_type {shown(kind)} is not supported; supported: absolute")
    return sequence.encoder_spec(
        config, architecture, max_position_embeddings=integer(config, "max_position_embeddings") - offset,
        position_offset=offset, type_vocab_size=integer(config, "type_vocab_size", 2),
        rms_norm_eps=sequence.layer_norm_eps(config, "layer_norm_eps", 1e-12),
        hidden_act=sequence.encoder_activation(config, "hidden_act"), attention_bias=True, output_bias=True,
        mlp_bias=True, norm_bias=True, head=head and head(config), lexical=lexical,
    )  # fmt: skip


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
    yield from sequence.norm_weights(spec, "embeddings.LayerNorm", "embedding_norm", "token_embd_norm")
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
            for weight in sequence.norm_weights(spec, f"{stem}.{name}", parameter, f"{block}.{gguf}"):
                yield weight._replace(layer=layer)
    yield from sequence.head_weights(spec, head[-len(spec.head.bias) :] if spec.head is not None else ())


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
        dense_gguf(metadata, architecture, "attention.layer_norm_epsilon"), hidden_act="gelu", attention_bias=True,
        output_bias=True, mlp_bias=True, norm_bias=True, max_position_embeddings=tables["position_embd"][0],
        type_vocab_size=tables["token_types"][0], encoder_only=True,
    )  # fmt: skip


def renamed(name: str) -> str:
    """The name without the prefix of models with a head, and with the newer names of a layer norm's weights."""
    for prefix in ("bert.", "roberta.", "xlm_roberta.", "model."):
        name = name.removeprefix(prefix)
    if name.endswith(("LayerNorm.gamma", "LayerNorm.beta")):
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
    return name


def of_sequences(config: dict[str, Any]) -> HeadSpec:
    """The pooler, a product and tanh, and the classifier behind it."""
    return sequence.classifier(config, layers=2, bias=(True, True), act="tanh")


BERT = Family(
    architecture="BertModel", model_type="bert", serves=Serves.VECTORS, spec=bert_spec, weights=bert_weights,
    keys=sequence.KEYS, gguf=GGUFFamily("bert", _gguf, frozenset(("attention.causal", "attention.layer_norm_epsilon"))),
    model="meshlm.workers.models.bert:Bert", rename=renamed, unread=UNREAD,
)  # fmt: skip


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
    return bert_spec(config, architecture, lexical="splade")


def _splade_weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, head = spec.hidden_size, "cls.predictions"
    yield from bert_weights(spec)
    yield Weight(f"{head}.transform.dense.weight", "", "masked.transform.weight", (hidden, hidden))
    yield Weight(f"{head}.transform.dense.bias", "", "masked.transform.bias", (hidden,))
    yield from sequence.norm_weights(spec, f"{head}.transform.LayerNorm", "masked.norm")
    yield Weight(f"{head}.bias", "", "masked.bias", (spec.vocab_size,))


OTHER = BERT._replace(gguf=None)
"""The same for models that llama.cpp does not write, or not so."""
_BERT_FAMILIES = (
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
        keys=sequence.KEYS | {"colbert_dim", "dim", "projection_dim"},
    ),
    BERT,
    OTHER._replace(architecture="BertForMaskedLM"),
    OTHER._replace(
        architecture="BertForSequenceClassification", spec=partial(bert_spec, head=of_sequences), serves=Serves.CLASSES
    ),
    OTHER._replace(
        architecture="BertForTokenClassification",
        spec=partial(bert_spec, head=sequence.of_tokens),
        serves=Serves.TOKEN_CLASSES,
    ),
)
_DENSE_AND_OUT = ("classifier.dense", "classifier.out_proj")
_DEFAULTS = {"layer_norm_eps": 1e-12}
_ROBERTA_FAMILIES = tuple(
    family._replace(architecture=f"{name}{family.architecture}", model_type=kind, defaults=_DEFAULTS)
    for name, kind in (("Roberta", "roberta"), ("XLMRoberta", "xlm-roberta"))
    for family in (
        OTHER._replace(architecture="Model", spec=partial(bert_spec, padded=True)),
        OTHER._replace(architecture="ForMaskedLM", spec=partial(bert_spec, padded=True)),
        OTHER._replace(
            architecture="ForSequenceClassification",
            spec=partial(bert_spec, padded=True, head=of_sequences),
            weights=partial(bert_weights, head=_DENSE_AND_OUT),
            serves=Serves.CLASSES,
        ),
        OTHER._replace(
            architecture="ForTokenClassification",
            spec=partial(bert_spec, padded=True, head=sequence.of_tokens),
            serves=Serves.TOKEN_CLASSES,
        ),
    )
) + (
    OTHER._replace(
        architecture="BgeM3EmbeddingModel",
        model_type="xlm-roberta",
        defaults=_DEFAULTS,
        spec=partial(bert_spec, padded=True, lexical="bge-m3"),
    ),
)
_OWN = frozenset(
    ["norm_eps", "norm_bias", "hidden_activation", "global_rope_theta", "local_rope_theta", "local_attention"]
    + ["global_attn_every_n_layers", "decoder_bias", "classifier_bias", "classifier_activation", "classifier_pooling"]
    + [
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "deterministic_flash_attn",
    ]
)


def _thetas(config: dict[str, Any]) -> tuple[float, float]:
    """Gives the RoPE bases of global and of local layers, from keys of their own or by kind of layer."""
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or (foreign := by_kind.keys() - {"full_attention", "sliding_attention"}):
        what = sorted(foreign)[0] if isinstance(by_kind, dict) else shown(by_kind)
        raise ValueError(f"rope_parameters holds {what}; supported: full_attention, sliding_attention")
    if config.get("position_embedding_type") not in (None, "absolute", "rope"):  # whichever it says, positions rotate
        raise ValueError(f"position_embedding_type {shown(config['position_embedding_type'])} is not supported")
    found = []
    for kind, key, default in (
        ("full_attention", "global_rope_theta", 160000.0),
        ("sliding_attention", "local_rope_theta", 10000.0),
    ):
        own = by_kind.get(kind) or {}
        if not isinstance(own, dict) or own.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters of {kind} {shown(own)}: only rope_type default is supported")
        found.append(number(own.get("rope_theta", config.get(key) or default), key))
    return found[0], found[1]


def _modernbert_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers, every = integer(config, "num_hidden_layers"), integer(config, "global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % max(1, every) else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ValueError(f"layer_types must name the kind of each of {layers} layers, got {shown(kinds)}")
    overall, local = _thetas(config)
    spec = sequence.encoder_spec(
        config, architecture, rms_norm_eps=sequence.layer_norm_eps(config, "norm_eps", 1e-5),
        hidden_act=sequence.encoder_activation(config, "hidden_activation"),
        attention_bias=boolean(config, "attention_bias"), output_bias=boolean(config, "attention_bias"),
        mlp_bias=boolean(config, "mlp_bias"), norm_bias=boolean(config, "norm_bias"), rope=RopeSpec(rope_theta=overall),
        sliding_rope=RopeSpec(rope_theta=local),
    )  # fmt: skip
    return with_attention(
        spec,
        (kind == "sliding_attention" for kind in kinds),
        sliding_window=integer(config, "local_attention", 128) // 2,
    )


def _modernbert_sequence_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """A product, its function and a norm before the classifier."""
    if (kind := config.get("classifier_pooling")) not in (None, "cls", "mean"):
        raise ValueError(f"classifier_pooling {shown(kind)} is not supported; supported: cls, mean")
    act, bias = sequence.encoder_activation(config, "classifier_activation"), boolean(config, "classifier_bias")
    return replace(
        _modernbert_spec(config, architecture),
        head=sequence.classifier(config, layers=2, bias=(bias, True), act=act, norm=True),
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    yield Weight("embeddings.tok_embeddings.weight", "", "word_embeddings.weight", (spec.vocab_size, hidden))
    yield from sequence.norm_weights(spec, "embeddings.norm", "embedding_norm")
    for layer in range(spec.num_hidden_layers):
        for name, parameter, shape, bias in (
            ("attn.Wqkv", "qkv", (3 * hidden, hidden), spec.attention_bias),
            ("attn.Wo", "o", (hidden, hidden), spec.output_bias),
            ("mlp.Wi", "gate_up", (2 * wide, hidden), spec.mlp_bias),
            ("mlp.Wo", "down", (hidden, wide), spec.mlp_bias),
        ):
            yield Weight(f"layers.{layer}.{name}.weight", "", f"{parameter}.weight", shape, layer=layer)
            if bias:
                yield Weight(f"layers.{layer}.{name}.bias", "", f"{parameter}.bias", shape[:1], layer=layer)
        for name in ("attn_norm", "mlp_norm") if layer else ("mlp_norm",):  # the embeddings are normed already
            for weight in sequence.norm_weights(spec, f"layers.{layer}.{name}", name.replace("attn", "attention")):
                yield weight._replace(layer=layer)
    yield from sequence.norm_weights(spec, "final_norm", "final_norm")
    yield from sequence.head_weights(spec, ("head.dense", "classifier"), "head.norm")


def _renamed(name: str) -> str:
    return name.removeprefix("model.")


MODERNBERT = Family(
    architecture="ModernBertModel", model_type="modernbert", serves=Serves.VECTORS, spec=_modernbert_spec,
    weights=_weights, keys=sequence.KEYS | _OWN, model="meshlm.workers.models.bert:ModernBert", rename=_renamed,
    unread=r"head\..*|decoder\..*|classifier\..*",
)  # fmt: skip
_MODERNBERT_FAMILIES = (
    MODERNBERT,
    MODERNBERT._replace(architecture="ModernBertForMaskedLM"),
    MODERNBERT._replace(
        architecture="ModernBertForSequenceClassification", spec=_modernbert_sequence_spec, serves=Serves.CLASSES
    ),
    MODERNBERT._replace(
        architecture="ModernBertForTokenClassification", spec=_modernbert_sequence_spec, serves=Serves.TOKEN_CLASSES
    ),
)
FAMILIES = (*_BERT_FAMILIES, *_ROBERTA_FAMILIES, *_MODERNBERT_FAMILIES)
