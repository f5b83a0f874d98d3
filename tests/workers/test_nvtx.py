"""Ranges around layers: each is closed by whoever opened it, also where a layer fails."""

import pytest
import torch
from tiny_models import spec_of
from torch import Tensor, nn

from meshlm.workers.models.decoder import Decoder
from meshlm.workers.nvtx import mark_layers


class Ranges:
    """Opened and closed, as a tree of names."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(self.attention(x))
        return found


def model() -> Decoder:
    spec = spec_of(
        architecture="Qwen3ForCausalLM", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=8,
    )  # fmt: skip
    return Decoder(spec, 8)


def test_layers_and_their_parts_have_ranges() -> None:
    made, ranges = model(), Ranges()
    made.layers = nn.ModuleList([Layer(), Layer()])
    assert mark_layers(made, ranges.push, ranges.pop) == 7
    for layer in made.layers:
        layer(torch.zeros(1, 2))
    of_layer = [name for number in range(2) for name in (
        f"layers.{number} (Layer)",
        f"layers.{number} (Layer)/layers.{number}.attention (Linear)",
        f"layers.{number} (Layer)/layers.{number}.mlp (Linear)",
    )]  # fmt: skip
    assert ranges.seen == of_layer
    assert not ranges.open


def test_a_layer_that_fails_closes_its_ranges() -> None:
    made, ranges = model(), Ranges()
    made.layers = nn.ModuleList([Layer()])
    mark_layers(made, ranges.push, ranges.pop)
    with pytest.raises(RuntimeError):
        made.layers[0](torch.zeros(1, 3))
    assert len(ranges.seen) == 2
    assert not ranges.open


def test_the_layers_of_a_real_model_are_marked() -> None:
    made, ranges = model(), Ranges()
    mark_layers(made, ranges.push, ranges.pop)
    with pytest.raises(TypeError):
        made()  # the model itself has a range too
    assert ranges.seen == ["Decoder"]
    assert not ranges.open
