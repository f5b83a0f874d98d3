"""Packed weights on a GPU: words stay in memory, and logits are as near to float32's as the decoded weights are in bfloat16."""

from copy import deepcopy
from pathlib import Path

import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import packed_models
import quantised_models
from engine_driver import engine
from gguf_models import SPEC, write_gguf
from near_transformers import errors, history
from small_models import resolved

from meshlm.kernels.packed_gemm.reference import PackedWeight, decode
from meshlm.workers.formats.packed import GGUFFormat, PackedFormat
from meshlm.workers.layers.elements import Linear
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.weights_plan import WeightsPlan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("copy", ["never", "auto"])
@pytest.mark.parametrize("name", packed_models.KINDS)
def test_error_is_no_worse_than_the_values_in_bfloat16(name: str, copy: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request; with values beside the words, and without."""
    theirs, _ = packed_models.write(tmp_path, packed_models.KINDS[name], **quantised_models.LARGER)
    driver = history(engine(tmp_path, load_format="auto", cudagraph_mode=mode, decoded_copy=copy))
    method = driver.engine.model.get_submodule("layers.0.attention.qkv").format
    assert isinstance(method, PackedFormat)
    assert method.keeps_values is (copy == "auto")
    assert isinstance(method.weight, PackedWeight)
    if method.weight.table is None:  # codes of a table are decoded for each product
        assert method.weight.one_row
        assert method.weight.some_rows, "its proof failed"
    ours, error = errors(deepcopy(theirs), driver)  # which leaves it in bfloat16; others get the same model
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, the values' own {error:.4f}"


@pytest.mark.parametrize("kinds", [{"v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"}, {"": "Q8_0"}, {"": "Q5_K"}])
def test_gguf_weights_are_packed_and_give_their_values(kinds: dict[str, str], tmp_path: Path) -> None:
    path, gpu = tmp_path / "m.gguf", torch.device("cuda")
    write_gguf(path, kinds, SPEC)
    asked = msgspec.structs.replace(resolved(path), dtype="bfloat16", device="cuda")
    with torch.inference_mode():
        model = load_model(asked, gpu, 0, lambda done, total: None, plan=WeightsPlan("packed", "cuda"))
        for name in ("attention.qkv", "mlp.down"):
            product = model.get_submodule(f"layers.0.{name}")
            assert isinstance(product, Linear)
            assert isinstance(product.format, GGUFFormat)
            assert all(weight.some_rows for weight in product.format.weights), "a proof failed"
            values = torch.cat([decode(weight, torch.float32) for weight in product.format.weights])
            for rows in (1, 5, 50, 200):
                x = torch.randn(rows, product.inputs, dtype=torch.bfloat16, device=gpu)
                found, wanted = product(x, model.ops).float(), x.float() @ values.t()
                assert float((found - wanted).abs().max() / wanted.std()) < 0.05
