"""Any causal decoder of the transformers library (--model-impl transformers), computed by transformers' own modules with our attention.

What such a model is, workers/models/transformers/look.py finds by looking at it, and not this module: its weights have no list here.
"""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures.family import Family, Weight
from meshlm.protocol.model import ModelSpec

ARCHITECTURE = "TransformersForCausalLM"


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    raise ValueError(
        f"architectures names {architecture}; name the model's own, --model-impl transformers does the rest"
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    """Transformers reads and checks them."""
    return iter(())


FAMILY = Family(
    architecture=ARCHITECTURE,
    model_type="",
    spec=_spec,
    weights=_weights,
    compiles=False,
    model="meshlm.workers.models.transformers.model:TransformersModel",
)
