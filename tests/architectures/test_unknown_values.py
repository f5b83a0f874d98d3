"""A value that nobody knows is refused by its name: every text in the config.json of every family is made one in its turn."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family_models import config_of

from meshlm.architectures.family import Serves
from meshlm.architectures.registry import families
from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

Place = tuple[str | int, ...]
NAMES = [name for name, family in families().items() if family.serves is not Serves.TRANSCRIPTIONS]
FREE = frozenset(
    """
    _name_or_path transformers_version id2label init_device attn_impl summary_type time_step_init_scheme
    mtp_layers_block_type
    """.split()  # noqa: SIM905
)
"""Names, how transformers computes, how weights began, and layers that are not loaded."""
OF_HEADS = ("classifier_activation", "classifier_pooling", "problem_type")
UNKNOWN = "made-up"


def parsed(config: dict[str, Any]) -> ModelSpec:
    return parse_config(config, Path("model"))[0]


def texts(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all texts; of a list's the first."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from [(*place, key)] if isinstance(inner, str) else texts(inner, (*place, key))


def with_unknown(config: dict[str, Any], place: Place) -> dict[str, Any]:
    found = copy.deepcopy(config)
    inner: Any = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = UNKNOWN
    return found


def is_free(place: Place, spec: ModelSpec) -> bool:
    """Whether any text may stand there."""
    if not FREE.isdisjoint(map(str, place)):
        return True
    return (place[0] in OF_HEADS and spec.head is None) or place == ("attn_config", "model_type")


@pytest.mark.parametrize("architecture", NAMES)
def test_every_text_of_a_config(architecture: str) -> None:
    config = config_of(architecture)
    spec = parsed(config)
    places = [place for place in texts(config) if not is_free(place, spec)]
    assert len(places) >= 2, "architectures and model_type at least"
    for place in places:
        with pytest.raises(ModelFilesError, match=UNKNOWN):
            parsed(with_unknown(config, place))


@pytest.mark.parametrize("architecture", NAMES)
def test_keys_that_a_config_may_leave_out(architecture: str) -> None:
    config = config_of(architecture)
    spec = parsed(config)
    more: list[dict[str, Any]] = [{"dtype": UNKNOWN}, {"torch_dtype": UNKNOWN}]
    more.append({"layer_types": [UNKNOWN] * spec.num_hidden_layers})
    if spec.head is not None and architecture.endswith("ForSequenceClassification"):
        more.append({"problem_type": UNKNOWN})
    if spec.rope != RopeSpec(rope_theta=spec.rope.rope_theta) or _rotates(config, spec):
        more.append({"rope_scaling": {"type": UNKNOWN}})
    for keys in more:
        with pytest.raises(ModelFilesError, match=UNKNOWN):
            parsed({**config, **keys})


def _rotates(config: dict[str, Any], spec: ModelSpec) -> bool:
    """Whether the family reads how positions are turned."""
    try:
        return parsed({**config, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}) != spec
    except ModelFilesError:
        return True


def test_two_names_of_one_rotation_that_differ() -> None:
    config = {**config_of("LlamaForCausalLM"), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ModelFilesError, match="rope_type 'default' and type 'yarn' differ"):
        parsed({**config, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert parsed({**config, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}) == parsed(config)


def test_layers_of_one_kind() -> None:
    """Where nobody reads the kinds of layers, a window that a file asks for would be left out."""
    config = config_of("LlamaForCausalLM")
    layers = parsed(config).num_hidden_layers
    plain = parsed({**config, "layer_types": ["full_attention"] * layers})
    assert plain == parsed(config)
    kinds = ["full_attention", *["linear_attention"] * (layers - 1)]
    with pytest.raises(ModelFilesError, match="layer_types holds 'linear_attention' for layer 1"):
        parsed({**config, "layer_types": kinds})
    sliding = ["sliding_attention"] * layers
    with pytest.raises(ModelFilesError, match="sliding_window 4 with these layer_types is not supported"):
        parsed({**config, "layer_types": sliding, "sliding_window": 4})
    mistral = config_of("MistralForCausalLM")
    assert parsed({**mistral, "layer_types": sliding}) == parsed(mistral)
