"""One table of what is wrong with quantised checkpoints: each ends the start with one line that names the tensor or the key."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import packed_models
import pytest
import quantised_models
import torch
from gguf_models import SCALES_AT, write_gguf
from safetensors.torch import save_file
from small_models import load
from torch import Tensor

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.weights import load as loading
from meshlm.workers.weights.weights_plan import Form

UP = "model.layers.1.mlp.up_proj."
MISSING = r"1 tensor missing: layers\.1\.mlp\.up_proj\."
NO_NUMBER, NOT_POSITIVE = (
    "a scale must be a number, and one is not",
    "a scale must be a positive number, and one is not",
)
Write = Callable[[Path], dict[str, Tensor]]


def fp8(name: str) -> Write:
    return lambda folder: quantised_models.write(folder, quantised_models.KINDS[name])[1]


def packed(name: str) -> Write:
    return lambda folder: packed_models.write(folder, packed_models.KINDS[name])[1]


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(scales: Tensor) -> Tensor:
        found = scales.clone()
        found.view(-1)[-1] = value
        return found

    return spoil


NAN, INF, NEGATIVE = spoilt(torch.nan), spoilt(torch.inf), spoilt(-0.5)


@pytest.mark.parametrize(
    ("write", "tensor", "change", "said"),
    [
        (fp8("fp8-dynamic"), "weight_scale", None, MISSING + "weight_scale$"),
        (fp8("fp8-blocks"), "weight_scale_inv", None, MISSING + "weight_scale_inv$"),
        (fp8("fp8-blocks"), "weight_scale_inv", NAN, UP + "weight_scale_inv: " + NOT_POSITIVE),
        (fp8("compressed-channel"), "weight_scale", INF, UP + "weight_scale: " + NOT_POSITIVE),
        (fp8("compressed-channel"), "weight_scale", NEGATIVE, UP + "weight_scale: " + NOT_POSITIVE),
        (fp8("compressed-static"), "input_scale", NAN, UP + "input_scale: " + NOT_POSITIVE),
        (packed("gptq"), "scales", INF, UP + "scales: " + NO_NUMBER),
        (packed("gptq-act-order"), "g_idx", None, MISSING + "g_idx$"),
        (packed("awq"), "scales", NAN, UP + "scales: " + NO_NUMBER),
        (packed("awq"), "qzeros", None, MISSING + "qzeros$"),
        (packed("w4a16"), "weight_scale", NAN, UP + "weight_scale: " + NO_NUMBER),
        (packed("w4a16"), "weight_scale", None, MISSING + "weight_scale$"),
        (packed("w4a16-zeros"), "weight_zero_point", None, MISSING + "weight_zero_point$"),
        (packed("mxfp4"), "weight_scale", spoilt(255), UP + "weight_scale: " + NO_NUMBER),
        (packed("mxfp4"), "weight_scale", None, MISSING + "weight_scale$"),
        (packed("w8a16"), "weight_packed", None, MISSING + "weight_packed$"),
    ],
)
def test_scales(
    write: Write, tensor: str, change: Callable[[Tensor], Tensor] | None, said: str, tmp_path: Path
) -> None:
    tensors = dict(write(tmp_path))
    old = tensors.pop(UP + tensor)
    if change is not None:
        tensors[UP + tensor] = change(old)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((ProcessFatal, ModelFilesError), match=said) as told:
        load(tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("form", [Form.PANELS, Form.PACKED, Form.DECODED])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_scales_inside_the_blocks_of_a_gguf_file(
    kind: str, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes stay as they are: without a look at them nobody would know before the answers are garbage."""
    path = tmp_path / "m.gguf"
    write_gguf(path, {"": kind})
    monkeypatch.setattr(loading, "form_of", lambda *_: (form, ""))
    load(path)
    tensor = next(one for one in gguf.GGUFReader(path, "r+").tensors if one.name == "blk.1.ffn_up.weight")
    tensor.data[7, SCALES_AT[kind][-1] : SCALES_AT[kind][-1] + 2] = np.array([np.inf], np.float16).view(np.uint8)
    tensor.data.flush()
    with pytest.raises(ProcessFatal, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight: " + NO_NUMBER):
        load(path)
