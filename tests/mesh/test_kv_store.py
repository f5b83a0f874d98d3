"""A mesh with a store: one of its processes, which may die at any moment, and which has the KV of prompts that left the device.

A token of the fake device is a function of what its KV cache really holds, so pages of another prompt would be seen. Models on a CPU
say what they say without a store, with pages of several workers side by side.
"""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest
from fake_answers import complete, reference
from serving import Serving, serving
from split_models import greedy, small_model
from split_models import reference as alone
from waiting import until

pytestmark = pytest.mark.mesh
# Forty pages: a prompt of 300 tokens has 19 of them.
FLAGS = (
    *("--device", "fake", "--fake-step-ms", "30", "--max-model-len", "512", "--num-gpu-blocks-override", "40"),
    *("--kv-offloading-size", "0.25"),
)
PROMPTS = [[300 + number, *range(100, 399)] for number in range(5)]
NUM_BLOCKS = 18  # whole ones of a prompt, the last token's left out


def row(server: Serving) -> dict[str, object]:
    """Of the store, in `meshlm status`."""
    return next(row for row in server.status()["processes"] if row["role"] == "store")


def count(server: Serving, name: str, labels: str = "") -> float:
    """The value of a metric of the store."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^meshlm:{name}{{model_name=\"[^\"]*\",process=\"store/0\"{labels}}} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


def answer(server: Serving, prompt: list[int]) -> int:
    """Computes a prompt, whose answer must be the right one; gives the tokens of it that were cached."""
    given = complete(server, prompt, 8)
    assert given["choices"][0]["token_ids"] == reference(prompt, 8)
    cached: int = given["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def stored(server: Serving, num_blocks: int, tier: str = "memory") -> None:
    seen(server, "kv_store_stored_total", f',tier="{tier}"', num_blocks)


def seen(server: Serving, name: str, labels: str, least: int) -> None:
    """Processes tell their counts once a second."""
    until(lambda: count(server, name, labels) >= least, limit_s=30)


def test_the_store_is_a_process_that_may_die() -> None:
    with serving(*FLAGS) as server:
        assert any("store/0 is ready: memory 0.25 GiB" in line for line in server.lines)
        before = server.pid("store")
        assert row(server)["state"] == "ready"
        answer(server, PROMPTS[0])
        stored(server, NUM_BLOCKS)
        server.forget()
        os.kill(before, signal.SIGKILL)
        answer(server, PROMPTS[1])
        server.wait_for("store/0 is ready")
        until(lambda: row(server)["state"] == "ready" and server.pid("store") != before)
        assert row(server)["restarts"] == 1
        others = ([1000 + number, *range(100, 399)] for number in range(100))
        until(lambda: answer(server, next(others)) == 0 and count(server, "kv_store_bytes", ',tier="memory"') > 0)
        assert count(server, "kv_store_capacity_bytes", ',tier="memory"') == 1 << 28


def test_what_left_the_device_comes_back_from_the_host_and_after_a_restart_from_the_disk(tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-offloading-path", str(tmp_path / "kv"), "--kv-offloading-disk-size", "1G")
    with serving(*flags) as server:
        for number, prompt in enumerate(PROMPTS):
            assert answer(server, prompt) == 0
            stored(server, (number + 1) * NUM_BLOCKS)
        assert answer(server, PROMPTS[0]) >= 16 * (NUM_BLOCKS - 1), "it left the device, which has room for two"
        seen(server, "kv_store_hits_total", ',tier="memory"', NUM_BLOCKS - 1)
        stored(server, len(PROMPTS) * NUM_BLOCKS, "disk")
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert len(files) >= len(PROMPTS) * NUM_BLOCKS
    with serving(*flags) as server:
        assert [answer(server, prompt) >= 16 * (NUM_BLOCKS - 1) for prompt in PROMPTS] == [True] * len(PROMPTS)
        seen(server, "kv_store_hits_total", ',tier="disk"', (NUM_BLOCKS - 1) * len(PROMPTS))
    for file in files:
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with serving(*flags) as server:
        assert answer(server, PROMPTS[0]) == 0, "what is spoilt is computed"
        seen(server, "kv_store_bad_files_total", ',reason="foreign"', NUM_BLOCKS)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3", ("-tp", "2")), ("mistral", ("-pp", "2"))])
def test_a_model_says_the_same_with_kv_from_the_host_and_from_the_disk(
    kind: str, layout: tuple[str, ...], tmp_path: Path
) -> None:
    """mistral has a window, whose blocks are given back while a request runs."""
    (tmp_path / "model").mkdir()
    model = small_model(tmp_path / "model", kind)
    prompts = [[3 + (7 * i + number) % 200 for i in range(150 + number)] for number in range(4)]
    wanted = [alone(model, prompt) for prompt in prompts]
    flags = (
        *(model, "--load-format", "dummy", "--device", "cpu", "--cpu-threads", "1", "--standby-roles", "none", *layout),
        *("--max-model-len", "256", "--num-gpu-blocks-override", "20", "--max-num-batched-tokens", "64"),
        *("--kv-offloading-size", "0.25", "--kv-offloading-path", str(tmp_path / "kv")),
    )

    def said(server: Serving) -> list[list[int]]:
        return [greedy(server, [prompt])[0] for prompt in prompts]

    with serving(*flags) as server:
        assert said(server) == wanted
        stored(server, len(prompts) * 9, "disk")
        assert said(server) == wanted
        seen(server, "kv_store_hits_total", ',tier="memory"', 9)
    with serving(*flags) as server:
        assert said(server) == wanted
        seen(server, "kv_store_hits_total", ',tier="disk"', 9)
