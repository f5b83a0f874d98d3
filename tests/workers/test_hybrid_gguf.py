"""The .gguf file of an LFM2, written as llama.cpp does, is the model of the folder it was made of."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_models import writer_of
from safetensors.torch import load_file
from served_engines import made

from meshlm.runtime.model_files import resolve_model
from meshlm.workers.weights.sources import sources

LFM2: tuple[str, dict[str, Any]] = (
    "Lfm2Config",
    {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 8,
    },
)


def test_a_gguf_file_of_lfm2(tmp_path: Path) -> None:
    """Convolutions' taps without their dimension of one, one tensor for the three parts of a product, heads of keys by layer."""
    made(LFM2, tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    assert spec.state is not None
    (architecture,) = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == "lfm2"]
    names = gguf.get_tensor_name_map(architecture, 4)
    writer = writer_of(path, "lfm2", spec)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.rope_theta)
    writer.add_head_count_kv([2 * attends for attends in spec.attention_layers])
    writer.add_shortconv_l_cache(spec.state.conv_kernel)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files
    for name, tensor in load_file(files[0]).items():
        known = names.get_name(name, (".weight", ".bias"))
        assert known is not None, name
        writer.add_tensor(known, (tensor.squeeze(1) if tensor.dim() == 3 else tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = resolve_model(str(path)).spec
    assert {name for name in spec.__struct_fields__ if getattr(read, name) != getattr(spec, name)} == {
        "rms_norm_eps"  # float32 in such a file
    }
    assert read.rms_norm_eps == pytest.approx(spec.rms_norm_eps)
    ours = {name: source.whole() for name, source in sources(path, "gguf", read, torch.device("cpu"), 0)}
    for name, source in sources(tmp_path, "safetensors", spec, torch.device("cpu"), 0):
        assert torch.equal(ours[name], source.whole()), name
