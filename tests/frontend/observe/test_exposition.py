"""/metrics as a whole: the list of docs/metrics.md is what a mesh shows, it is read quickly, and it says what the library would say."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshlm.frontend.observe import exposition

ROOT = Path(__file__).parents[3]
WHOLE_MESH = Path(__file__).parents[1] / "support" / "whole_mesh.py"
PREFIX = "meshlm:"
MOST_S = 0.020  # a scrape, with 10,000 requests running


class Shown(NamedTuple):
    """A row of docs/metrics.md."""

    kind: str
    labels: frozenset[str]
    text: str


def told(folder: Path, num_ranks: int) -> tuple[str, float]:
    """The text and the seconds of CPU that a scrape took."""
    command = [sys.executable, "-P", str(WHOLE_MESH), str(folder), str(num_ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, float(done.stderr)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return told(tmp_path_factory.mktemp("metrics"), 1)[0]


def samples(text: str) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items()), one.value) for family in families for one in family.samples}


def documented() -> dict[str, Shown]:
    rows = [
        line.split("|")
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line[:3] == "| `" and line.count("|") == 5
    ]
    return {
        name.strip().strip("`"): Shown(
            kind.strip(), frozenset(labels.replace("`", "").replace(",", " ").split()), help_.strip()
        )
        for _, name, kind, labels, help_, _ in rows
    }


def shown(text: str) -> dict[str, Shown]:
    found = {}
    for family in text_string_to_metric_families(text):
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, f"{family.name} has {labels}"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name.removeprefix(PREFIX)] = Shown(family.type, labels.pop(), family.documentation)
    return found


def test_the_list_is_what_the_server_shows(text: str) -> None:
    """A change of a name, a type, a label or a meaning is a change for every dashboard: it belongs into docs/metrics.md."""
    assert shown(text) == documented()


def test_buckets_of_a_histogram_are_cumulative_and_end_with_its_count(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    histograms = [family for family in families.values() if family.type == "histogram"]
    assert len(histograms) > 20
    for family in histograms:
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        counts = {}
        for sample in family.samples:
            labels = frozenset((key, value) for key, value in sample.labels.items() if key != "le")
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                counts[labels] = sample.value
        for labels, buckets in series.items():
            assert buckets == sorted(buckets), family.name
            assert [count for _, count in buckets] == sorted(count for _, count in buckets), family.name
            assert buckets[-1] == (float("inf"), counts[labels]), family.name


def test_the_library_says_the_same_of_the_shared_files(text: str, tmp_path: Path) -> None:
    read = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    ours, _ = told(tmp_path, 2)
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    command = [sys.executable, "-P", "-c", read]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    here, there = samples(ours), samples(done.stdout)
    assert {one for one in there if "incarnation" not in dict(one[1])} <= here
    assert len(there) > 400


def test_names_may_have_the_prefix_of_vllms(text: str) -> None:
    ours = text
    renamed = exposition._PREFIX.sub(rb"\1vllm:", ours.encode() + b'x{model_name="meshlm:7b"} 1.0\n').decode()
    assert "\nmeshlm:" not in renamed
    assert "# TYPE vllm:num_requests_waiting gauge" in renamed
    assert renamed.count("vllm:") == ours.count("meshlm:")
    assert 'model_name="meshlm:7b"' in renamed


def test_a_scrape_is_quick(tmp_path: Path) -> None:
    """With 10,000 requests running at 16 ranks, of CPU; by the library's own rendering it took a fifth of a second."""
    text, seconds = told(tmp_path, 16)
    running = [line for line in text.splitlines() if line.startswith("meshlm:num_requests_running{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in running) == 10_000
    assert seconds < MOST_S


# Those of vLLM 0.26 that MeshLM has, as its Prometheus logger makes them: type and labels. vllm_metrics.py has those of each frontend.
OF_VLLM = {
    "num_requests_waiting_by_reason": ("gauge", "model_name engine reason"),
    "prompt_tokens_by_source_total": ("counter", "model_name engine source"),
    "prompt_tokens_cached_total": ("counter", "model_name engine"),
    "iteration_tokens_total": ("histogram", "model_name engine"),
    "request_prefill_kv_computed_tokens": ("histogram", "model_name engine"),
    "kv_block_lifetime_seconds": ("histogram", "model_name engine"),
    "kv_block_idle_before_evict_seconds": ("histogram", "model_name engine"),
    "kv_block_reuse_gap_seconds": ("histogram", "model_name engine"),
    "spec_decode_num_drafts_total": ("counter", "model_name engine"),
    "spec_decode_num_draft_tokens_total": ("counter", "model_name engine"),
    "spec_decode_num_accepted_tokens_total": ("counter", "model_name engine"),
    "spec_decode_num_accepted_tokens_per_pos_total": ("counter", "model_name engine position"),
    "estimated_flops_per_gpu_total": ("counter", "model_name engine"),
    "estimated_read_bytes_per_gpu_total": ("counter", "model_name engine"),
    "estimated_write_bytes_per_gpu_total": ("counter", "model_name engine"),
}
STEP_TOKENS = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"
RESIDENCY = "0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 20 30 60 120 300 600 1200 1800"


def test_what_vllm_has_means_the_same_here(text: str) -> None:
    listed = documented()
    for name, (kind, labels) in OF_VLLM.items():
        assert (listed[name].kind, listed[name].labels) == (kind, frozenset(labels.split())), name
    families = {family.name.removeprefix(PREFIX): family for family in text_string_to_metric_families(text)}
    for name, ends in (("iteration_tokens_total", STEP_TOKENS), ("kv_block_reuse_gap_seconds", RESIDENCY)):
        found = [float(one.labels["le"]) for one in families[name].samples if one.name.endswith("_bucket")]
        assert found == [*map(float, ends.split()), float("inf")]
