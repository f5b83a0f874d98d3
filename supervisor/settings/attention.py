"""Whether --attention-backend can compute this model on this device, as far as that is known before a worker has a GPU.

Called by resolve.py. Workers say the rest: what a GPU's kernels cannot do, or get wrong.
"""

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.attention_packages import PACKAGES
from meshlm.supervisor.errors import UsageError

NO_FP8 = ("cpu", *PACKAGES)  # they read a KV cache of the model's dtype


def check(config: MeshConfig, spec: ModelSpec, device: str, dtype: str) -> None:
    """UsageError for a backend that was asked for by name and cannot be had."""
    wanted = config.worker.attention_backend
    if wanted not in ("cpu", "torch", "triton", *PACKAGES) or device not in ("cpu", "cuda"):
        return
    if why := _unsupported(wanted, spec, device, dtype):
        raise UsageError(f"--attention-backend {wanted}: {why}; use auto")
    held = config.cache.kv_cache_dtype
    if held != "auto" and wanted in NO_FP8:
        raise UsageError(f"--kv-cache-dtype {held}: the attention backend {wanted} cannot read it; use auto")


def _unsupported(wanted: str, spec: ModelSpec, device: str, dtype: str) -> str:
    if wanted == "torch":
        return ""
    if spec.encoder_only:
        return "an encoder has no KV cache"
    if wanted == "cpu":
        return "it computes on the CPU" if device != "cpu" else "" if dtype == "float32" else "it computes in float32"
    if device != "cuda":
        return "it needs a CUDA device"
    if dtype == "float32":
        return "it computes in --dtype float16 or bfloat16, not float32"
    if wanted in PACKAGES and spec.mla is not None:
        return "it has no multi-head latent attention here"
    if wanted in PACKAGES and spec.head_dim not in PACKAGES[wanted].head_dims:
        sizes = ", ".join(map(str, PACKAGES[wanted].head_dims))
        return f"it is used for heads of {sizes} numbers, this model has {spec.head_dim}"
    return ""
