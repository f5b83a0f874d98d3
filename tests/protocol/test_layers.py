"""The layers of a model: what is alike stands once, in memory and in messages."""

import msgspec
import pytest
from tiny_models import spec_of

from meshlm.architectures.layers import with_attention
from meshlm.protocol.layers import MLP, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec


def size(spec: ModelSpec) -> int:
    return len(msgspec.msgpack.encode(spec))


def test_a_layer_costs_a_byte_of_a_message_where_another_is_like_it() -> None:
    one, many = spec_of(), spec_of(num_hidden_layers=126)
    assert size(many) - size(one) <= 126 + 2
    sliding = with_attention(many, [bool(layer % 6) for layer in range(126)], sliding_window=512)
    assert len(sliding.layers.kinds) == 2
    assert size(sliding) - size(many) < 150
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sliding), type=ModelSpec) == sliding


def test_layers_are_read_by_number_and_one_after_the_other() -> None:
    records = [LayerSpec(mlp=MLP(intermediate_size=size)) for size in (8, 16, 8)]
    layers = Layers.from_records(records)
    assert (list(layers), len(layers), layers[1], layers.order) == (records, 3, records[1], (0, 1, 0))


@pytest.mark.parametrize(("count", "said"), [(0, "is 0; it must be positive"), (1 << 40, "it may be 8192 at most")])
def test_a_number_of_layers_that_no_model_has(count: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Layers.alike(LayerSpec(), count)
