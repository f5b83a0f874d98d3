"""Tensor and pipeline parallelism with real processes and gloo: the same greedy tokens as one process, and no death loses a token."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from http_clients import metric
from serving import MESHLM, Serving, serving
from split_models import COUNT, FLAGS, KINDS, PROMPTS, SHAPE, greedy, reference, small_model

pytestmark = pytest.mark.mesh


def pids(server: Serving, role: str = "worker") -> list[int]:
    return [int(process["pid"]) for process in server.status()["processes"] if process["role"] == role]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: small_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, list[list[int]]]:
    """What the whole model says in this process, each token from a prompt that is computed anew."""
    found = {kind: [reference(model, prompt) for prompt in PROMPTS] for kind, model in models.items()}
    for answers in found.values():
        assert len({token for tokens in answers for token in tokens}) > 20, "tokens that prove something"
    return found


LAYOUTS = [
    ("mistral", ("-tp", "2")),
    ("qwen3", ("-pp", "2")),
    ("qwen2", ("-tp", "2", "-pp", "2")),
    ("llama", ("-dp", "2", "-tp", "2")),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_same_tokens_as_one_process(
    kind: str, layout: tuple[str, ...], models: dict[str, str], alone: dict[str, list[list[int]]]
) -> None:
    with serving(models[kind], "--load-format", "dummy", *FLAGS, *layout) as server:
        assert greedy(server) == alone[kind]
        assert greedy(server) == alone[kind], "with a warm prefix cache"


@pytest.mark.parametrize(
    ("method", "layout"),
    [({"method": "ngram", "prompt_lookup_max": 1}, ("-pp", "2")), ({"method": "suffix"}, ("-tp", "2", "-pp", "2"))],
)
def test_the_stages_of_a_pipeline_draft_alike(
    method: dict[str, object], layout: tuple[str, ...], models: dict[str, str], alone: dict[str, list[list[int]]]
) -> None:
    """Also behind a kill -9 of the first and of the last, and from past answers, of which each stage learns the same."""
    drafts = json.dumps({**method, "num_speculative_tokens": 4})
    flags = ("--load-format", "dummy", *FLAGS, *layout, "--speculative-config", drafts)
    with serving(models["qwen3"], *flags) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert greedy(server) == alone["qwen3"]
        last = len(pids(server)) - 1
        for index in (0, last):
            assert killed_while_streaming(server, "worker", index)[:COUNT] == alone["qwen3"][1]
            assert greedy(server) == alone["qwen3"]
        given, accepted = (
            metric(client, f"spec_decode_num_{name}_total") for name in ("draft_tokens", "accepted_tokens")
        )
        assert 0 < accepted < given


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_two_ranks_draft_alike(
    method: str, models: dict[str, str], alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Also behind a kill -9, with a model that drafts whose heads have another shape."""
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        shape = json.loads((Path(small_model(tmp_path, "llama")) / "config.json").read_text())
        smaller = {**shape, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "head_dim": 4}
        (tmp_path / "config.json").write_text(json.dumps(smaller))
        config["model"] = str(tmp_path)
    layout = ("-tp", "2", "--speculative-config", json.dumps(config))
    with serving(models["llama"], "--load-format", "dummy", *FLAGS, *layout) as server:
        assert greedy(server) == alone["llama"]
        assert greedy(server) == alone["llama"], "with a warm prefix cache, and past answers"
        assert killed_while_streaming(server, "worker", 1)[:COUNT] == alone["llama"][1]
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        (drafted,) = [
            line for line in text.splitlines() if line.startswith("meshlm:spec_decode_num_draft_tokens_total{")
        ]
        assert float(drafted.rpartition(" ")[2])


def test_a_model_that_only_transformers_knows(tmp_path: Path) -> None:
    """Its own modules with our attention, split by the plans of its configuration; the supervisor asks a process what it is."""
    import transformers

    small_model(tmp_path, "llama")  # for its tokenizer
    torch.manual_seed(0)
    config = transformers.ArceeConfig(**SHAPE | {"initializer_range": 0.2, "eos_token_id": None})
    theirs = transformers.ArceeForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    with serving(str(tmp_path), *FLAGS, "-tp", "2", "-pp", "2", "--model-impl", "transformers") as server:
        found = greedy(server)
    assert any("ArceeForCausalLM is computed by transformers' model" in line for line in server.lines)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_smollm2_over_three_ranks(smollm2: Path) -> None:
    """Nine heads, three key-value heads."""
    prompt = [1, 504, 3575, 282, 4649, 314]
    flags = (*FLAGS[:4], "--cpu-exact", "--kv-cache-memory", "256M", "--max-model-len", "1024", "-tp", "3")
    with serving(*flags) as server:
        assert greedy(server, [prompt], 12)[0] == reference(str(smollm2), prompt, "auto", 12)


@pytest.fixture(scope="module")
def group(models: dict[str, str]) -> Iterator[Serving]:
    """Four workers of one scheduler."""
    flags = ("--load-format", "dummy", "-tp", "2", "-pp", "2", "--max-restarts", "50")
    with serving(models["llama"], *FLAGS, *flags) as server:
        yield server


def killed_while_streaming(server: Serving, role: str, index: int) -> list[int]:
    """A stream of 120 tokens; after 20 of them, kill -9."""
    victim = pids(server, role)[index]
    body = {"prompt": PROMPTS[1], "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    ids: list[int] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True, "return_token_ids": True}, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
            if victim and len(ids) >= 20:
                os.kill(victim, signal.SIGKILL)
                victim = 0
    assert not victim
    return ids


@pytest.mark.parametrize("rank", range(4))
def test_a_killed_rank_loses_nothing(rank: int, group: Serving, alone: dict[str, list[list[int]]]) -> None:
    """Under load: the streams pause, the group is made anew, and the tokens are those of an undisturbed run."""
    before = pids(group)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(greedy, group, PROMPTS, 60)
        found = killed_while_streaming(group, "worker", rank)
        assert [tokens[:COUNT] for tokens in others.result(120)] == alone["llama"]
    assert found == greedy(group, [PROMPTS[1]], 120)[0]
    assert found[:COUNT] == alone["llama"][1]
    assert not set(before) & set(pids(group)), "all ranks of the group are new"


def test_a_restart_replaces_the_group_at_once(group: Serving, alone: dict[str, list[list[int]]]) -> None:
    """One new life for each of its workers, not one for each that leaves."""

    def lives() -> dict[int, tuple[int, int]]:
        rows = group.status()["processes"]
        return {row["index"]: (row["pid"], row["restarts"]) for row in rows if row["role"] == "worker"}

    before = lives()
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(greedy, group, PROMPTS, 60)
        command = [MESHLM, "restart", "worker", "--run-dir", group.run_dir]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=200)
        assert [tokens[:COUNT] for tokens in streams.result(120)] == alone["llama"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker/0, worker/1, worker/2, worker/3: replaced" in done.stdout
    after = lives()
    assert not {pid for pid, _ in before.values()} & {pid for pid, _ in after.values()}
    assert [after[index][1] - before[index][1] for index in range(4)] == [1, 1, 1, 1]
    assert greedy(group) == alone["llama"]


def test_a_killed_scheduler_leaves_the_group_as_it_is(group: Serving, alone: dict[str, list[list[int]]]) -> None:
    """Unless it dies when some workers had the next plan and others had not, which happens: then the group is made anew."""
    for _ in range(8):
        before = pids(group)
        found = killed_while_streaming(group, "scheduler", 0)
        assert len(found) == 120
        assert found[:COUNT] == alone["llama"][1]
        if set(before) == set(pids(group)):
            return
    raise AssertionError("weights stay")
