"""A model whose small products leave parts of sums, or are computed with gate: what receives them gets the same stream and states."""

import pytest
import torch
from small_models import BLOCK, CPU, batch_of, caches
from torch import Tensor

pytest.importorskip("triton")
from meshlm.kernels.few_rows.kernel import Shape
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.layers import triton_ops
from meshlm.workers.layers.ops import Ops, TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.models.decoder import Decoder

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)

SHAPE = Shape(16, 16, 16, 1, 4, 3)
USED = {"parts", "product", "gate"}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every product of 2 to 16 rows goes by kernels/few_rows; which of its uses were asked for and there."""
    found: set[str] = set()

    def shape_for(rows: int, outputs: int, inputs: int, use: str) -> Shape | None:
        if not 1 < rows <= 16:
            return None
        found.add(use)
        return SHAPE._replace(splits=2) if use == "parts" else SHAPE

    monkeypatch.setattr(triton_ops, "shape_for", shape_for)
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())  # weights stay as they are
    return found


def model_of(**settings: object) -> Decoder:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    spec = ModelSpec(architecture="LlamaForCausalLM", **sizes, **heads, **settings)  # type: ignore[arg-type]
    model = Decoder(spec, 64)
    model.prepare(CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def states(model: Decoder, ops: Ops, lengths: list[int]) -> Tensor:
    parts = [([1 + n, *range(3, 2 + length)], 0, [n * 4 + k for k in range(4)]) for n, length in enumerate(lengths)]
    batch = batch_of(parts)
    model.ops = ops
    with torch.inference_mode():
        out: Tensor = model(batch, caches(model.spec, 4 * len(lengths)), TorchAttention(batch, BLOCK))
    return out


@pytest.mark.parametrize("last", [True, False], ids=["last", "stage"])
@pytest.mark.parametrize("lengths", [[1, 1, 5], [1]])
@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        ({}, USED),
        ({"qk_norm": True, "sliding_window": 4}, USED),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"parts", "product"}),
        ({"output_bias": True, "mlp_bias": True, "attention_bias": True}, set()),
        ({"attention_bias": True}, {"parts", "gate"}),
    ],
    ids=["plain", "window", "gelu", "biases", "qkv-bias"],
)
def test_the_same_states(
    used: set[str], settings: dict[str, object], uses: set[str], lengths: list[int], last: bool
) -> None:
    """last: with the last norm, else the stream that the next stage of a pipeline takes."""
    model = model_of(**settings)
    if not last:
        model.norm = None
    expected = states(model, TorchOps(), lengths)
    found = states(model, TritonOps(), lengths)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert used == (uses if sum(lengths) > 1 else set())
