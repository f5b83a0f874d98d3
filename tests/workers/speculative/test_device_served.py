"""A scheduler with drafts of a GPU, which the interpreter computes: chunks, preemption, hits of the prefix cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from host_drafter import HostDrafter
from interpreted_engine import interpreter, made_alone
from served_engines import AGAIN, PROMPTS, Engines, made, served

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.device_verification import DeviceVerification

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

MOST = 3


class Knowing(HostDrafter):
    """Drafts what it knows to come, with a wrong token now and then."""

    def __init__(self, rows: DeviceRows, texts: list[list[int]]) -> None:
        super().__init__(rows, self.guesses)
        self._texts, self._turn, self.drafted = texts, 0, 0

    def guesses(self, row: int, known: list[int], count: int) -> list[int]:
        (text,) = {tuple(text) for text in self._texts if text[: len(known)] == known}
        self._turn, self.drafted = self._turn + 1, self.drafted + count
        ahead = np.resize(np.array(text[len(known) : len(known) + count] or [1], np.int32), count).tolist()
        if self._turn % 3 == 0:
            ahead[self._turn % count] = abs(ahead[self._turn % count] - 1)
        found: list[int] = ahead
        return found


def test_texts_are_those_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"num_hidden_layers": 1, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = made(("Qwen3Config", config), tmp_path)
    plainly = Engines(tmp_path, 64, "cpu")
    try:
        expected = served(plainly).tokens
    finally:
        plainly.close()
    assert expected == reference.greedy(expected)
    texts = [PROMPTS[min(handle, len(PROMPTS) - 1)] + tokens for handle, tokens in expected.items()]
    with interpreter():
        drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
        engines = Engines(tmp_path, 24, "auto", speculative=drafts, make_alone=made_alone)
        try:
            verification = engines.engines[0].verification
            assert isinstance(verification, DeviceVerification)
            knowing = verification.drafter = Knowing(engines.engines[0].rows, texts)
            bench = served(engines)
        finally:
            engines.close()
    assert bench.tokens == expected
    assert knowing.drafted > 50
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.cached[AGAIN[-1]] > 0, "nothing was found in the prefix cache"
