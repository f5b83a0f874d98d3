"""How the files of a TinyForCausalLM describe it. The supervisor reads this before a process starts, so torch is not imported."""

from typing import Any

from meshlm.architectures.dense import dense_spec
from meshlm.architectures.weights import transformer_weights
from meshlm.architectures.family import Family
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return dense_spec({**config, "num_hidden_layers": config["num_blocks"]}, architecture)


FAMILY = Family(
    architecture="TinyForCausalLM",
    model_type="tiny",
    spec=_spec,
    weights=transformer_weights,
    keys=frozenset({"num_blocks"}),
    model="meshlm_tiny.model:TinyDecoder",
)
