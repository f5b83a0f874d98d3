"""The environment of `vllm serve`, and the keys of the API: none is dropped, an empty one opens nothing."""

import argparse
from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.supervisor.cli import serve
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, vllm_env
from meshlm.supervisor.settings.config_file import expand

OLDER = {
    "VLLM_ATTENTION_BACKEND",
    "VLLM_TORCH_CUDA_PROFILE",
    "VLLM_TORCH_PROFILER_DIR",
    "VLLM_USE_V1",
}  # of versions before 0.26


def parsed(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return vars(parser.parse_args(words))


def keys(monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...] = (), **environment: str) -> tuple[str, ...]:
    for name in vllm_env.API_KEYS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return serve.with_keys(MeshConfig(server=ServerConfig(api_key=given))).server.api_key


def test_vllms_key_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys(monkeypatch) == ()
    assert keys(monkeypatch, VLLM_API_KEY="theirs") == ("theirs",)
    assert keys(monkeypatch, VLLM_API_KEY="theirs", MESHLM_API_KEY="ours") == ("ours",)
    assert keys(monkeypatch, ("flag",), VLLM_API_KEY="theirs", MESHLM_API_KEY="ours") == ("flag",)


@pytest.mark.parametrize("key", ["", " a", "a\n", "a\x1bb"])
def test_a_key_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        keys(monkeypatch, ("good", key))
    for name in vllm_env.API_KEYS:
        with pytest.raises(UsageError, match=name):
            keys(monkeypatch, (), **{name: key})


def test_a_repeated_flag_adds_a_key(tmp_path: Path) -> None:
    words = ("--api-key", "a", "b", "--port", "9000", "--api-key", "c")
    assert flags.build(parsed(*words), None).server.api_key == ("a", "b", "c")
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: [old]\nport: 9001\n")
    typed = tuple(expand(["serve", "--config", str(file), "--api-key", "new"])[1:])
    config = flags.build(parsed(*typed), None)
    assert (config.server.api_key, config.server.port) == (("new",), 9001), "what is typed wins over the file"


def test_what_means_the_same_is_honoured_below_flags_and_files(tmp_path: Path) -> None:
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": "77",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "88",
        "VLLM_TORCH_PROFILER_DIR": "/traces",
    }
    found = vllm_env.settings_of(environment)
    config = flags.build({}, None, found)
    assert (config.run.log_level, config.run.startup_timeout, config.run.step_timeout) == ("warning", 77.0, 88.0)
    assert config.worker.profiler_dir == "/traces"
    file = tmp_path / "mesh.toml"
    file.write_text("startup-timeout = 5.0\nstep-timeout = 6.0\n")
    run = flags.build({"step_timeout": 7.0}, str(file), found).run
    assert (run.startup_timeout, run.step_timeout) == (5.0, 7.0)
    with pytest.raises(UsageError, match="VLLM_ENGINE_READY_TIMEOUT_S=soon"):
        vllm_env.settings_of({"VLLM_ENGINE_READY_TIMEOUT_S": "soon"})
    with pytest.raises(UsageError, match="VLLM_LOGGING_LEVEL=loud: one of debug, info, warning, error"):
        vllm_env.settings_of({"VLLM_LOGGING_LEVEL": "loud"})


def test_what_has_no_effect_is_named_in_one_line() -> None:
    environment = {
        "VLLM_USE_MODELSCOPE": "True",
        "VLLM_GC_DEBUG": "1",
        "VLLM_API_KEY": "k",
        "VLLM_DO_NOT_TRACK": "1",
        "A": "",
    }
    line = vllm_env.without_effect(environment)
    assert line == (
        "set in the environment and without effect: VLLM_GC_DEBUG, VLLM_USE_MODELSCOPE=True (models come from the Hugging Face hub)"
    )
    assert vllm_env.without_effect({"VLLM_API_KEY": "k", "VLLM_NO_USAGE_STATS": "1"}) == ""


def test_what_kubernetes_sets_for_a_service_is_not_vllms() -> None:
    names = ("VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT", "VLLM_ROUTER_SERVICE_PORT_HTTP", "VLLM_PORT_8000_TCP_ADDR")
    environment = {**dict.fromkeys(names, "10.0.0.1"), "VLLM_PORT": "tcp://10.0.0.1:8000"}
    assert vllm_env.without_effect(environment) == ""
    assert "VLLM_PORT (--mesh-port-range)" in vllm_env.without_effect({"VLLM_PORT": "8000"})


def test_the_table_names_variables_that_there_are() -> None:
    """The list is of vLLM 0.26."""
    names = set((Path(__file__).parents[1] / "vllm_env_names.txt").read_text().split())
    tables = (vllm_env.HONOURED, vllm_env.FULFILLED, vllm_env.INSTEAD, ("VLLM_API_KEY",))
    listed = [name for table in tables for name in table]
    assert set(listed) - names <= OLDER
    assert len(listed) == len(set(listed)), "each has one answer"
    line = vllm_env.without_effect(dict.fromkeys(names, "neither"))
    silent = {name for name, (values, _) in vllm_env.FULFILLED.items() if not values}
    silent |= {*vllm_env.HONOURED, "VLLM_API_KEY"}
    assert {name for name in names if f" {name}" not in line} == names & silent


def test_the_document_names_what_is_honoured() -> None:
    text = (Path(__file__).parents[3] / "docs" / "from-vllm.md").read_text("utf-8")
    assert [name for name in vllm_env.HONOURED if f"`{name}" not in text] == []


@pytest.mark.parametrize(
    ("asks", "text"),
    [
        (
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 (every part is a process of its own)",
        ),
        (
            {"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
            "VLLM_WORKER_MULTIPROC_METHOD=fork (processes are programs of their",
        ),
        ({"VLLM_USE_V1": "0"}, "VLLM_USE_V1=0 (there is one engine)"),
        ({"VLLM_NO_USAGE_STATS": "0"}, "VLLM_NO_USAGE_STATS=0 (nothing is collected or sent)"),
        ({"VLLM_CONFIGURE_LOGGING": "0"}, "VLLM_CONFIGURE_LOGGING=0 (--log-level and --log-format)"),
    ],
)
def test_a_value_that_is_not_the_case_is_named(asks: dict[str, str], text: str) -> None:
    """It was taken for what is the case, whatever it said."""
    assert text in vllm_env.without_effect(asks)


def test_a_value_that_asks_for_what_is_the_case_is_not_named() -> None:
    for name, (values, _) in vllm_env.FULFILLED.items():
        for value in ("", *values, *(value.title() for value in values)):
            assert vllm_env.without_effect({name: value}) == "", (name, value)


def test_a_property_of_answers_is_asked_for_by_a_variable() -> None:
    """Where it is not proven the start ends, as with the flag (test_determinism.py)."""
    assert vllm_env.settings_of({"VLLM_BATCH_INVARIANT": "1"}) == {"deterministic": True}
    assert vllm_env.settings_of({"VLLM_BATCH_INVARIANT": "0"}) == {"deterministic": False}
    with pytest.raises(UsageError, match="VLLM_BATCH_INVARIANT=yes: 0 or 1 is expected"):
        vllm_env.settings_of({"VLLM_BATCH_INVARIANT": "yes"})


@pytest.mark.parametrize("words", [("m\udcff",), ("--served-model-name", "a", "\udcff"), ("--run-dir", "\udcff")])
def test_bytes_that_are_no_text_are_refused(words: tuple[str, ...]) -> None:
    """The command line has them as halves of characters, which JSON cannot carry to the processes."""
    with pytest.raises(UsageError, match="must be UTF-8"):
        flags.build(parsed(*words), None)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_flag_takes_no_number_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"--fake-step-ms {text}: must be a finite number"):
        flags.build(parsed("--fake-step-ms", text), None)
