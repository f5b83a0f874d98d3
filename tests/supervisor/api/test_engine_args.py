"""Settings as an object: what `LLM` takes by keyword it takes so, too."""

import argparse
from dataclasses import asdict

import pytest

from meshlm.supervisor.api.arguments import AsyncEngineArgs, EngineArgs, settings_of


def test_a_field_for_each_setting_and_vllms_names() -> None:
    args = EngineArgs("m", max_model_len=512, api_server_count=2, enforce_eager=True, trust_remote_code=True)
    assert args.given() == {
        "model": "m",
        "max_model_len": 512,
        "api_server_count": 2,
        "enforce_eager": True,
        "trust_remote_code": True,
    }
    settings = {name: value for name, value in asdict(args).items() if name != "model"}
    assert settings_of(settings) == settings_of({name: settings[name] for name in args.given() if name != "model"})
    assert args == EngineArgs(**asdict(args))
    assert dict(**args) == args.given(), "as LLM(**args) reads it"


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs(max_model_length=3)
    with pytest.raises(ValueError, match=r"^LLM: default_mm_loras: "):
        EngineArgs(default_mm_loras={"image": "x"})
    EngineArgs(default_mm_loras={})


def test_from_the_flags_of_a_program() -> None:
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args(
        ["--model", "m", "--max-model-len", "1k", "--rounds", "3", "--no-enable-prefix-caching"]
    )
    found = AsyncEngineArgs.from_cli_args(arguments)
    assert found == AsyncEngineArgs("m", max_model_len=1000, enable_prefix_caching=False)
