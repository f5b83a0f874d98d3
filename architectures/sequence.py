"""Models that give vectors and classes: what encoders have in common, and what each family of decoders brings along, such as LlamaModel
and LlamaForSequenceClassification (also of tokens): its layers without the output projection, or with a classifier in its place.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, shown
from meshlm.architectures.dense import ACTIVATIONS, decoder_layers, dtype_of
from meshlm.architectures.family import Family, Serves, Weight, stem_of
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


def encoder_activation(config: dict[str, Any], key: str) -> str:
    act = config.get(key) or "gelu"
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


def of_tokens(config: dict[str, Any]) -> HeadSpec:
    return classifier(config, bias=(True,))


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


_OWN = (KEYS - {"position_embedding_type"}) | frozenset(
    ("classifier_from_token", "is_original_qwen3_reranker", "method", "score_bias")
)
_UNREAD = r"(model\.)?lm_head\..*"


def vector_families(family: Family) -> tuple[Family, ...]:
    """The families for vectors and classes that a family of decoders brings along."""
    stem = stem_of(family.architecture)
    if not stem:
        return ()
    unread = f"({family.unread})|{_UNREAD}" if family.unread else _UNREAD
    plain = family._replace(
        gguf=None, compiles=False, keys=family.keys | _OWN, unread=unread, rename=family.rename or str, nextn=None
    )
    found = [
        plain._replace(architecture=f"{stem}Model", spec=_without_projection(family), serves=Serves.VECTORS),
        plain._replace(
            architecture=f"{stem}ForSequenceClassification",
            serves=Serves.CLASSES,
            spec=_with_head(family, _score),
            weights=_weights(family, ("score",)),
        ),
        plain._replace(
            architecture=f"{stem}ForTokenClassification",
            serves=Serves.TOKEN_CLASSES,
            spec=_with_head(family, of_tokens),
            weights=_weights(family, ("score",)),
        ),
    ]
    if family.architecture == "Qwen2ForCausalLM":
        weights = _weights(family, ("score.0", "score.2"))
        found += [
            plain._replace(
                architecture=f"Qwen2For{name}RewardModel",
                serves=Serves.REWARDS,
                spec=_with_head(family, head),
                weights=weights,
            )
            for name, head in (("", _reward), ("Process", _process_reward))
        ]
    return tuple(found)


def _without_projection(family: Family) -> Callable[[dict[str, Any], str], ModelSpec]:
    def spec(config: dict[str, Any], architecture: str) -> ModelSpec:
        return replace(_unbiased(family.spec(config, architecture)), tie_word_embeddings=True)

    return spec


def _has_bias(spec: ModelSpec) -> bool:
    return spec.layer_norms is not None and spec.layer_norms.head_bias


def _unbiased(spec: ModelSpec) -> ModelSpec:
    """Without the bias of logits, which goes with the output projection."""
    order = spec.layer_norms
    return spec if order is None else replace(spec, layer_norms=replace(order, head_bias=False))


def _with_head(
    family: Family, head: Callable[[dict[str, Any]], HeadSpec]
) -> Callable[[dict[str, Any], str], ModelSpec]:
    def spec(config: dict[str, Any], architecture: str) -> ModelSpec:
        text, own = family.spec(config, architecture), head(config)
        if own.token_ids and (text.logit_scale != 1 or text.final_logit_softcapping or _has_bias(text)):
            raise ValueError(
                f"classifier_from_token: logits of {family.architecture} are more than a product: scaled, capped, or with a bias"
            )
        found = _unbiased(text)
        return replace(found, head=own, tie_word_embeddings=found.tie_word_embeddings or not own.token_ids)

    return spec


def _weights(family: Family, names: tuple[str, ...]) -> Callable[[ModelSpec], Iterator[Weight]]:
    def weights(spec: ModelSpec) -> Iterator[Weight]:
        yield from family.weights(spec)
        yield from head_weights(spec, names)

    return weights


def _score(config: dict[str, Any]) -> HeadSpec:
    """A product without bias, or rows of the output projection: the likelihood of one answer against another's (Qwen3-Reranker)."""
    ids = config.get("classifier_from_token")
    if not ids:
        return classifier(config)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError(f"classifier_from_token {shown(ids)} is no list of tokens")
    method = config.get("method") or (
        "from_2_way_softmax" if config.get("is_original_qwen3_reranker") else "no_post_processing"
    )
    if method not in ("from_2_way_softmax", "no_post_processing") or (method == "from_2_way_softmax" and len(ids) != 2):
        raise ValueError(f"method {shown(method)} with {len(ids)} tokens of classifier_from_token is not supported")
    labels = 1 if method == "from_2_way_softmax" else len(ids)
    return HeadSpec(num_labels=labels, token_ids=tuple(ids), activation="sigmoid" if labels == 1 else "softmax")


def _reward(config: dict[str, Any]) -> HeadSpec:
    return HeadSpec(num_labels=1, layers=2, bias=(True, True), act="relu", activation="none")


def _process_reward(config: dict[str, Any]) -> HeadSpec:
    """The head that rewards each step of a solution, which ends in the token <extra_0>; vLLM has its id likewise."""
    return HeadSpec(num_labels=2, layers=2, bias=(True, True), act="relu", activation="softmax", step_tag_id=151651)
