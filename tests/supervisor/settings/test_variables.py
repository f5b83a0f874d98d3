"""Flags of vLLM's that are environment variables here, on a command line and of LLM."""

import argparse
import os

import pytest

from meshlm.supervisor.api.arguments import names, settings_of
from meshlm.supervisor.cli import main
from meshlm.supervisor.settings import flags
from meshlm.supervisor.settings.variables import SETTERS
from meshlm.supervisor.settings.vllm_table import VARIABLES


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES.values():
        monkeypatch.setenv(name, "")  # is as before again after the test
        monkeypatch.delenv(name)


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return vars(parser.parse_args(words))


def test_each_has_its_setter_and_is_an_argument_of_llm() -> None:
    assert SETTERS.keys() == VARIABLES.keys()
    assert {"hf_token", "device_ids"} <= set(names())


@pytest.mark.parametrize(("words", "token"), [(["--hf-token", "hf_x"], "hf_x"), (["--hf-token"], None)])
def test_the_token_of_the_hub(words: list[str], token: str | None) -> None:
    assert "hf_x" not in parse(*words).values(), "no setting has it, and so no file"
    assert os.environ.get("HF_TOKEN") == token


def test_gpus_by_number_count_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    parse("--device-ids", "3, 1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert settings_of({"device_ids": [2, 0], "hf_token": True}) == {}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,4"
    assert settings_of({"device_ids": ["GPU-a", "GPU-b"], "hf_token": "t"}) == {}
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HF_TOKEN"]) == ("GPU-a,GPU-b", "t")


@pytest.mark.parametrize("value", ["", "1,1", "1,GPU-a", "1,,2", "7"])
def test_what_they_cannot_be(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(SystemExit, match="2"):
        main.run(["serve", "--device", "fake", "--device-ids", value])
    assert "--device-ids: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="LLM: device_ids: "):
        settings_of({"device_ids": value})
    with pytest.raises(ValueError, match="LLM: hf_token: must be a token"):
        settings_of({"hf_token": 5})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
