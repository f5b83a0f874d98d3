"""Settings that have no effect beside the others: one line names them at the start, so that nobody waits for what they ask for.

Those that contradict one another are refused elsewhere. Called by resolve.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.server import STORE_OFF
from meshlm.supervisor.settings import flags

BUILT_IN = ("cpu", "cuda", "fake")  # plug-ins of devices may use any setting


class Facts(NamedTuple):
    """What decides beside the configuration."""

    device: str
    transcribes: bool


class Rule(NamedTuple):
    """Settings, when they have an effect, and what they are of."""

    names: tuple[str, ...]
    counts: Callable[[MeshConfig, Facts], bool]
    of: str


def _on(*devices: str) -> Callable[[MeshConfig, Facts], bool]:
    return lambda config, facts: facts.device in devices or facts.device not in BUILT_IN


def _has_nodes(config: MeshConfig, facts: Facts) -> bool:
    return bool(config.network.listen or config.network.join)


RULES = (
    Rule(("fake_step_ms", "fake_drafts"), _on("fake"), "--device fake"),
    Rule(("cpu_threads",), _on("cpu"), "--device cpu"),
    Rule(("tune", "tuning_dir", "disable_cascade_attn", "gpu_memory_utilization"), _on("cuda"), "GPUs"),
    Rule(
        ("gpu_memory_utilization",),
        lambda config, _: config.cache.kv_cache_memory is None,
        "KV caches whose size --kv-cache-memory does not say",
    ),
    Rule(("compile_dynamic_shapes",), lambda config, _: config.worker.compile != "none", "--compile"),
    Rule(
        ("all2all_backend",),
        lambda config, _: config.experts.enable_expert_parallel and config.parallel.data_parallel_size > 1,
        "--enable-expert-parallel with --data-parallel-size 2 or more",
    ),
    Rule(
        ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        lambda config, _: config.experts.enable_dbo,
        "--enable-dbo",
    ),
    Rule(("master_addr", "master_port"), lambda config, _: config.parallel.nnodes > 1, "--nnodes 2 or more"),
    Rule(("mesh_port_range", "advertise_host", "key_file", "peer_timeout"), _has_nodes, "--listen and --join"),
    Rule(
        ("responses_store_count", "responses_store_bytes"),
        lambda config, _: config.server.responses_store != STORE_OFF,
        "a store of responses",
    ),
    Rule(("max_audio_bytes", "max_audio_seconds"), lambda _, facts: facts.transcribes, "models that transcribe audio"),
    Rule(("tool_parser_plugin",), lambda config, _: bool(config.server.tool_call_parser), "--tool-call-parser"),
    Rule(("reasoning_parser_plugin",), lambda config, _: bool(config.server.reasoning_parser), "--reasoning-parser"),
    Rule(("kv_cache_metrics_sample",), lambda config, _: config.observability.kv_cache_metrics, "--kv-cache-metrics"),
)


def notes(config: MeshConfig, facts: Facts) -> list[str]:
    """One line, or none. Of a settled configuration."""
    known = {setting.name: setting for setting in flags.settings()}
    idle: dict[str, str] = {}
    for rule in RULES:
        if rule.counts(config, facts):
            continue
        for name in rule.names:
            setting = known[name]
            if getattr(getattr(config, setting.section), name) != setting.default:
                idle.setdefault(setting.flag, rule.of)
    said = ", ".join(f"{flag} (it is of {of})" for flag, of in idle.items())
    return [f"without effect here: {said}"] if said else []
