"""`bench throughput` and `bench latency` before a mesh is started: bad input is one line that names the flag."""

from pathlib import Path

import pytest

from meshlm.supervisor.cli import main


@pytest.mark.parametrize(
    "words",
    [
        *("throughput --num-prompts 0", "throughput --n 0", "throughput --input-len -1", "throughput --prefix-len -1"),
        *(
            "throughput --random-range-ratio 2",
            "throughput --output-json /dev/null/x",
            "latency --output-json /dev/null/x",
        ),
        *("throughput --dataset-path /dev/null/x", "latency --num-iters 0", "latency --batch-size 0", "latency --n 0"),
        *("latency --num-iters-warmup -1", "throughput --num-warmups -1"),
    ],
)
def test_bad_input(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"meshlm: error: {words.split()[1]}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("name", "flag"), [("sonnet", "--dataset-path"), ("random", "--dataset-path x")])
def test_a_data_set_and_its_file(name: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [] if name == "sonnet" else ["--dataset-path", "x"]
    assert main.run(["bench", "throughput", "--dataset-name", name, *words]) == 2
    assert capsys.readouterr().err.startswith(f"meshlm: error: {flag}: ")


@pytest.mark.parametrize("words", ["throughput --backend hf", "throughput --lora-path x", "latency --use-beam-search"])
def test_what_is_not_there(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.run(["bench", *words.split()])
    assert words.split()[1] in capsys.readouterr().err
