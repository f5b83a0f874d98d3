"""The index of sparse attention against its reference: scores, the choice of tokens, and attention to those alone."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, WIDE, near

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.lightning_index import reference, self_test
from meshlm.kernels.lightning_index.kernel import index_scores, keep_keys, select
from meshlm.kernels.lightning_index.self_test import IndexShape, self_test_index
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.reference import absorbed_attention
from meshlm.kernels.mla.tiles import DecodeTile

pytestmark = MARKS
PAGE, RANK, ROTARY, DIM = 8, 40, 16, 48
LENGTHS = [1, 300, 0, 7, 64, 65, 129]


def paged(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cache, block tables, rows and lengths of queries; two of them are of one request."""
    torch.manual_seed(3)
    pages = -(-max(LENGTHS) // PAGE)
    tables = torch.randperm(len(LENGTHS) * pages, device=DEVICE).int().view(len(LENGTHS), pages)
    cache = torch.randn(tables.numel(), PAGE, RANK + ROTARY + DIM, device=DEVICE).to(dtype)
    rows = torch.tensor([4, 1, 0, 3, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    return cache, tables, rows, torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 32])
def test_scores(heads: int, dtype: torch.dtype) -> None:
    cache, tables, rows, lengths = paged(dtype)
    query = torch.randn(len(LENGTHS), heads, DIM, device=DEVICE).to(dtype)
    weights = torch.randn(len(LENGTHS), heads, device=DEVICE) * 0.02
    out = torch.full((len(LENGTHS), 320), -torch.inf, device=DEVICE)
    expected = reference.index_scores(query, weights, cache, RANK + ROTARY, tables, rows, lengths, 320)
    index_scores(query, weights, cache, RANK + ROTARY, tables, rows, lengths, out)
    near(out, expected, dtype, 4)


@pytest.mark.parametrize("kind", ["any", "equal", "few values", "negative"])
@pytest.mark.parametrize("topk", [16, 63])
def test_the_best_are_chosen(topk: int, kind: str) -> None:
    _, tables, rows, lengths = paged(torch.float32)
    scores = torch.randn(len(LENGTHS), 304, device=DEVICE)
    if kind == "equal":
        scores.fill_(-0.25)
    elif kind == "few values":
        scores = (scores * 2).round() / 4 + 0.0  # no zero with a sign, which would be less than the other one
    elif kind == "negative":
        scores = -((scores.abs() * 10) ** 3)
    chosen = torch.full((len(LENGTHS), topk), -7, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(len(LENGTHS), dtype=torch.int32, device=DEVICE)
    select(scores, tables, rows, lengths, PAGE, chosen, counts)
    expected = reference.select(scores, tables, rows, lengths, PAGE, topk)
    for nth, (length, slots) in enumerate(zip(LENGTHS, expected, strict=True)):
        if length:
            assert chosen[nth, : counts[nth]].tolist() == slots.tolist()
        else:
            assert (int(counts[nth]), int(chosen[nth, 0])) == (1, 0)
        assert (chosen[nth, counts[nth] :] == -7).all()


def test_keys_stand_behind_latents() -> None:
    cache = torch.zeros(3, PAGE, RANK + ROTARY + DIM, device=DEVICE)
    key = torch.randn(3, 2 * DIM, device=DEVICE)[:, :DIM]
    keep_keys(key, torch.tensor([9, -1, 0], device=DEVICE), cache, RANK + ROTARY)
    expected = torch.zeros_like(cache)
    expected[1, 1, RANK + ROTARY :], expected[0, 0, RANK + ROTARY :] = key[0], key[2]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_chosen_tokens(splits: int, dtype: torch.dtype) -> None:
    """Slots as pages of one token, in lines that go on behind the rotated key."""
    heads, topk, n = 5, 70, 3
    cache, *_ = paged(dtype)
    cache[..., RANK + ROTARY :] = torch.nan
    slots = cache.shape[0] * PAGE
    chosen = torch.stack([torch.randperm(slots, device=DEVICE)[:topk] for _ in range(n)]).int()
    counts = torch.tensor([70, 1, 33], dtype=torch.int32, device=DEVICE)
    tokens = torch.arange(n, dtype=torch.int32, device=DEVICE)
    at = Columns(tokens, counts - 1, tokens + 1, n, chosen)
    absorbed = torch.randn(n, heads, RANK, device=DEVICE).to(dtype)
    query = torch.randn(n, heads, 24 + ROTARY, device=DEVICE).to(dtype)
    workspace = (
        torch.empty(n * heads * splits * RANK, device=DEVICE),
        torch.empty(n * heads * splits * 2, device=DEVICE),
    )
    out = torch.empty_like(absorbed)
    lines = cache.view(slots, 1, -1)
    decode(absorbed, query, lines, at, 0.1, out, workspace, DecodeTile(splits, 16, 4, 2), ROTARY)
    expected, _ = absorbed_attention(absorbed, query[..., 24:], lines[..., : RANK + ROTARY], at, 0.1)
    near(out, expected, dtype, 2)


SHAPE = IndexShape(heads=3, rank=32, rotary=16, index_heads=4, index_dim=32, topk=24, page=8)


def test_right_kernels_are_used() -> None:
    assert self_test_index(SHAPE, WIDE, DEVICE) == ""


@pytest.mark.parametrize("kernel", ["index_scores", "select", "decode"])
def test_a_kernel_that_leaves_something_out_is_not_used(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(self_test, kernel)

    def wrong(*given: object, **named: object) -> None:
        right(*given, **named)
        out = given[{"index_scores": 7, "select": 5, "decode": 5}[kernel]]
        assert isinstance(out, torch.Tensor)
        out[0] = 0

    monkeypatch.setattr(self_test, kernel, wrong)
    said = {
        "index_scores": "scores of the index",
        "select": "the choice of tokens",
        "decode": "attention to chosen tokens",
    }
    assert self_test_index(SHAPE, WIDE, DEVICE).startswith(said[kernel])


def test_a_kernel_that_cannot_be_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(self_test, "select", fails)
    assert self_test_index(SHAPE, WIDE, DEVICE) == "RuntimeError: no such instruction"
