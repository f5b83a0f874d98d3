"""A quantisation: checkpoints whose config.json says quant_method tiny_scaled are read as those of fp8 are."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.quantization import formats, read_fp8
from meshlm.protocol.model import QuantizationSpec

NAME = "tiny_scaled"


def read(config: dict[str, Any]) -> QuantizationSpec:
    return replace(read_fp8({**config, "quant_method": "fp8"}), method=NAME)


FORMAT = formats()["fp8"]._replace(name=NAME, read=read, online=None)
