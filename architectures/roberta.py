"""RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020): BERT whose positions begin behind that of padding."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.bert import OTHER, bert_spec, bert_weights, of_sequences, of_tokens
from meshlm.architectures.config_values import integer
from meshlm.architectures.family import Serves, Weight
from meshlm.protocol.model import ModelSpec

_DENSE_AND_OUT = ("classifier.dense", "classifier.out_proj")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return bert_spec(config, architecture, offset=integer(config, "pad_token_id", 1) + 1)


def _sequence_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(_spec(config, architecture), head=of_sequences(config))


def _token_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(_spec(config, architecture), head=of_tokens(config))


def _sequence_weights(spec: ModelSpec) -> Iterator[Weight]:
    return bert_weights(spec, _DENSE_AND_OUT)


def _m3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(_spec(config, architecture), lexical="bge-m3")


_DEFAULTS = {"layer_norm_eps": 1e-12}
FAMILIES = tuple(
    family._replace(architecture=f"{name}{family.architecture}", model_type=kind, defaults=_DEFAULTS)
    for name, kind in (("Roberta", "roberta"), ("XLMRoberta", "xlm-roberta"))
    for family in (
        OTHER._replace(architecture="Model", spec=_spec),
        OTHER._replace(architecture="ForMaskedLM", spec=_spec),
        OTHER._replace(
            architecture="ForSequenceClassification",
            spec=_sequence_spec,
            weights=_sequence_weights,
            serves=Serves.CLASSES,
        ),
        OTHER._replace(architecture="ForTokenClassification", spec=_token_spec, serves=Serves.TOKEN_CLASSES),
    )
) + (OTHER._replace(architecture="BgeM3EmbeddingModel", model_type="xlm-roberta", defaults=_DEFAULTS, spec=_m3_spec),)
