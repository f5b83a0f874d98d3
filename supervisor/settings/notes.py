"""What a start says of settings that mean something else than one may think, or have no effect beside the others.

Those that contradict one another are refused elsewhere. Called by resolve.py.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.server import STORE_OFF
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.model import ModelSpec
from meshlm.supervisor.settings import flags
from meshlm.supervisor.settings.placement import has_others

BUILT_IN = ("cpu", "cuda", "fake")  # plug-ins of devices may use any setting


class Facts(NamedTuple):
    """What decides beside the configuration."""

    device: str
    transcribes: bool
    media: MediaSpec | None = None


def of_drafting_layers(config: MeshConfig, spec: ModelSpec) -> list[str]:
    """The layers behind a model's last, which mtp drafts with."""
    if not (count := spec.num_nextn_predict_layers) or config.speculative.method == "mtp":
        return []
    return [f"num_nextn_predict_layers {count}: the layers that draft further tokens are not loaded"]


class Rule(NamedTuple):
    """Settings, when they have an effect, and what they are of."""

    names: tuple[str, ...]
    counts: Callable[[MeshConfig, Facts], bool]
    of: str


def _on(*devices: str) -> Callable[[MeshConfig, Facts], bool]:
    return lambda config, facts: facts.device in devices or facts.device not in BUILT_IN


def _has_nodes(config: MeshConfig, facts: Facts) -> bool:
    return bool(config.network.listen or config.network.join)


def _drafts(config: MeshConfig, facts: Facts) -> bool:
    return bool(config.speculative.method or config.worker.fake_drafts)


def _hears(_: MeshConfig, facts: Facts) -> bool:
    return facts.transcribes or (facts.media is not None and Modality.AUDIO in facts.media.modalities)


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
    Rule(("dbo_decode_token_threshold",), lambda c, _: c.experts.enable_dbo, "--enable-dbo"),
    Rule(("dbo_prefill_token_threshold",), lambda c, _: c.experts.enable_dbo, "--enable-dbo"),
    Rule(
        ("master_addr", "master_port"),
        lambda config, _: config.parallel.nnodes > 1 or (config.lockstep and has_others(config)),
        "--nnodes 2 or more, and ranks of several nodes that share experts",
    ),
    Rule(("mesh_port_range", "advertise_host", "key_file", "peer_timeout"), _has_nodes, "--listen and --join"),
    Rule(
        ("responses_store_count", "responses_store_bytes"),
        lambda config, _: config.server.responses_store != STORE_OFF,
        "a store of responses",
    ),
    Rule(("record_requests_bytes",), lambda config, _: bool(config.server.record_requests), "--record-requests"),
    Rule(("max_audio_bytes",), lambda _, facts: facts.transcribes, "models that transcribe audio"),
    Rule(("max_audio_seconds",), _hears, "models that transcribe audio or take it in chats"),
    Rule(
        (
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "lora_dtype",
            "lora_target_modules",
            "fully_sharded_loras",
            "allow_runtime_lora_updating",
            "lora_resolver_dir",
        ),
        lambda config, _: config.adapters.enable_lora,
        "--enable-lora",
    ),
    Rule(("per_request_spec_decode_metrics",), _drafts, "--speculative-config"),
    Rule(("tool_parser_plugin",), lambda config, _: bool(config.server.tool_call_parser), "--tool-call-parser"),
    Rule(("reasoning_parser_plugin",), lambda config, _: bool(config.server.reasoning_parser), "--reasoning-parser"),
    Rule(("kv_cache_metrics_sample",), lambda config, _: config.observability.kv_cache_metrics, "--kv-cache-metrics"),
)


def of_idle(config: MeshConfig, facts: Facts) -> list[str]:
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


def of_halves(config: MeshConfig, max_num_seqs: int, max_num_batched_tokens: int) -> list[str]:
    """That --enable-dbo halves no step: a step of decodes has a token for each request, one with prompts up to its budget."""
    settings = config.experts
    decode = settings.dbo_decode_token_threshold
    prefill = settings.prefill_threshold(config.parallel.data_parallel_size)
    if not settings.enable_dbo or max(2, decode) <= max_num_seqs or prefill <= max_num_batched_tokens:
        return []
    return [
        f"--enable-dbo: no step is halved: --dbo-prefill-token-threshold is {prefill} and a step has at most {max_num_batched_tokens} "
        f"tokens, --dbo-decode-token-threshold is {decode} and at most {max_num_seqs} requests decode; lower one of them "
        "(docs/moe.md has what halves gain)"
    ]


def of_rotation(spec: ModelSpec, max_model_len: int) -> Iterator[str]:
    """LongRoPE has two sets of factors, and a server has one table of angles."""
    rope = spec.rope
    original = rope.original_max_position_embeddings or spec.max_position_embeddings
    if rope.rope_type == "longrope" and rope.short_factor != rope.long_factor and max_model_len > original:
        yield (
            f"longrope: with --max-model-len {max_model_len} all texts are turned by long_factor, short ones too; "
            f"--max-model-len {original} takes short_factor, which texts of up to {original} tokens were trained with"
        )
