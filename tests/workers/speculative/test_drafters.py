"""Each method of --speculative-config has its drafter."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.speculative.drafters import drafter_of
from meshlm.workers.speculative.ngram import NgramDrafter
from meshlm.workers.speculative.suffix import SuffixDrafter


@pytest.mark.parametrize(("method", "kind"), [("ngram", NgramDrafter), ("suffix", SuffixDrafter)])
def test_a_method_without_a_model(method: str, kind: type) -> None:
    rows = SimpleNamespace(tokens=torch.zeros((2, 8), dtype=torch.int32))
    engine = SimpleNamespace(config=SimpleNamespace(speculative=SpeculativeConfig(method=method)), rows=rows)
    assert type(drafter_of(cast(ModelEngine, engine))) is kind
