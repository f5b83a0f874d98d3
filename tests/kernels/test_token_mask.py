"""Masks of grammars against their reference."""

import numpy as np
import pytest
import torch
from device import DEVICE, DTYPES, MARKS

from meshlm.kernels.token_mask import kernel, reference

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "vocab", "block"), [(1, 1, 64), (3, 31, 64), (5, 64, 64), (4, 101, 32), (7, 1000, 256)]
)
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int, vocab: int, block: int
) -> None:
    """Some lines have a mask; words may be longer than the vocabulary, and lines further apart than they are long."""
    monkeypatch.setattr(kernel, "BLOCK", block)
    dice = np.random.default_rng(vocab)
    words = dice.integers(-(1 << 31), 1 << 31, (count, vocab // 32 + 2)).astype(np.int32)
    words[0, 0] = -1
    lines = [-1 if line % 3 == 1 else (line * 2) % count for line in range(count)]
    whole = torch.randn(count, vocab + 3, device=DEVICE).to(dtype)
    expected = reference.token_mask(whole[:, :vocab], lines, words.tolist())
    beside = whole[:, vocab:].clone()
    kernel.token_mask(
        whole[:, :vocab], torch.tensor(lines, dtype=torch.int32, device=DEVICE), torch.from_numpy(words).to(DEVICE)
    )
    assert torch.equal(whole[:, :vocab], expected)
    assert torch.equal(whole[:, vocab:], beside)


def test_a_new_workspace_masks_nothing() -> None:
    logits = torch.randn(3, 70, device=DEVICE)
    before = logits.clone()
    kernel.token_mask(logits, *kernel.workspace(3, 70, torch.device(DEVICE)))
    assert torch.equal(logits, before)
