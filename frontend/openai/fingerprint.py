"""The `system_fingerprint` of answers: with the same seed and fingerprint an answer is likely the same. Called by generation.py."""

import hashlib

import msgspec

from meshlm.protocol.config import MeshConfig


def system_fingerprint(config: MeshConfig, version: str) -> str | None:
    """The system_fingerprint that --fingerprint-mode asks for, in vLLM's form: version, division of the
    model, and a hash of what is computed and how."""
    mode = config.server.fingerprint_mode
    if mode == "none":
        return None
    if mode == "custom":
        return config.server.fingerprint_value
    resolved, parallel = config.resolved, config.parallel
    assert resolved is not None
    model = (resolved.spec, resolved.model_path, resolved.load_format, resolved.device, resolved.dtype)
    cache = (config.cache.kv_cache_dtype, config.cache.calculate_kv_scales)
    ways = (cache, config.worker.attention_backend, config.worker.compile)
    digest = hashlib.sha256(msgspec.json.encode((model, ways))).hexdigest()[:8]
    degrees = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
    }
    divided = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1 and mode == "full"]
    return "-".join([f"meshlm-{version}", *divided, digest])
