"""Adapters' products beyond their record (test_ops.py): whose token is whose, and what no adapter of a step may touch."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near

from meshlm.kernels.lora import reference
from meshlm.kernels.lora.kernel import add_adapters, in_order, token_slots
from meshlm.kernels.lora.layout import LayerPlaces, Memory, num_values, pack, wide_of
from meshlm.kernels.lora.op import BEFORE, memory_of, random_adapters
from meshlm.kernels.lora.self_test import LayerShape, results
from meshlm.kernels.self_test import why_wrong

pytestmark = MARKS


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_a_token_has_the_adapter_of_its_row() -> None:
    column = ints(0, 3, 1, 0, 2)
    rows, ends = ints(1, 0, 4, 3, 2), ints(2, 3, 3, 6, 70)
    found = token_slots(rows, ends, 5, column, 80)
    assert torch.equal(found, reference.token_slots(rows, ends, 5, column, 80))
    assert found.tolist() == [2, 2, -1, -1, -1, -1] + [0] * 64 + [-1] * 10
    assert token_slots(rows, ends, 2, column, 5).tolist() == [2, 2, -1, -1, -1], "padding has none"


def test_many_requests() -> None:
    torch.manual_seed(1)
    rows = torch.randperm(300, device=DEVICE).to(torch.int32)
    counts = torch.randint(0, 4, (300,), device=DEVICE)
    ends, column = counts.cumsum(0).to(torch.int32), torch.randint(0, 9, (300,), device=DEVICE).to(torch.int32)
    total = int(ends[-1]) + 3
    assert torch.equal(
        token_slots(rows, ends, 300, column, total), reference.token_slots(rows, ends, 300, column, total)
    )


def test_wide_ranks_are_split_in_equal_parts() -> None:
    assert {rank: wide_of(rank) for rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)} == {
        1: 16, 8: 16, 16: 16, 32: 32, 64: 64, 128: 128, 256: 256, 320: 320, 512: 512
    }  # fmt: skip


def test_an_adapter_takes_as_much_as_it_has() -> None:
    (adapter,) = random_adapters([[5, 0, 20]], 24, [7, 8, 9], torch.float32, torch.device("cpu"))
    packed = pack(adapter, 3, torch.float32)
    assert len(packed.values) == num_values(5, 24, 7) + num_values(20, 24, 9)
    assert packed.places[1].tolist() == [0, 0, 0]
    for which, rank in ((0, 16), (2, 32)):
        a, b, inner = packed.places[which].tolist()
        assert inner == rank
        assert a % 16 == b % 16 == 0
        pair = adapter[which]
        in_memory = packed.values[a : a + rank * 24].view(rank, 24), packed.values[b : b + len(pair.b) * rank]
        assert torch.equal(in_memory[0][: len(pair.a)], pair.a)
        assert torch.equal(in_memory[1].view(-1, rank)[:, : len(pair.a)], pair.b)
        assert not in_memory[0][len(pair.a) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_tokens_are_as_alone(dtype: torch.dtype) -> None:
    """Beside tokens with other adapters and without: the same numbers, to a rounding."""
    torch.manual_seed(2)
    slices = [(0, 40), (40, 73)]
    adapters = random_adapters([[8, 8], [24, 0], [0, 3]], 80, [40, 33], dtype, DEVICE)
    x, out = torch.randn(23, 80, device=DEVICE).to(dtype), torch.randn(23, 73, device=DEVICE).to(dtype)
    memory, layer = memory_of(adapters, 2, 32, x), LayerPlaces(BEFORE, slices, DEVICE)
    slots = torch.randint(-1, 3, (23,), device=DEVICE).to(torch.int32)
    found = add_adapters(x, out.clone(), layer, memory, in_order(slots, 3))
    for token in range(23):
        one = slice(token, token + 1)
        alone = add_adapters(x[one], out[one].clone(), layer, memory, in_order(slots[one], 3))
        near(found[one], alone, dtype)
    assert torch.equal(found[slots < 0], out[slots < 0])


def test_lines_may_be_strided() -> None:
    torch.manual_seed(3)
    adapters = random_adapters([[8]], 32, [24], torch.float32, DEVICE)
    wide, result = torch.randn(5, 50, device=DEVICE), torch.randn(5, 60, device=DEVICE)
    memory, layer = memory_of(adapters, 1, 8, wide), LayerPlaces(BEFORE, [(0, 24)], DEVICE)
    slots, before = ints(0, -1, 0, 0, -1), result.clone()
    expected = reference.add_adapters(wide[:, 3:35], result[:, 7:31], slots, adapters, [(0, 24)])
    add_adapters(wide[:, 3:35], result[:, 7:31], layer, memory, in_order(slots, 1))
    near(result[:, 7:31], expected, torch.float32)
    result[:, 7:31] = before[:, 7:31]
    assert torch.equal(result, before), "what is beside stays as it is"


SHAPES = [LayerShape(72, ((0, 40), (40, 56), (56, 72))), LayerShape(40, ((0, 130),))]


def test_the_self_test_finds_them_right() -> None:
    like = torch.empty(0, dtype=DTYPES[-1], device=DEVICE)
    assert why_wrong(results(SHAPES, 24, like)) == ""


def test_the_self_test_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlm.kernels.lora import self_test

    def off(x: torch.Tensor, out: torch.Tensor, layer: LayerPlaces, memory: Memory, step: object) -> torch.Tensor:
        return out

    monkeypatch.setattr(self_test, "add_adapters", off)
    like = torch.empty(0, dtype=torch.float16, device=DEVICE)
    assert "products of adapters with 72 inputs" in why_wrong(results(SHAPES, 24, like))
    monkeypatch.undo()
    monkeypatch.setattr(self_test, "token_slots", lambda *_: torch.full((_[-1],), 1, dtype=torch.int32, device=DEVICE))
    assert "tokens are those of other rows" in why_wrong(results(SHAPES, 24, like))
