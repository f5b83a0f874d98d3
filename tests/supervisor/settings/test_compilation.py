"""--compilation-config: vLLM's keys that have settings here, those that ask for what is the case, and those that are refused."""

import json
from typing import Any

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.engine import WorkerConfig
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.cli import main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import compilation, flags


def settled(given: Any, **settings: Any) -> WorkerConfig:
    text = given if isinstance(given, str) else json.dumps(given)
    return compilation.settled(MeshConfig(worker=WorkerConfig(compilation_config=text, **settings))).worker


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"cudagraph_mode": "full_decode_only"}, {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        ({"cudagraph_capture_sizes": [8, 1, 8]}, {"cudagraph_capture_sizes": (1, 8)}),
        ({"max_cudagraph_capture_size": 64}, {"max_cudagraph_capture_size": 64}),
        ({"mode": 3, "level": None, "custom_ops": [], "pass_config": {}}, {}),
        (3, {}),
        ({"mode": "none"}, {}),
        ({"backend": "eager"}, {"compile": "eager"}),
        ({"backend": "inductor", "splitting_ops": None}, {}),
        ({"dynamic_shapes_config": {"type": "unbacked"}}, {"compile_dynamic_shapes": "unbacked"}),
        ({"cudagraph_mode": None, "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None}, {}),
    ],
)
def test_what_means_the_same_is_taken(given: Any, changes: dict[str, Any]) -> None:
    found, default = settled(given), WorkerConfig()
    for name in WorkerConfig.__struct_fields__:
        if name != "compilation_config":
            assert getattr(found, name) == changes.get(name, getattr(default, name)), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "--compilation-config {: "),
        ("[]", "a JSON object is expected"),
        ("true", "a JSON object is expected"),
        ({"mode": 1}, "mode 1: there are 0 .NONE. and 3 .VLLM_COMPILE."),
        ({"mode": True}, "mode True: there are"),
        (2, "mode 2: there are"),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode SOME: there are NONE, PIECEWISE, FULL"),
        ({"cudagraph_capture_sizes": []}, "a list of numbers from 1 up"),
        ({"cudagraph_capture_sizes": [0]}, "a list of numbers from 1 up"),
        ({"max_cudagraph_capture_size": "x"}, "a number from 1 up"),
        ({"compile_sizes": [1, 2]}, r"compile_sizes \[1, 2\]: --compile inductor has one function"),
        ({"splitting_ops": []}, r"splitting_ops \[\]: steps are captured whole"),
        ({"pass_config": {"fuse_norm_quant": True}}, "pass_config .*: what can be fused"),
        ({"dynamic_shapes_config": {"type": "some"}}, "type some: there are backed, unbacked"),
        ({"dynamic_shapes_config": {"evaluate_guards": True}}, "is expected"),
        ({"backend": "openxla"}, "backend .openxla.: there are inductor and eager"),
        ({"cudagraph_mod": "FULL"}, "unknown key cudagraph_mod; did you mean cudagraph_mode?"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        settled(given)
    assert "\n" not in str(refused.value)


def test_a_flag_and_a_key_may_not_differ() -> None:
    assert settled({"cudagraph_mode": "NONE"}, cudagraph_mode="NONE").cudagraph_mode == "NONE"
    with pytest.raises(UsageError, match="is not what --cudagraph-mode says; give one of them"):
        settled({"cudagraph_mode": "PIECEWISE"}, cudagraph_mode="NONE")


def test_all_ways_to_write_it() -> None:
    """As vLLM's command line and `LLM` take it."""
    import argparse

    from meshlm.supervisor.settings.vllm_flags import with_json

    for words in (
        ["-cc", '{"cudagraph_mode": "NONE"}'],
        ["--compilation-config", '{"cudagraph_mode": "NONE"}'],
        ["-cc.cudagraph_mode=NONE"],
        ["--compilation-config.cudagraph_mode", "NONE"],
    ):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        flags.add_flags(parser)
        config = flags.build(vars(parser.parse_args(with_json(["m", *words]))), None)
        assert compilation.settled(config).worker.cudagraph_mode == "NONE", words
    given = settings_of({"compilation_config": {"cudagraph_mode": "NONE"}, "max_cudagraph_capture_size": 8})
    worker = compilation.settled(flags.build(given, None)).worker
    assert (worker.cudagraph_mode, worker.max_cudagraph_capture_size) == ("NONE", 8)


def test_every_key_of_vllm_is_known_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", "nowhere", "-cc.splitting_ops", "[]"]) == 2
    assert "--compilation-config: splitting_ops []: " in capsys.readouterr().err
