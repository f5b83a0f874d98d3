"""Flags and TOML: one setting, one name, one message."""

import argparse
from pathlib import Path
from typing import Literal, get_origin

import pytest

from meshlm.supervisor.cli import main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return parser.parse_args(words)


def test_vllm_names() -> None:
    config = flags.build(
        vars(parse("m", "--max-model-len", "100", "--no-enable-prefix-caching", "-tp", "2", "--kv-cache-memory", "2G")),
        None,
    )
    assert config.model.model == "m"
    assert config.model.max_model_len == 100
    assert config.cache.enable_prefix_caching is False
    assert config.cache.kv_cache_memory == 2 << 30
    assert config.parallel.tensor_parallel_size == 2


def test_every_number_can_be_given() -> None:
    """A type that argparse cannot make of a word would refuse all that is given."""
    numbers = [setting for setting in flags.settings() if setting.kind in (int, float)]
    for setting in numbers:
        assert vars(parse(setting.flag, "8"))[setting.name] == 8, setting.flag
    assert len(numbers) > 50
    kinds = {
        setting.kind if isinstance(setting.kind, type) else get_origin(setting.kind) for setting in flags.settings()
    }
    assert kinds <= {bool, int, float, str, Literal, tuple}, kinds


def test_several_of_a_choice() -> None:
    assert flags.build(vars(parse("--standby-roles", "scheduler", "worker")), None).run.standby_roles == (
        "scheduler",
        "worker",
    )


def test_flags_win_over_toml(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('port = 9000\nmax-num-seqs = 7\nmax-model-len = "32k"\n[cache]\nkv-cache-memory = "1G"\n')
    config = flags.build(vars(parse("--port", "9001")), str(file))
    assert (config.server.port, config.scheduler.max_num_seqs, config.cache.kv_cache_memory) == (9001, 7, 1 << 30)
    assert config.model.max_model_len == 32000


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"port": 70000}, "--port"),
        ({"max_model_len": -2}, "--max-model-len"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"dtype": "int3"}, "--dtype"),
        ({"standby_roles": ["cat"]}, "--standby-roles"),
    ],
)
def test_a_bad_value_names_its_flag(values: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        flags.build(values, None)


def test_an_unknown_key_gets_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("max-model-lenn = 3")
    with pytest.raises(UsageError, match="did you mean max-model-len"):
        flags.build({}, str(file))


@pytest.mark.parametrize(
    "words", [["serve", "--port", "x"], ["nonsense"], ["serve", "--dtype", "int3"], ["serve", "--standby-roles", "cat"]]
)
def test_usage_errors_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(words)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("model", ["/nowhere/at/all", "nowhere.gguf"])
def test_a_missing_model_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", model, "--port", "18999"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "no such file" in lines[0]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.run(["--help"])
    text = capsys.readouterr().out
    for command in ("serve", "launch", "scale", "status", "bench", "chat", "collect-env"):
        assert command in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("status", "--served-model-name", "m"),
            "--served-model-name is of `meshlm serve`; meshlm status takes --help, --json, ",
        ),
        (("status", "--served_model_name=m"), "--served-model-name is of `meshlm serve`"),
        (
            ("bench", "serve", "--kv-cache-dtype", "fp8"),
            "--kv-cache-dtype is of `meshlm serve`; meshlm bench serve takes ",
        ),
        (("status", "--jsn"), "unknown argument --jsn; did you mean --json?"),
        (("status", "--max-model-lenn"), "unknown argument --max-model-lenn (see meshlm status --help)"),
        (("serve", "--max-model-lenn", "5"), "unknown argument --max-model-lenn; did you mean --max-model-len?"),
    ],
)
def test_a_flag_of_another_command_is_no_misspelling(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.run(list(words))
    assert said in capsys.readouterr().err
