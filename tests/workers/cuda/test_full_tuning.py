"""`--tune full` on a GPU: a start that measures whole steps too serves as one that measures nothing."""

import json
from pathlib import Path

import pytest
import torch

from meshlm.protocol.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of

from meshlm.kernels import tables
from meshlm.workers.cuda import tuning

pytestmark = pytest.mark.gpu


def test_a_start_that_measures_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FULL_S", 30.0)  # for what is measured before
    said: list[str] = []
    monkeypatch.setattr(tuning._log, "info", lambda text, **_: said.append(text))
    params, prompts = SamplingParams(max_tokens=16, temperature=0.0), prompts_of([70])
    seen = []
    for mode in ("off", "full"):
        made = engine(tmp_path, tune=mode, tuning_dir=str(tmp_path / "tuned"))
        driver = Driver(made, prompts, params)
        driver.step({0: 70})
        seen.append([driver.step({0: 1}) for _ in range(4)])
        del made, driver
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.06)
    assert "tiles of one row by whole steps" in said
    (table,) = (tmp_path / "tuned" / "gemv" / "tables").glob("*.json")
    assert json.loads(table.read_text())["products"]
    tables.forget(all_of_it=True)
