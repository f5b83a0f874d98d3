"""Decoders that give vectors: the model without its output projection, and classifiers in the place of it.

Each family of decoders has them: LlamaModel, LlamaForSequenceClassification (also of tokens). Their layers are the family's.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown
from meshlm.architectures.encoder import KEYS, classifier, head_weights
from meshlm.architectures.family import Family, Serves, Weight, stem_of
from meshlm.protocol.model import HeadSpec, ModelSpec

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
        gguf=None, compiles=False, keys=family.keys | _OWN, unread=unread, rename=family.rename or str
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
            spec=_with_head(family, _of_tokens),
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


def _of_tokens(config: dict[str, Any]) -> HeadSpec:
    return classifier(config, bias=(True,))


def _reward(config: dict[str, Any]) -> HeadSpec:
    return HeadSpec(num_labels=1, layers=2, bias=(True, True), act="relu", activation="none")


def _process_reward(config: dict[str, Any]) -> HeadSpec:
    """Of the steps of a solution, each of which ends in the token <extra_0>; vLLM has its id likewise."""
    return HeadSpec(num_labels=2, layers=2, bias=(True, True), act="relu", activation="softmax", step_tag_id=151651)
