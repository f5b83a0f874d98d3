"""Files of mixtures of experts: .gguf files with a layer's experts in one tensor, checkpoints that lack or exceed the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import writer_of
from safetensors.torch import load_file, save_file
from small_models import MOE, SMALL, caches, load, resolved, run

from meshlm.architectures.registry import weights_of
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files import resolve_model
from meshlm.workers.weights.load import load_model

KINDS = {"mixtral": "llama", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe"}
Tensors = dict[str, torch.Tensor]


def checkpoint(case: str, folder: Path) -> Tensors:
    """A small model of transformers, saved; its tensors as they are in the files."""
    import transformers

    torch.manual_seed(0)
    name, extra = MOE[case]
    sizes = {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, **extra}
    config = getattr(transformers, name)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    found: Tensors = load_file(file)
    return found


def write(path: Path, kind: str, spec: ModelSpec, tensors: Tensors) -> None:
    """As llama.cpp converts them: experts stacked, rows of query and key heads interleaved for kind llama."""
    moe = spec.moe
    assert moe is not None
    writer = writer_of(path, kind, spec)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.rope_theta)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.num_experts_per_tok)
    if kind != "llama":
        writer.add_expert_feed_forward_length(moe.moe_intermediate_size)
    if moe.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    stacks: dict[str, list[torch.Tensor]] = {}
    for weight in weights_of(spec).values():
        values = tensors[weight.name]
        if kind == "llama" and (".attn_q." in weight.gguf or ".attn_k." in weight.gguf):
            values = values.view(-1, 2, spec.head_dim // 2, spec.hidden_size).swapaxes(1, 2).reshape(values.shape)
        stacks.setdefault(weight.gguf, []).append(values)
    for name, parts in stacks.items():
        whole = torch.stack(parts) if "_exps." in name else parts[0]
        whole = whole[0] if name.endswith("ffn_gate_inp_shexp.weight") else whole
        writer.add_tensor(name, whole.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", KINDS)
def test_a_gguf_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    folder, path, extra = tmp_path / "hf", tmp_path / "m.gguf", MOE[case][1]
    assert extra.get("norm_topk_prob", case == "mixtral") == (case != "qwen2-moe"), "what llama.cpp takes for granted"
    tensors = checkpoint(case, folder)
    theirs = load(folder)
    write(path, KINDS[case], theirs.spec, tensors)
    ours = load(path)
    assert ours.spec.architecture == theirs.spec.architecture
    tokens, table = torch.randint(0, 211, (19,)).tolist(), [0, 1, 2, 3, 4]
    found, expected = (run(model, caches(model.spec, 5), [(tokens, 0, table)]) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_gguf_file_with_fewer_experts_than_it_says(tmp_path: Path) -> None:
    folder, path = tmp_path / "hf", tmp_path / "m.gguf"
    tensors = checkpoint("qwen3-moe", folder)
    spec = resolve_model(str(folder)).spec
    write(path, "qwen3moe", spec, tensors)
    data = path.read_bytes()
    count = b"qwen3moe.expert_count" + (4).to_bytes(4, "little")
    assert count + (6).to_bytes(4, "little") in data
    path.write_bytes(data.replace(count + (6).to_bytes(4, "little"), count + (7).to_bytes(4, "little")))
    with pytest.raises(ProcessFatal, match=r"ffn_gate_exps.weight has shape \(6, 36, 64\).* for 7 experts"):
        load(path)


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = {**load_file(file), **changes}
    save_file({name: values for name, values in tensors.items() if values is not None}, file, {"format": "pt"})


EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{EXPERT}.4.down_proj.weight": None}, "1 tensor missing: layers.1.mlp.experts.4.down_proj.weight"),
        ({f"{EXPERT}.6.up_proj.weight": torch.zeros(36, 64)}, f"does not have: {EXPERT}.6.up_proj.weight"),
        ({f"{EXPERT}.0.up_proj.weight": torch.zeros(35, 64)}, "of another shape .*experts.0.up_proj.weight"),
        ({"model.layers.0.mlp.gate.weight": None}, "missing: layers.0.mlp.gate.weight"),
    ],
)
def test_tensors_of_experts_are_checked_by_name(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    checkpoint("qwen3-moe", tmp_path)
    change(tmp_path, changes)
    with pytest.raises(ProcessFatal, match=message):
        load(tmp_path)


BAD = [
    ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
    ("qwen3-moe", {"num_experts": 5}, "num_experts and num_local_experts differ"),
    ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts differ|num_experts is 0"),
    ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("qwen3-moe", {"decoder_sparse_step": 9}, "leave no layer with experts"),
    ("qwen2-moe", {"moe_intermediate_size": "36"}, "moe_intermediate_size must be an integer"),
    ("qwen2-moe", {"moe_layer_freq": 2}, "moe_layer_freq 2 changes what the model computes"),
    ("mixtral", {"num_local_experts": 1}, "num_local_experts is 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), BAD)
def test_a_config_that_cannot_be_honoured(case: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    import transformers

    name, extra = MOE[case]
    config = getattr(transformers, name)(**{**SMALL, **extra}).to_dict()
    family = {"mixtral": "Mixtral", "qwen2-moe": "Qwen2Moe", "qwen3-moe": "Qwen3Moe"}[case]
    config |= {"architectures": [f"{family}ForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match=message):
        resolve_model(str(tmp_path), load_format="dummy")


def test_a_quantised_router_is_refused_by_name(tmp_path: Path) -> None:
    """Whatever a config says of all linear layers: files hold routers in full."""
    checkpoint("qwen3-moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and tensor.dim() == 2:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
    ones = {f"{name}_scale": torch.ones(1) for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    routers = {name for name in ones if ".mlp.gate." in name}
    save_file({**tensors, **{name: ones[name] for name in ones.keys() - routers}}, file, {"format": "pt"})
    with pytest.raises(ProcessFatal, match=r"of a type that is not read .*layers.0.mlp.gate.weight \(F8_E4M3\)"):
        load(tmp_path)


def test_a_load_of_thousands_of_tensors_is_told_in_few_pieces(tmp_path: Path) -> None:
    """Each piece is a message to the supervisor."""
    checkpoint("qwen3-moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_local_experts": 200, "num_experts": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen: list[tuple[int, int]] = []
    load_model(resolved(tmp_path, "dummy"), torch.device("cpu"), 0, lambda done, total: seen.append((done, total)))
    assert len(weights_of(resolved(tmp_path, "dummy").spec)) > 1800
    assert len(seen) < 260
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
