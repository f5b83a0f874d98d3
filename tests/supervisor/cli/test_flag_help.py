"""--help=WORD shows the flags that are meant, and nothing else."""

import pytest

from meshlm.supervisor.cli import main


@pytest.mark.parametrize(
    ("word", "shown", "not_shown"),
    [
        ("max", "--max-num-seqs", "--host"),
        ("--max-model-len", "--max-model-len", "--max-num-seqs"),
        ("max_model_len", "--max-model-len", "--max-num-seqs"),
        ("ModelConfig", "--served-model-name", "--host"),
        ("Frontend", "--host", "--served-model-name"),
        ("LoadConfig", "--load-format", "--host"),
        ("server", "--host", "--served-model-name"),
        ("listgroup", "scheduler, worker", "--host"),
        ("nonsense", "no flag speaks of 'nonsense'", "--host"),
    ],
)
def test_a_word(word: str, shown: str, not_shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", f"--help={word}"]) == 0
    said = capsys.readouterr().out
    assert shown in said
    assert not_shown not in said


def test_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.run(["serve", "--help=all"])
    assert "usage: " in capsys.readouterr().out
