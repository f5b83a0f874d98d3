"""benchmarks/beside.py: jobs leave nothing behind, what is known is not measured again, and a whole run on the fake device."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import tokenizers
from cpu_steps import MODEL

VOCAB = 32_000
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
if len(sys.argv) > 1:
    signal.pause()
sys.exit(3)
"""


ENDED = """
import pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import beside
signal.signal(signal.SIGTERM, beside.end_all)
with beside.running([sys.executable, "-c", sys.argv[2], "long"], beside.Engine("meshlm", "", (), 0), pathlib.Path(sys.argv[3])):
    print("runs", flush=True)
    signal.pause()
"""


@pytest.fixture
def beside(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("beside")


def test_flags_are_of_both_engines(beside: ModuleType) -> None:
    model = beside.Model.of("/models/llama@--quantization fp8 --enforce-eager --max-num-seqs 8")
    assert model.name == "llama --quantization fp8 --enforce-eager --max-num-seqs 8"
    assert model.settings == {"quantization": "fp8", "enforce_eager": True, "max_num_seqs": 8}
    for name in ("meshlm", "vllm"):
        command = beside.Engine(name, "0", (), 8000, "/site").server(model, beside.SHORT)
        assert command[-5:] == ["--quantization", "fp8", "--enforce-eager", "--max-num-seqs", "8"]
        assert "--no-enable-prefix-caching" in command


def test_a_model_may_name_its_own_work(beside: ModuleType) -> None:
    model = beside.Model.of("/models/llama@@offline long")
    assert (model.name, model.kinds, model.flags) == ("llama", ("offline", "long"), ())
    with pytest.raises(ValueError, match="no kinds of work are wide; there are offline, serve, long, longest"):
        beside.Model.of("/models/llama@--quantization fp8@wide")
    length, work = beside.LONG["longest"]
    assert "--no-enable-prefix-caching" in beside.Engine("vllm", "0", (), 8000).server(model, length)
    assert "--no-enable-prefix-caching" not in beside.Engine("vllm", "0", (), 8000).server(
        model, beside.LONG["long"][0]
    )
    assert work.input_len + 128 <= length


@pytest.mark.parametrize(
    ("more", "limit_s", "said"), [([], 30.0, "exit code 3"), (["long"], 3.0, "took longer than 3 s")]
)
def test_a_job_leaves_nothing_behind(
    beside: ModuleType, more: list[str], limit_s: float, said: str, tmp_path: Path
) -> None:
    log, engine = tmp_path / "log", beside.Engine("meshlm", "", (), 8000)
    with pytest.raises((RuntimeError, TimeoutError), match=said):
        beside.finished([sys.executable, "-c", PARENT, *more], engine, log, limit_s)
    assert not psutil.pid_exists(int(log.read_text().split()[0]))


def test_what_is_known_is_not_measured_again(
    beside: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"m": {"meshlm": {"offline": {"batch_1_ms": 5.0}, "serve": {"error": "took longer than 1 s"}}}}
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"models": known}))
    asked: list[tuple[str, str]] = []

    def measured(_: Any, model: Any, engine: Any, kind: str) -> dict[str, int]:
        asked.append((model.name, kind))
        return {"found": len(asked)}

    monkeypatch.setattr(beside.Run, "_measured", measured)
    arguments = argparse.Namespace(models=["/a/m", "/a/n"], only=["offline", "serve"], json=str(path))
    beside.Run(arguments, tmp_path).go_through(beside.Engine("meshlm", "", (), 8000))
    assert asked == [("m", "serve"), ("n", "offline"), ("n", "serve")]
    kept = json.loads(path.read_text())["models"]
    assert kept["m"]["meshlm"] == {"offline": {"batch_1_ms": 5.0}, "serve": {"found": 1}}
    assert kept["n"]["meshlm"] == {"offline": {"found": 2}, "serve": {"found": 3}}


@pytest.mark.mesh
def test_a_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({**MODEL, **sizes}))
    words = {f"w{nth}": nth for nth in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    talk = [{"conversations": [{"value": "w5 " * 9}, {"value": "w6 " * 7}]}]
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    loaded.save(str(folder / "tokenizer.json"))
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    script = Path(__file__).parents[2] / "benchmarks" / "beside.py"
    command = [sys.executable, "-P", str(script), str(folder), "--device", "fake", "--streams", "2", "--batches", "1"]
    command += ["--sharegpt", str(tmp_path / "talk.json"), "--requests", "3", "--json", str(tmp_path / "out.json")]
    subprocess.run(command, cwd="/", check=True, timeout=300, capture_output=True)
    found = json.loads((tmp_path / "out.json").read_text())["models"]["model"]["meshlm"]
    assert found["offline"]["offline"]["output_tokens"] == 3 * 7
    assert found["offline"]["batch_1_ms"] > 0
    assert (found["serve"]["c2"]["completed"], found["serve"]["c2"]["failed"]) == (8, 0)


def test_it_ends_what_it_started_when_it_is_ended(beside: ModuleType, tmp_path: Path) -> None:
    """Or a server would keep a GPU's memory from the runs that come after it."""
    log = tmp_path / "log"
    words = [sys.executable, "-P", "-c", ENDED, str(beside.HERE), PARENT, str(log)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        (leader,) = psutil.Process(process.pid).children()
        while not log.read_text():
            assert leader.is_running()
        started = [leader, psutil.Process(int(log.read_text()))]
        process.terminate()
        assert process.wait(20) == 128 + 15
    gone, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    assert len(gone) == 2
