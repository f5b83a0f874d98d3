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
        ({"full_cuda_graph": True}, {"cudagraph_mode": "FULL"}),
        ({"full_cuda_graph": False, "use_cudagraph": True}, {}),
        ({"use_cudagraph": False}, {"cudagraph_mode": "NONE"}),
        ({"compile_cache_save_format": "unpacked"}, {}),
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
        ({"mode": 0, "backend": "eager"}, "mode 0 compiles nothing, and --compile eager does; give one of them"),
        (2, "mode 2: there are"),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode SOME: there are NONE, PIECEWISE, FULL"),
        ({"full_cuda_graph": 1}, "full_cuda_graph 1: true or false"),
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


def test_what_is_not_done_as_vllm_does_it_is_said() -> None:
    """mode 3 compiled nothing, and PIECEWISE captured whole steps, without a word."""

    def said(given: Any = "", device: str = "cuda", **settings: Any) -> list[str]:
        text = json.dumps(given) if given != "" else ""
        config = MeshConfig(worker=WorkerConfig(compilation_config=text, **settings))
        return compilation.notes(compilation.settled(config), device)

    for given in (3, {"mode": 3}, {"level": "VLLM_COMPILE"}):
        assert said(given) == [
            "--compilation-config: mode 3: nothing is compiled, since MeshLM's fused kernels stand where vLLM compiles; "
            "--compile inductor is the setting"
        ]
    assert said(3, compile="inductor") == said(0) == said() == said(cudagraph_mode="FULL_DECODE_ONLY") == []
    for mode, text in (("PIECEWISE", "no step is captured in pieces"), ("FULL_AND_PIECEWISE", "it is taken as FULL")):
        assert said({"cudagraph_mode": mode})[0].startswith(f"cudagraph_mode {mode}: {text}")
    assert said(device="cpu", cudagraph_capture_sizes=(8,)) == [
        "cudagraph_capture_sizes has no effect: there are no CUDA graphs on --device cpu"
    ]


def test_eager_compiles_nothing() -> None:
    """As in vLLM; --compile inductor went on compiling."""
    asked = MeshConfig(worker=WorkerConfig(enforce_eager=True, compile="inductor"))
    found, (note,) = compilation.without_compiler(asked)
    assert found.worker.compile == "none"
    assert note.startswith("--enforce-eager: nothing is compiled, so --compile inductor has no effect")
    for other in (
        MeshConfig(worker=WorkerConfig(compile="inductor")),
        MeshConfig(worker=WorkerConfig(enforce_eager=True)),
    ):
        assert compilation.without_compiler(other) == (other, [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cudagraph_capture_sizes": (8, 64, 128, 512)}, []),
        ({"cudagraph_capture_sizes": (8, 100, 128)}, ["no step has a graph of 100 tokens"]),
        (
            {"cudagraph_capture_sizes": (8, 9999)},
            ["no step has a graph of 9999 tokens", "steps with prompts have no graph"],
        ),
        ({"cudagraph_capture_sizes": (256, 512)}, ["steps of decodes are padded to 256 tokens"]),
        ({"cudagraph_capture_sizes": (8, 16), "cudagraph_mode": "FULL_DECODE_ONLY"}, []),
        ({"cudagraph_capture_sizes": (9999,), "enforce_eager": True}, []),
    ],
)
def test_sizes_that_no_graph_has_are_said(settings: dict[str, Any], said: list[str]) -> None:
    found = compilation.check_sizes(WorkerConfig(**settings), 64, 2048)
    assert len(found) == len(said)
    for line, part in zip(found, said, strict=True):
        assert part in line


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_capture_sizes": (100,)},
        {"cudagraph_capture_sizes": (4096, 8192)},
        {"cudagraph_capture_sizes": (128,), "cudagraph_mode": "FULL_DECODE_ONLY"},
        {"cudagraph_capture_sizes": (8,), "cudagraph_mode": "PIECEWISE"},
        {"cudagraph_capture_sizes": (512,), "max_cudagraph_capture_size": 256},
    ],
)
def test_sizes_of_which_no_graph_can_be_made_end_the_start(settings: dict[str, Any]) -> None:
    """Those of the default were captured instead."""
    with pytest.raises(UsageError, match=r"--cudagraph-capture-sizes .*: none of these is the size of a graph"):
        compilation.check_sizes(WorkerConfig(**settings), 64, 2048)
