"""Flags that a model which transcribes audio does not go with. Called by resolve.py."""

import importlib.util

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.extras import how_to_install
from meshlm.supervisor.errors import UsageError


def check_packages(config: MeshConfig) -> None:
    """UsageError where frontends could not read the audio of a model that writes them down."""
    assert config.resolved is not None
    missing = [name for name in ("av", "python_multipart") if not importlib.util.find_spec(name)]
    if config.resolved.speech is not None and missing and not config.network.headless:
        raise UsageError(
            f"{config.resolved.spec.architecture}: packages that read audio are not installed; {how_to_install('audio')}"
        )


def check(config: MeshConfig, spec: ModelSpec, *, pools: bool) -> None:
    """UsageError for flags that cannot be honoured. pools: the server is to give vectors."""
    if spec.audio_encoder is None:
        return
    parallel, cache = config.parallel, config.cache
    if pools:
        raise UsageError(f"--runner pooling: {spec.architecture} transcribes audio, and gives no vectors; leave it out")
    for flag, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            raise UsageError(
                f"{flag} {size}: one worker has all of {spec.architecture}; use --data-parallel-size for more of them"
            )
    if cache.kv_cache_dtype != "auto":
        why = f"keys and values of the encoder of {spec.architecture} are not kept in 8 bits"
        raise UsageError(f"--kv-cache-dtype {cache.kv_cache_dtype}: {why}; use auto")
    if spec.quantization is not None:
        raise UsageError(
            f"--quantization {spec.quantization.method}: it is not there for {spec.architecture}; leave it out"
        )
    if config.server.grpc:
        raise UsageError(f"--grpc: its service takes no audio, which {spec.architecture} needs; leave it out")
