"""Experts of a checkpoint that has them as MXFP4: kept so on a GPU, where kernels/mxfp4_experts decodes what it multiplies.

Elsewhere, and where this says why not, they are decoded to the model's dtype while they are read (workers/weights/expert_tensors.py).
"""

from collections.abc import Callable, Iterable

import structlog
import torch

from meshlm.kernels.mxfp4.reference import GROUP
from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.formats.mxfp4 import MXFP4Format
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.expert_tensors import MXFP4Source
from meshlm.workers.weights.slices import place
from meshlm.workers.weights.source import Source

_log = structlog.get_logger()
Tensors = Callable[[], Iterable[tuple[str, Source]]]


def kept(resolved: Resolved, tensors: Tensors, shard: Shard, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the experts of this shard stay MXFP4. A line in the log says why those of a GPU do not."""
    spec = resolved.spec
    if spec.moe is None or spec.quantization is None or spec.quantization.method != "mxfp4" or device.type != "cuda":
        return False
    reason = _of_files(resolved, tensors) or unfit(spec, shard) or _of_device(device, dtype)
    if reason:
        _log.warning("MXFP4 experts are decoded while they are read, and take four times the memory", reason=reason)
    return not reason


def use(model: Decoder) -> None:
    """Makes the parameters of experts those of MXFP4, on the meta device."""
    for mixture in model.mixtures():
        for linear in mixture.experts.linears():
            linear.use(MXFP4Format())


def unfit(spec: ModelSpec, shard: Shard) -> str:
    """Why experts of these sizes cannot stay MXFP4: a scale is for 32 inputs, which two ranks cannot have parts of."""
    assert spec.moe is not None
    begin, end = shard.wide(spec.moe.moe_intermediate_size, of_expert=True)
    for what, inputs in (("gate and up have", spec.hidden_size), ("on this rank down has", end - begin)):
        if inputs % GROUP:
            return f"{what} {inputs} inputs, no multiple of the {GROUP} that have a scale together"
    return ""


def _of_files(resolved: Resolved, tensors: Tensors) -> str:
    """Why the files' experts are not all MXFP4."""
    if resolved.load_format == "dummy":
        return ""
    if resolved.load_format in ("gguf", "sharded_state"):
        return f"--load-format {resolved.load_format}"
    for name, source in tensors():
        found = place(name, resolved.spec, _ONE)
        if (
            found is not None
            and found.expert is not None
            and name.endswith(".weight")
            and not isinstance(source, MXFP4Source)
        ):
            return f"the files have {name} of type {source.dtype}"
    return ""


def _of_device(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels do not compute them here."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels compute in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0"
    from meshlm.workers.moe.experts.self_test import of_packed

    return of_packed(dtype, device)


_ONE = Shard()
