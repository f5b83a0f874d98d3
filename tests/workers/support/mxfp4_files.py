"""A checkpoint of gpt-oss whose experts are MXFP4, and transformers' model with the values that they stand for."""

import json
from pathlib import Path
from typing import Any

import torch
from near_transformers import transformers_model
from safetensors.torch import load_file, save_file

from meshlm.kernels.mxfp4.reference import GROUP, decode_mxfp4


def mxfp4_model(folder: Path) -> Any:
    """In float32; of random codes."""
    theirs = transformers_model("gpt-oss", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, parameter in theirs.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // GROUP, GROUP // 2), dtype=torch.uint8)
            scales = torch.randint(119, 122, (experts, outputs, inputs // GROUP), dtype=torch.uint8)
            parameter.data = decode_mxfp4(blocks, scales, torch.float32).transpose(1, 2).contiguous()
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif name.endswith(("_bias", "sinks", "router.bias")):
            parameter.data = torch.randn_like(parameter).mul(0.5).bfloat16().float()
            tensors[name] = parameter.data.clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return theirs
