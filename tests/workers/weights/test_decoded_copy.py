"""When packed weights are decoded, too, and that the layers which are packed are told so."""

from pathlib import Path

import pytest
import torch
from packed_models import KINDS, write
from small_models import resolved

from meshlm.workers.formats.packed import PackedFormat
from meshlm.workers.layers.elements import Linear
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.weights_plan import WeightsPlan, keep_values, pays

GB = 1 << 30
H200 = WeightsPlan(device="cuda", compiled=False, available=120 * GB, request=4 * GB)


@pytest.mark.parametrize(
    ("changes", "weights", "copy", "kept", "why"),
    [
        ({}, 6 * GB, 14 * GB, True, "decoded they take 14.00 GiB, of 108.00 GiB that the packed ones leave"),
        ({}, 6 * GB, 27 * GB, True, "decoded they take 27.00 GiB"),  # a quarter
        ({}, 6 * GB, 28 * GB, False, "decoded they take 28.00 GiB"),
        ({"request": 95 * GB}, 6 * GB, 14 * GB, False, "of 108.00 GiB"),
        ({"cache": 94 * GB}, 6 * GB, 14 * GB, True, "of 108.00 GiB"),
        ({"cache": 95 * GB}, 6 * GB, 14 * GB, False, "of 108.00 GiB"),
        ({"ranks": 2}, 6 * GB, 14 * GB, False, "all ranks must do the same"),
        ({"ranks": 2, "copy": "always"}, 6 * GB, 140 * GB, True, "--decoded-copy always"),
        ({"copy": "never"}, 6 * GB, 1 * GB, False, "--decoded-copy never"),
        ({}, 200 * GB, 14 * GB, False, "of 0 bytes that"),
    ],
)
def test_whether_it_pays(changes: dict[str, object], weights: int, copy: int, kept: bool, why: str) -> None:
    found, reason = pays(H200._replace(**changes), weights, copy)  # type: ignore[arg-type]
    assert found is kept
    assert why in reason


def test_packed_layers_are_told(tmp_path: Path) -> None:
    """Those of layer 0's MLP are not quantised."""
    write(tmp_path, KINDS["awq-some"])
    model = load_model(resolved(tmp_path), torch.device("cpu"), 0, lambda done, total: None, prepare=False)
    linears = [one for one in model.modules() if isinstance(one, Linear)]
    packed = [one for one in linears if isinstance(one.format, PackedFormat)]
    assert 0 < len(packed) < len(linears)
    assert keep_values(model, WeightsPlan(device="cpu"), 0, torch.float16) == 0
    assert keep_values(model, H200._replace(copy="never"), 0, torch.float16) == 0
    assert not any(one.format.keeps_values for one in packed if isinstance(one.format, PackedFormat))
    taken = keep_values(model, H200, 0, torch.float16)
    assert taken == 2 * sum(one.inputs * one.outputs for one in packed)
    assert all(one.format.keeps_values for one in packed if isinstance(one.format, PackedFormat))
