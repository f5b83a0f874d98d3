"""--config FILE.yaml means what the same words on the command line do, and those that are typed win."""

import argparse
from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.cli import main
from meshlm.supervisor.settings import config_file, flags

YAML = """\
model: of-the-file
port: 9000
max_model_len: 32k
served-model-name: [a, b]
enforce-eager: true
enable-prefix-caching: false
api-server-count: 3
trust-remote-code: true
enable-lora: false
allowed-origins: ["https://a.example"]
override-generation-config: {temperature: 0.5}
tokenizer: null
"""


def config_of(*words: str) -> MeshConfig:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return flags.build(vars(parser.parse_args(config_file.expand(("serve", *words))[1:])), None)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "meshlm.yaml"
    path.write_text(YAML)
    return str(path)


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_yaml_file_is_words(file: str, form: str) -> None:
    config = config_of(*(["--config", file] if form == "two words" else [f"--config={file}"]))
    assert (config.model.model, config.server.port, config.model.max_model_len) == ("of-the-file", 9000, 32000)
    assert (config.model.served_model_name, config.server.frontends) == (("a", "b"), 3)
    assert (config.worker.enforce_eager, config.cache.enable_prefix_caching) == (True, False)
    assert config.server.allowed_origins == ("https://a.example",)
    assert config.model.override_generation_config == '{"temperature": 0.5}'


def test_what_is_typed_wins(file: str) -> None:
    config = config_of("typed", "--port", "9001", "--config", file)
    assert (config.model.model, config.server.port) == ("typed", 9001)


@pytest.mark.parametrize(("text", "said"), [("a: [", "--config"), ("- a", "must be settings"), ("modle: x", "--modle")])
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "bad.yml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main.main(["serve", "--config", str(path)])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert said in error


def test_other_files_are_left_alone() -> None:
    assert config_file.expand(["serve", "--config", "a.toml"]) == ["serve", "--config", "a.toml"]
    assert config_file.expand(["serve", "--config"]) == ["serve", "--config"]
