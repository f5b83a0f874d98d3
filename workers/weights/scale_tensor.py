"""What is known of a tensor that a quantised checkpoint has beside its plain ones, before it is read."""

from typing import NamedTuple

from meshlm.protocol.model import QuantizationScheme


class ScaleTensor(NamedTuple):
    """Scales of one weight, the scale of its inputs, or, where files hold several codes in a word, its codes themselves."""

    weight: str  # the weight's name
    parameter: str  # weight_scale, input_scale: of the layer that has the weight
    shapes: tuple[tuple[int, ...], ...]  # that the tensor may have
    scheme: QuantizationScheme
    types: tuple[str, ...] = ()  # that it may have, as safetensors writes them; empty: floats
    ordinal: int = 0  # which of the projections that are one product its weight is
    only_checked: bool = False  # no parameter takes it, and it may be missing
