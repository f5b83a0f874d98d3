"""Experts of files that hold codes keep them on a GPU whose kernels compute right with them. Called by load.py, before weights are
read."""

import structlog
import torch

from meshlm.workers.formats.expert_codes import ExpertCodes
from meshlm.workers.formats.format import has_kernels
from meshlm.workers.formats.mxfp4 import MXFP4Format
from meshlm.workers.layers.moe import MoE
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.moe.registry import computes_gate

_log = structlog.get_logger()


def keep_codes(model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
    """Says to the formats of experts whether these keep their codes. A line in the log says why those of a GPU do not."""
    reasons = {}
    for mixture in model.mixtures():
        formats = [layer.format for layer in mixture.experts.linears()]
        codes = [format for format in formats if isinstance(format, ExpertCodes)]
        if len(codes) < len(formats) or any(isinstance(format, MXFP4Format) for format in formats):
            continue
        reason = why_decoded(mixture, codes, device, dtype)
        for format in codes:
            format.keeps_codes = not reason
        reasons[reason] = True
    for reason in filter(None, reasons):
        if device.type == "cuda":
            _log.warning("packed experts are decoded, and take more memory", reason=reason)


def why_decoded(mixture: MoE, formats: list[ExpertCodes], device: torch.device, dtype: torch.dtype) -> str:
    """Why these do not keep their codes; "" where they do."""
    if not has_kernels(device, dtype):
        return "the kernels compute in float16 and bfloat16, on GPUs of compute capability 8.0"
    if not computes_gate(mixture.moe, mixture.act):
        return "the kernels compute experts with a gate and an activation that they know"
    found = [format.codes_format for format in formats]
    kept = [format for format in found if format is not None]
    if len(kept) < len(found):
        return "the kernels do not read the codes of all of them"
    from meshlm.workers.moe.experts.self_test import of_packed

    return next((why for format in kept if (why := of_packed(dtype, device, format))), "")
