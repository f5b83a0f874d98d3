"""Flags of vLLM's that are environment variables here, and GPUs that workers alone see."""

import argparse
import os

import pytest

from meshlm.runtime.platforms import with_devices
from meshlm.supervisor.api.arguments import names, settings_of
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # is as before again after the test
        monkeypatch.delenv(name)


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return vars(parser.parse_args(words))


@pytest.mark.parametrize(("words", "token"), [(["--hf-token", "hf_x"], "hf_x"), (["--hf-token"], None)])
def test_the_token_of_the_hub(words: list[str], token: str | None) -> None:
    assert "hf_x" not in parse(*words).values(), "no setting has it, and so no file"
    assert os.environ.get("HF_TOKEN") == token


def test_both_are_arguments_of_llm() -> None:
    assert {"hf_token", "device_ids"} <= set(names())
    assert settings_of({"device_ids": [2, 0], "hf_token": True}) == {"device_ids": "2,0"}
    assert settings_of({"device_ids": ["GPU-a"], "hf_token": "t"}) == {"device_ids": "GPU-a"}
    assert (os.environ["HF_TOKEN"], "CUDA_VISIBLE_DEVICES" in os.environ) == ("t", False)
    with pytest.raises(ValueError, match="LLM: hf_token: must be a text"):
        settings_of({"hf_token": 5})


def test_gpus_by_number_count_those_that_are_visible() -> None:
    assert with_devices("", {"A": "b"}) == {"A": "b"}
    assert with_devices("3, 1", {}) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert with_devices("2,0", {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == {"CUDA_VISIBLE_DEVICES": "6,4"}
    assert with_devices("GPU-a,GPU-b", {"CUDA_VISIBLE_DEVICES": "4"}) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


@pytest.mark.parametrize("ids", ["1,1", "1,GPU-a", "1,,2", ",", "7"])
def test_what_they_cannot_be(ids: str) -> None:
    with pytest.raises(ValueError, match=f"--device-ids {ids}: "):
        with_devices(ids, {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_they_are_for_gpus() -> None:
    with pytest.raises(UsageError, match="--device-ids 1: it is for GPUs, not for --device fake"):
        resolve.resolve(flags.build({"device": "fake", "device_ids": "1"}, None))
