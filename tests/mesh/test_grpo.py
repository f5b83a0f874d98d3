"""examples/grpo.py: twenty updates, after each of which the mesh's tokens are those of the trained model itself."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from changing_weights import greedy_of, write
from serving import serving
from split_models import FLAGS, PROMPTS, greedy

pytestmark = pytest.mark.mesh
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
UPDATES = 20


def example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(1200)
def test_twenty_updates_are_twenty_fresh_starts(tmp_path: Path) -> None:
    import transformers

    write(tmp_path, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    flags = (*FLAGS, "--server-dev-mode", "--weight-transfer-config", json.dumps({"backend": "ipc"}))
    differing = []
    with serving(str(tmp_path), *flags) as server:

        def on_update(number: int) -> None:
            if greedy(server, PROMPTS[:1]) != [greedy_of(model, PROMPTS[0])]:
                differing.append(number)
            if number == UPDATES // 2:  # the weights so far are in memory alone
                os.kill(server.pid("worker"), signal.SIGKILL)
                server.wait_for("ready")

        rewards = example().train(server.url, model, UPDATES, on_update)
        assert differing == []
        assert len(rewards) == UPDATES
        assert sum(rewards[-5:]) > sum(rewards[:5]), rewards
        after = greedy(server)
    model.save_pretrained(tmp_path)
    with serving(str(tmp_path), *FLAGS) as server:
        assert greedy(server) == after
