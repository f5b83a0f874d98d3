"""`meshlm bench serve` with the words of `vllm bench serve`, on a mesh with the fake device."""

import json
from pathlib import Path

import pytest
from serving import Serving

from meshlm.supervisor import cli

pytestmark = pytest.mark.mesh


def test_a_run_and_its_result(fake: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"bench serve --backend vllm --base-url {fake.url} --dataset-name random --random-input-len 8 "
        f"--random-output-len 4 --num-prompts 5 --ignore-eos --trust-remote-code --percentile-metrics ttft,tpot,itl,e2el "
        f"--save-result --result-dir {tmp_path} --result-filename found.json"
    )
    assert cli.run(words.split()) == 0
    assert "Median E2EL (ms)" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (5, 0, 20)


@pytest.mark.parametrize("words", ["--base-url https://x", "--base-url x:1", "--percentile-metrics speed"])
def test_what_it_cannot_do_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "serve", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err
