"""`meshlm bench serve` with the words of `vllm bench serve`, on a mesh with the fake device."""

import json
from pathlib import Path

import pytest
from serving import Serving

from meshlm.supervisor.cli import main

pytestmark = pytest.mark.mesh


def test_a_run_and_its_result(fake: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"bench serve --backend vllm --base-url {fake.url} --dataset-name random --random-input-len 8 "
        f"--random-output-len 4 --num-prompts 5 --ignore-eos --trust-remote-code --percentile-metrics ttft,tpot,itl,e2el "
        f"--save-result --result-dir {tmp_path} --result-filename found.json"
    )
    assert main.run(words.split()) == 0
    assert "Median E2EL (ms)" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (5, 0, 20)


def test_texts_are_counted_by_the_mesh_itself(
    fake: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poem.txt").write_text("Shall I compare thee to a summer's day?\n" * 20)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hello", "output_tokens": 3}\n')
    for words in (
        f"--dataset-name sonnet --dataset-path {tmp_path / 'poem.txt'} --output-len 3",
        f"--dataset-name custom --dataset-path {tmp_path / 'mine.jsonl'} --custom-output-len -1",
        "--backend openai-chat --random-input-len 9 --random-output-len 3",
    ):
        saved = f"--save-result --result-dir {tmp_path} --result-filename found.json"
        line = f"bench serve --base-url {fake.url} --num-prompts 3 --ignore-eos {saved} {words}"
        assert main.run(line.split()) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        assert (found["completed"], found["total_output_tokens"]) == (3, 9), capsys.readouterr().out


@pytest.mark.parametrize("words", ["--base-url x:1", "--percentile-metrics speed"])
def test_what_it_cannot_do_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "serve", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err


def test_starts_are_of_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What keeps one from starting is told as by any command."""
    counts = "--num-iters-cold 1 --num-iters-warmup 0 --num-iters-warm 1"
    line = f"bench startup --device fake {counts} --output-json {tmp_path / 'found.json'}"
    assert main.run(line.split()) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["avg_cold_startup_time"] < 60
    assert 0 < found["avg_warm_startup_time"] < 60
    capfd.readouterr()
    assert main.run(["bench", "startup", "--model", str(tmp_path / "none")]) == 2
    assert capfd.readouterr().err == f"meshlm: error: MODEL {tmp_path / 'none'}: no such file or folder\n"
