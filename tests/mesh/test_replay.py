"""Requests that a mesh has recorded are computed again, and are the same; a token that is another one is found, with its gap."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import MESHLM, Serving, meshlm, serving
from waiting import until

pytestmark = pytest.mark.mesh
MODEL = "SmolLM2-135M-Instruct"
TEXT = "the quick brown fox jumps over a lazy dog while seven wizards count their coins"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}
TOOL = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"n": NUMBERS}}},
}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {"30": 3}}
USER = {"role": "user", "content": "hello"}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"prompt": TEXT, "temperature": 0, "logprobs": 3}),
    "drawn": ("completions", {"prompt": TEXT, "temperature": 1}),
    "seeded": ("completions", {"prompt": TEXT, "temperature": 1, "seed": 7, "top_p": 0.9, "ignore_eos": True}),
    "penalties": ("completions", {"prompt": TEXT, **PENALTIES, "min_tokens": 5, "bad_words": ["the"]}),
    "llama": ("completions", {"prompt": TEXT, "xtc_probability": 0.3, "dry_multiplier": 0.8}),
    "two": ("completions", {"prompt": [TEXT, "one two"], "temperature": 1, "n": 2}),
    "chat": ("chat/completions", {"messages": [USER], "temperature": 1, "stop": ["zq"]}),
}
CONSTRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar": ("completions", {"prompt": TEXT, "max_tokens": 40, "structured_outputs": {"json": NUMBERS}}),
    "tools": ("chat/completions", {"messages": [USER], "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
    "beams": ("completions", {"prompt": TEXT, "use_beam_search": True, "n": 2, "max_tokens": 3}),
}


def record(server: Serving, folder: Path, file: Path, asked: dict[str, tuple[str, dict[str, Any]]]) -> Path:
    """Asks all of it, and streams an answer whose worker is killed on its way. The file has them, and no replays that follow."""
    for name, (path, body) in asked.items():
        answer = httpx.post(
            f"{server.url}/v1/{path}", json={"max_tokens": 16, **body}, headers={"X-Request-Id": name}, timeout=300
        )
        assert answer.status_code == 200, answer.text
    body = {"prompt": TEXT, "temperature": 1, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            next(events)
        os.kill(server.pid("worker"), signal.SIGKILL)
        *_, last = events
    assert last == "data: [DONE]"
    count = sum(
        len(body.get("prompt", "")) if isinstance(body.get("prompt"), list) else 1 for _, body in asked.values()
    )
    count += 1 + sum(body.get("n", 1) - 1 for _, body in asked.values()) + ("two" in asked)
    until(lambda: len(lines(folder)) == count)
    file.write_bytes(b"\n".join([*lines(folder), b""]))
    return file


def lines(folder: Path) -> list[bytes]:
    """Those that are whole: they are written behind the answers."""
    found = [line for file in folder.glob("*.jsonl") for line in file.read_bytes().splitlines(keepends=True)]
    return [line.rstrip() for line in found if line.endswith(b"\n")]


def replay(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([MESHLM, "replay", *words], capture_output=True, text=True, cwd="/", timeout=300)


def test_the_fake_device(tmp_path: Path) -> None:
    """An id is found in the folder of the mesh that runs. Another mesh has the same tokens, and so would the killed worker have had."""
    folder, flags = tmp_path / "recorded", ("--device", "fake", "--max-model-len", "1024")
    with serving(*flags, "--fake-step-ms", "5", "--record-requests", str(folder)) as server:
        file = record(server, folder, tmp_path / "all.jsonl", PLAIN)
        found = meshlm(server, "replay", "two")
        assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["4 same"]), found
        before = len(lines(folder))
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [5]}, timeout=300)
        until(lambda: len(lines(folder)) > before)
        assert len(lines(folder)) == len(lines(tmp_path)) + 1, "no replay is recorded"
        missing = meshlm(server, "replay", "three")
        assert (missing.returncode, "no request three is recorded" in missing.stderr) == (2, True), missing
    root = json.loads(lines(tmp_path)[0])["root"]
    found = replay(str(file), root, "--served-model-name", MODEL, *flags)
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["11 same"]), found
    assert "same: 60 tokens" in found.stdout, "the stream"


@pytest.mark.model
def test_smollm2(smol: Serving, tmp_path: Path) -> None:
    """What one mesh has recorded another one computes: all are the same, and a changed token is found."""
    folder = tmp_path / "recorded"
    flags = (
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
        "--cpu-exact",
        "--kv-cache-memory",
        "512M",
        "--prefill-pace",
        "full",
    )
    with serving(*flags, "--record-requests", str(folder)) as server:
        file = record(server, folder, tmp_path / "all.jsonl", PLAIN | CONSTRAINED)
    found = replay(str(file), "--url", smol.url)
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["13 same, 2 not replayable"]), found
    assert found.stdout.count("not replayable: use_beam_search") == 2
    assert "log-probabilities differ" not in found.stdout
    changed = next(line for line in map(json.loads, lines(tmp_path)) if line["request_id"] == "cmpl-seeded")
    now, ids = changed["output_token_ids"][6], list(changed["output_token_ids"])
    ids[6] = 2000
    file.write_text(json.dumps({**changed, "output_token_ids": ids}))
    found = replay("cmpl-seeded", "--recordings", str(file), "--url", smol.url)
    assert found.returncode == 1, found
    pattern = (
        rf"differs at token 6 of 16: 2000 '.*' \((.*)\) is now {now} '.*' \((.*)\), a gap of (.*); 0 of 9 tokens after"
    )
    said = re.search(pattern, found.stdout)
    assert said is not None, found
    body = changed["body"] | {"logprobs": 1, "logprob_token_ids": [2000, now], "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{smol.url}/v1/completions", json=body, timeout=300).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][6]  # where the sequence itself is decoded
    expected = [top["token_id:2000"], top[f"token_id:{now}"]]
    assert [float(one) for one in said.groups()] == pytest.approx([*expected, expected[1] - expected[0]], abs=2e-6)
