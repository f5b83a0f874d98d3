"""A model whose gate and up projections are one kernel with the gate: the same states as unfused."""

import pytest
import torch
from small_models import BLOCK, CPU, batch_of, caches
from torch import Tensor

pytest.importorskip("triton")
from meshlm.kernels.gated import kernel
from meshlm.kernels.gated.kernel import Shape
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.layers.ops import Ops, TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.models.decoder import Decoder

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)

TILE = Shape(16, 16, 16, 4, 3)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Every such projection of 8 rows or more goes by kernels/gated; which weights did."""
    found: set[tuple[int, int]] = set()

    def shape_for(rows: int, outputs: int, inputs: int) -> Shape | None:
        if rows < 8:
            return None
        found.add((outputs, inputs))
        return TILE

    monkeypatch.setattr(kernel, "shape_for", shape_for)
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())  # weights stay as they are
    return found


def model_of(**settings: object) -> Decoder:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    spec = ModelSpec(architecture="LlamaForCausalLM", **sizes, **heads, **settings)  # type: ignore[arg-type]
    model = Decoder(spec, 64)
    model.prepare(CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def states(model: Decoder, ops: Ops, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """And what the caches hold afterwards."""
    parts = [([1 + n, *range(3, 2 + length)], 0, [n * 4 + k for k in range(4)]) for n, length in enumerate(lengths)]
    batch = batch_of(parts)
    model.ops, kv = ops, caches(model.spec, 4 * len(lengths))
    with torch.inference_mode():
        out: Tensor = model(batch, kv, TorchAttention(batch, BLOCK))
    return out, [lines for cache in kv for lines in (cache.keys, cache.values)]


@pytest.mark.parametrize("lengths", [[1, 1, 13], [5, 9, 7], [1, 1]])
@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        ({}, {(112, 32)}),
        ({"qk_norm": True, "sliding_window": 4}, {(112, 32)}),
        ({"hidden_act": "gelu_pytorch_tanh"}, set()),
        ({"output_bias": True, "mlp_bias": True, "attention_bias": True}, set()),
    ],
    ids=["plain", "window", "gelu", "biases"],
)
def test_the_same_states(
    used: set[tuple[int, int]], settings: dict[str, object], uses: set[tuple[int, int]], lengths: list[int]
) -> None:
    model = model_of(**settings)
    expected, expected_kv = states(model, TorchOps(), lengths)
    found, kv = states(model, TritonOps(), lengths)
    for ours, theirs in zip([found, *kv], [expected, *expected_kv], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert used == (uses if sum(lengths) >= 8 else set())
