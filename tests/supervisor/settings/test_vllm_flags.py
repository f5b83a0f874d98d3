"""A command line for vLLM works, or says in one line what to write instead; and docs/from-vllm.md says the same."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.cli import main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, sizes, vllm_flags
from meshlm.supervisor.settings import vllm_table as table

DOCS = Path(__file__).parents[3] / "docs" / "from-vllm.md"
NAMES = json.loads(
    (Path(__file__).parents[1] / "vllm_0_26_flags.json").read_text("utf-8")
)  # by command, all of vLLM 0.26


def config_of(*words: str) -> MeshConfig:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return flags.build(vars(parser.parse_args(words)), None)


def test_the_command_that_the_targets_were_measured_with() -> None:
    config = config_of(
        *("m", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096"),
        *("--attention-backend", "FLASH_ATTN", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    )
    assert config.model.model == "m"
    assert config.worker.attention_backend == "auto"


@pytest.mark.parametrize(("flag", "count"), [(flag, count) for flag, (count, _) in table.NEEDLESS.items()])
def test_what_is_not_needed_is_said_and_changes_nothing(
    flag: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_of("m", flag, *["x"] * count, "--port", "9") == config_of("m", "--port", "9")
    assert f"{flag} is not needed: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", table.ABSENT)
def test_what_is_absent_is_refused_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.run(["serve", flag, "x"])
    said = capsys.readouterr().err
    assert said.startswith(f"meshlm serve: error: {flag}: {table.ABSENT[flag]}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("flag", table.ONLY)
def test_what_has_one_meaning_is_taken_with_it_alone(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    allowed, why = table.ONLY[flag]
    for value in allowed:
        assert config_of("m", flag, value) == config_of("m")
        assert capsys.readouterr().err == (f"meshlm: {flag} {value}: {why}\n" if flag in table.SAID else "")
    with pytest.raises(SystemExit, match="2"):
        main.run(["serve", flag, "other"])
    assert capsys.readouterr().err.startswith(f"meshlm serve: error: {flag} other: {why}")


def test_images_are_asked_for_as_there() -> None:
    asks = '{"image": 2, "video": {"count": 1, "num_frames": 8}}'
    media = config_of("m", "--limit-mm-per-prompt", asks, "--allowed-media-domains", '["a.example"]').media
    assert (media.limit_of("image"), media.limit_of("video"), media.limit_of("audio")) == (2, 1, 999)
    assert media.allowed_media_domains == ("a.example",)
    assert config_of("m", "--limit-mm-per-prompt", "image=3").media.limit_of("image") == 3
    assert config_of("m", "--language-model-only").media.limit_of("image") == 0


def test_to_ask_for_the_absence_of_what_is_absent_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of("m", "--no-enable-lora", "--no-cudagraph-metrics") == config_of("m")
    assert capsys.readouterr().err == ""


def test_an_attention_package_that_is_installed_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert config_of("--attention-backend", "FLASH_ATTN").worker.attention_backend == "flash_attn"
    assert "it computes prompts outside of CUDA graphs" in capsys.readouterr().err
    assert config_of("--attention-backend", "flashinfer").worker.attention_backend == "flashinfer"


def known(command: str) -> set[str]:
    """All flags that a command takes, or refuses with what to do instead."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    importlib.import_module(f"meshlm.supervisor.{main.COMMANDS[command.split()[0]]}").add_parser(commands)
    found = commands.choices[command.split()[0]]
    for word in command.split()[1:]:
        (kinds,) = (action for action in found._actions if isinstance(action, argparse._SubParsersAction))
        found = kinds.choices[word]
    return set(found._option_string_actions)


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "bench serve", "bench throughput", "bench latency"])
def test_every_flag_of_vllm_is_known(command: str) -> None:
    assert sorted(set(NAMES[command]) - known(command)) == []


@pytest.mark.parametrize(
    "words", ["--distributed-executor-backend ray", "-dpb ray", "--prefix-caching-hash-algo xxhash"]
)
def test_a_value_that_means_something_else_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.run(["serve", *words.split()])
    assert f"error: {words}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--disable-uvicorn-access-log", "--disable-log-requests"),
        ("--no-enable-log-requests", "--disable-log-requests"),
        ("--enable-log-requests", "--no-disable-log-requests"),
        ("--no-async-scheduling", "--async-depth 1"),
        ("--disable-access-log-for-endpoints /health,/metrics", ""),
        ("-O3", ""),
        ("-O=2", ""),
        ("--optimization-level 3", ""),
    ],
)
def test_what_a_flag_asks_for_is_done(words: str, ours: str) -> None:
    assert config_of(*words.split()) == config_of(*ours.split())


def test_a_value_that_means_less_than_in_vllm_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """-O3 compiled nothing without a word."""
    config_of("-O3")
    assert capsys.readouterr().err.startswith("meshlm: -O 3: nothing is compiled (--compile inductor is the setting)")
    settings_of({"optimization_level": 2})
    assert capsys.readouterr().err.startswith("meshlm: --optimization-level 2: nothing is compiled")


@pytest.mark.parametrize("flag", ["--no-enable-prompt-tokens-details", "--no-enable-request-id-headers"])
def test_to_ask_against_what_is_always_so_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.run(["serve", flag])
    assert f"error: {flag}: {table.ABSENT[flag]}" in capsys.readouterr().err


def test_a_value_that_means_nearly_the_same_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of("--attention-backend", "FLASHINFER").worker.attention_backend == "auto"
    said = capsys.readouterr().err
    assert "--attention-backend FLASHINFER is taken as auto: it needs the package flashinfer: pip install" in said
    assert config_of("--attention-backend", "triton_attn").worker.attention_backend == "triton"
    assert "--attention-backend triton_attn is taken as triton: " in capsys.readouterr().err
    assert config_of("--kv-cache-dtype", "fp8_e4m3").cache.kv_cache_dtype == "fp8"
    assert capsys.readouterr().err == ""


def test_a_flag_that_is_given_twice_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.run(
            [
                "serve",
                "/nowhere.gguf",
                "--port",
                "9",
                "--dtype",
                "float32",
                "--port=8",
                "--api-key",
                "a",
                "--api-key",
                "b",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.splitlines()[0] == "meshlm: --port is given 2 times; the last one counts"
    vllm_flags.say_repeated(["-x", "--", "--port", "--port"], {"--port"})
    assert capsys.readouterr().err == ""


def test_keys_of_a_json_flag_may_have_dots(capsys: pytest.CaptureFixture[str]) -> None:
    words = vllm_flags.with_json(["--a.b.c=1", "x", "--a.d", "no", "-t=0.5", "--a.e+", "1,2", "--", "--a.z=1"])
    assert words == ["x", "-t=0.5", "--a", '{"b": {"c": 1}, "d": "no", "e": ["1", "2"]}', "--", "--a.z=1"]
    assert vllm_flags.with_dashes(["--a_b.c_d=e_f"]) == ["--a-b.c_d=e_f"]
    assert main.run(["serve", "--compilation_config.mode", "1"]) == 2
    assert "error: --compilation-config: mode 1: " in capsys.readouterr().err


def test_flags_of_older_versions_change_the_models_configuration() -> None:
    """As Qwen's pages have them."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    words = ["--rope-scaling", json.dumps(yarn), "x", "--rope-theta=5e5"]
    assert vllm_flags.with_json(words) == ["x", "--hf-overrides", json.dumps({"rope_scaling": yarn, "rope_theta": 5e5})]
    found = settings_of({"rope_scaling": yarn, "rope_theta": 5e5, "hf_overrides": {"rope_theta": 7e5}})
    assert json.loads(str(found["hf_overrides"])) == {"rope_scaling": yarn, "rope_theta": 7e5}


def test_underscores_are_dashes() -> None:
    words = ["serve", "--max_model_len=a_b", "a_b", "--", "--c_d"]
    assert vllm_flags.with_dashes(words) == ["serve", "--max-model-len=a_b", "a_b", "--", "--c_d"]


def test_lists_may_be_json() -> None:
    assert config_of("--allowed-origins", '["a", "b"]').server.allowed_origins == ("a", "b")
    assert config_of("--allowed-origins", "a", "b").server.allowed_origins == ("a", "b")
    with pytest.raises(UsageError, match="--allowed-methods"):
        config_of("--allowed-methods", '["GET"')


def test_other_names() -> None:
    config = config_of("--api-server-count", "3", "--kv-cache-memory-bytes", "1G", "-dpa", "10.0.0.1")
    assert (config.server.frontends, config.cache.kv_cache_memory) == (3, 1 << 30)
    assert config.parallel.master_addr == "10.0.0.1"
    hybrid = config_of("-dp", "4", "-dpl", "2", "-dpr", "2", "-dph").parallel
    assert (hybrid.data_parallel_size_local, hybrid.data_parallel_start_rank) == (2, 2)
    assert hybrid.data_parallel_hybrid_lb
    assert config_of("-dp", "2", "-dpe", "-dpn", "1").parallel.data_parallel_external_lb
    assert config_of("--kv-cache-dtype", "fp8_e4m3").cache.kv_cache_dtype == "fp8"


def test_values_that_only_vllm_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of("--load-format", "tensorizer")
    assert "argument --load-format: tensorizer: serve safetensors" in capsys.readouterr().err
    with pytest.raises(ValueError, match="LLM: load_format: bitsandbytes: --quantization bitsandbytes is the setting"):
        settings_of({"load_format": "bitsandbytes"})
    assert config_of("--model-impl", "vllm", "--load-format", "runai_streamer").model.model_impl == "meshlm"


@pytest.mark.parametrize("setting", ["all2all_backend", "kv_cache_dtype"])
def test_a_value_that_only_vllm_has_gets_advice(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what to do instead: it was "invalid choice", as for a misspelling."""
    flag = f"--{setting.replace('_', '-')}"
    for value, instead in table.ABSENT_VALUES[setting].items():
        with pytest.raises(SystemExit, match="2"):
            config_of(flag, value)
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"argument {flag}: {value}: {instead}")
        with pytest.raises(ValueError, match=f"LLM: {setting}: {value}: "):
            settings_of({setting: value})


# Commands as vLLM's own pages write them, and what is said of them where they are not simply taken.
COMMANDS = [
    ("m --tensor-parallel-size 2", ""),
    ("m --reasoning-parser deepseek_r1", ""),
    ("m --block-size 16 --num-gpu-blocks-override 1000 --gpu-memory-utilization 0.9 --max-num-batched-tokens 8192", ""),
    ("--model unsloth/Qwen3-0.6B-GGUF:Q4_K_M --tokenizer Qwen/Qwen3-0.6B", ""),
    ("m --quantization fp8 --tensor-parallel-size 4 --gpu-memory-utilization 0.95", ""),
    ("m --quantization fp8 --dtype half --kv-cache-dtype fp8_e4m3", ""),
    ("m --quantization gguf --tokenizer meta-llama/Llama-2-70b-chat", ""),
    ("m --generation-config vllm", ""),
    ("m --load-format dummy --enforce-eager", ""),
    ("m --trust_remote_code --revision main --tokenizer-revision main", ""),
    ("m --compilation_config.mode=NONE", ""),
    ("m -cc.backend=eager", ""),
    ("m -cc.compile_cache_save_format=unpacked", ""),
    ("m --nnodes 2 --node-rank 1 --headless", ""),
    ("m --api-key k --enable-tokenizer-info-endpoint", ""),
    ("m --attention-backend flashinfer", "is taken as auto: it needs the package flashinfer"),
    (
        "m --data-parallel-size 2 --enable-expert-parallel --enable-dbo --all2all-backend deepep_low_latency",
        "is taken as peer_memory",
    ),
    ("m --all2all-backend deepep_high_throughput", "DeepEP is not used; peer_memory"),
    ("m --cpu-offload-gb 10 --cpu-offload-params mlp", ""),
    ("--prefill-only --ec-transfer-config {}", "--dp-roles is the setting within a mesh"),
    ("m --ec-transfer-config {}", "what encoders compute stays in the worker"),
    ("m --quantization-config {}", "--quantization is the setting"),
    ("m --quantization-param-path file", "scales of an FP8 KV cache"),
]


@pytest.mark.parametrize(("words", "said"), COMMANDS)
def test_commands_of_vllms_pages(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is taken as it stands, or one line says what to do instead."""
    try:
        config_of(*vllm_flags.with_json(vllm_flags.with_dashes(words.split())))
    except SystemExit:
        assert said
    err = capsys.readouterr().err
    assert said in err if said else err == ""


def test_the_version_as_vllm_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-v", "--version"):
        with pytest.raises(SystemExit, match="0"):
            main.run([flag])
        assert capsys.readouterr().out.startswith("meshlm ")


def test_numbers_of_tokens() -> None:
    config = config_of("--max-model-len", "25.6k", "--max-num-batched-tokens", "8K")
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (25600, 8192)


def test_sizes_are_decimal_or_binary_as_in_vllm() -> None:
    assert config_of("--kv-cache-memory-bytes", "25g").cache.kv_cache_memory == 25 * 10**9
    for text in ("25G", "25GB", "25GiB"):
        assert config_of("--kv-cache-memory-bytes", text).cache.kv_cache_memory == 25 << 30


@pytest.mark.parametrize("text", ["3x", "k", "", "1e", "4.5"])
def test_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no number of tokens"):
        sizes.parse_count(text)


def test_an_unknown_flag_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.run(["serve", "--max-num-sequs=3"])
    assert "unknown argument --max-num-sequs; did you mean --max-num-seqs?" in capsys.readouterr().err


def test_no_flag_of_ours_is_in_the_table() -> None:
    ours = {setting.flag for setting in flags.settings()}
    renamed = {name for names in table.RENAMED for name in names}
    assert not ours & (renamed | set(table.NEEDLESS) | set(table.ABSENT) | set(table.ONLY))
    assert not set(table.NEEDLESS) & set(table.ABSENT)
    assert not set(table.SWITCHES) & {*ours, *table.NEEDLESS, *table.ABSENT, *table.ONLY}
    assert {setting for setting, _ in table.SWITCHES.values()} <= {setting.name for setting in flags.settings()}


def test_defaults_are_vllms_or_said_to_be_others() -> None:
    theirs = json.loads((Path(__file__).parents[1] / "vllm_0_26_defaults.json").read_text("utf-8"))
    settings = {setting.flag: setting for setting in flags.settings()}
    renamed = {flag: f"--{ours.replace('_', '-')}" for names, ours in table.RENAMED.items() for flag in names}
    # None stands there for what is decided later, and comes to the same.
    same = {"--block-size", "--enable-prefix-caching", "--enable-chunked-prefill", "--attention-backend", "--host"}
    same |= {"--data-parallel-start-rank"}

    def plain(value: object) -> object:
        value = list(value) if isinstance(value, tuple) else value
        return None if value in ("", [], {}) else value

    def differs(flag: str) -> bool:
        return flag not in same and plain(settings[renamed.get(flag, flag)].default) != plain(theirs[flag])

    rows = DOCS.read_text("utf-8").partition("## Defaults that differ")[2].partition("\n## ")[0]
    assert [flag for flag in theirs if differs(flag) and f"| `{flag}` |" not in rows] == []


def ours_of(setting: str, value: bool | int) -> str:
    name = setting.replace("_", "-")
    return f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name} {value}"


def test_the_document_has_the_table() -> None:
    text = DOCS.read_text("utf-8")
    rows = [f"| `{names[0]}` | `--{ours.replace('_', '-')}` |" for names, ours in table.RENAMED.items()]
    rows += [f"| `{flag}` | `{ours_of(*meant)}` |" for flag, meant in table.SWITCHES.items()]
    rows += [
        f"| `--{setting.replace('_', '-')} {theirs}` | `{ours}`{': ' if why else ''}{why} |"
        for setting, values in table.VALUES.items()
        for theirs, (ours, why) in values.items()
    ]
    rows += [f"| `{flag}` | the variable `{name}` |" for flag, name in table.VARIABLES.items()]
    rows += [f"| `{flag}` | the key `{key}` of `--hf-overrides` |" for flag, key in table.OVERRIDES.items()]
    rows += [f"| `{flag}` | {why} |" for flag, (_, why) in table.NEEDLESS.items()]
    rows += [
        f"| `--{setting.replace('_', '-')} {theirs}` | {why} |"
        for setting, values in table.ABSENT_VALUES.items()
        for theirs, why in values.items()
    ]
    rows += [
        f"| `{flag}` | {', '.join(f'`{v}`' for v in values)} | {why} |" for flag, (values, why) in table.ONLY.items()
    ]
    rows += [f"| `{flag}` | {why} |" for flag, why in table.ABSENT.items()]
    assert [row for row in rows if row not in text] == []
