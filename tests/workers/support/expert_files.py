"""Checkpoints of small mixtures of experts, with experts as MXFP4 or as floats, and changes to their files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_models import MOE, SMALL

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts"


def checkpoint(case: str, folder: Path) -> Tensors:
    """A small model of transformers, saved; its tensors as they are in the files."""
    import transformers

    torch.manual_seed(0)
    name, extra = MOE[case]
    sizes = {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, **extra}
    if case == "gpt-oss":
        sizes["intermediate_size"] = 96  # a multiple of the 32 that share a scale
    config = getattr(transformers, name)(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.normal_()
    theirs.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    found: Tensors = load_file(file)
    return found


def as_mxfp4(folder: Path, *, files: int = 1) -> Tensors:
    """A gpt-oss checkpoint as OpenAI writes it: blocks and scales, of random codes. The values that they stand for, as transformers
    decodes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = checkpoint("gpt-oss", folder), Tensors()
    (file,) = folder.glob("*.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config))
    file.unlink()
    for nth in range(files):  # codes and scales in different files
        own = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % files == nth}
        save_file(own, folder / f"model-{nth}.safetensors", {"format": "pt"})
    return {**{name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8}, **values}


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = {**load_file(file), **changes}
    save_file({name: values for name, values in tensors.items() if values is not None}, file, {"format": "pt"})
