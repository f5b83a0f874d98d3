"""trl's own client against a mesh on the CPU: tests/clients/trl_updates.py. Its broadcasts go over gloo here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from changing_weights import greedy_of, versions, write
from serving import serving
from split_models import FLAGS
from waiting import free_port

pytestmark = pytest.mark.mesh
ROOT = Path(__file__).parents[2]
PROGRAM, TRL = ROOT / "tests" / "clients" / "trl_updates.py", ROOT / ".venv-trl"


def test_it_generates_scores_and_sends_weights(tmp_path: Path) -> None:
    import transformers

    if not TRL.is_dir():
        pytest.fail("trl is not there: `make setup` installs it")
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write(folder, seed)
    flags = (*FLAGS, "--server-dev-mode", "--weight-transfer-config", '{"backend": "gloo"}', "-tp", "2")
    models = [transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in folders]
    expected = [[greedy_of(model, prompt)[:8] for prompt in ([3, 10, 17, 24], [5, 6, 7])] for model in models]
    with serving(str(folders[0]), *flags, "--max-logprobs", "-1") as server:
        command = [sys.executable, str(PROGRAM), server.url, str(folders[1]), str(free_port())]
        environment = {**os.environ, "PYTHONPATH": str(TRL)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert told[:2] == expected
        assert told[2] == told[3] != told[1], "an update that is refused changes nothing"
        assert versions(server)[0] == "2"
