"""A model by the kernels of --deterministic, in the interpreter: prompts whole, in chunks and token by token, alone and beside others.

As plain torch has it, in the caches too. To the last bit: tests/workers/cuda/test_invariance.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import BLOCK, CPU, batch_of, caches
from torch import Tensor
from two_layers import states, two_layers

pytest.importorskip("triton")
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.batch_invariant.attention import Workspace
from meshlm.workers.attention.invariant_backend import InvariantAttention, InvariantBackend
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.invariant_ops import InvariantOps
from meshlm.workers.layers.ops import TorchOps, make_invariant_ops
from meshlm.workers.models import decoder
from meshlm.workers.models.decoder import Decoder

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)

Parts = list[tuple[list[int], int, list[int]]]
LENGTH = 7


@pytest.fixture(autouse=True)
def weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())


def on_device(batch: StepInputs) -> StepInputs:
    """The same step with its requests in columns, as a GPU has them."""
    assert batch.lens is not None
    counts = torch.tensor([1] * batch.num_decodes + list(batch.lens.query_lens), dtype=torch.int32)
    starts = batch.lens.seq_lens.int() - counts
    (tables,) = batch.block_tables
    rows = torch.arange(len(counts), dtype=torch.int32)
    columns = Columns(rows, starts, counts.cumsum(0).int(), len(counts), tables.int())
    return replace(batch, columns=columns, block_tables=(tables.int(),))


def run(model: Decoder, kv: list[LayerCache], parts: Parts) -> Tensor:
    batch = on_device(batch_of(parts))
    with torch.inference_mode():
        found: Tensor = model(batch, kv, InvariantAttention(batch, BLOCK, Workspace(CPU)))
        return found


def part(n: int, start: int, end: int) -> tuple[list[int], int, list[int]]:
    """Tokens of request n, as `states` has them."""
    return [1 + n, *range(3, 2 + LENGTH)][start:end], start, [n * 4 + k for k in range(4)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sliding_window": 4},
        {"qk_norm": True, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["plain", "window", "qk norm", "biases"],
)
def test_a_model_in_steps_of_any_kind(settings: dict[str, Any]) -> None:
    model = two_layers(56, **settings)
    expected, expected_kv = states(model, TorchOps(), [LENGTH, LENGTH])
    model.ops = InvariantOps()
    ways: list[list[tuple[int, int]]] = [
        [(0, LENGTH)],
        [(0, 1), (1, 4), (4, 5), (5, LENGTH)],
        [(at, at + 1) for at in range(LENGTH)],
    ]
    for way in ways:
        kv, found = caches(model.spec, 8), list[Tensor]()
        run(model, kv, [part(1, 0, LENGTH)])
        for start, end in way:
            found.append(run(model, kv, [part(0, start, end)]))
        torch.testing.assert_close(torch.cat(found), expected[:LENGTH], atol=2e-4, rtol=2e-4)
        for ours, theirs in zip(
            [each for cache in kv for each in (cache.keys, cache.values)], expected_kv, strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    kv = caches(model.spec, 8)
    run(model, kv, [part(1, 0, 4)])
    both = run(model, kv, [part(1, 4, 5), part(0, 0, LENGTH)])  # a decode, then a prompt
    torch.testing.assert_close(both[1:], expected[:LENGTH], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(both[:1], expected[LENGTH + 4 : LENGTH + 5], atol=2e-4, rtol=2e-4)


def test_logits_into_a_buffer() -> None:
    ops, x, w = InvariantOps(), torch.randn(3, 32), torch.randn(50, 32)
    out = torch.empty(3, 50)
    assert ops.linear_into(x, w, out) is out
    torch.testing.assert_close(out, TorchOps().linear_into(x, w, torch.empty(3, 50)), atol=1e-5, rtol=1e-5)


def test_a_cpu_has_its_own() -> None:
    assert not isinstance(make_invariant_ops(CPU, torch.float32), InvariantOps)
    assert InvariantBackend().unsupported(two_layers(56).spec, CPU, torch.float32, 16) == "it needs a CUDA device"
