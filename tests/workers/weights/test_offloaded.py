"""Weights on the host: the model computes what it does without, whatever is in the slots before; and which weights they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import MODEL, Driver, engine, prompts_of
from torch import Tensor, nn

from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine import engine as engine_module
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.formats import offloaded
from meshlm.workers.formats.format import UNQUANTIZED, WeightedLayer
from meshlm.workers.formats.offloaded import HostCopies, OffloadedFormat, OffloadedWeights
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.weights import offload
from meshlm.workers.weights.reload import sum_of, why_not
from meshlm.workers.weights.weights_plan import WeightsPlan, weights_plan

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 24, "max_num_seqs": 2}
CONFIG = MODEL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "head_dim": 16}
LAYER = 4 * 64 * (2 * 8 * 16 + 2 * 2 * 16 + 3 * 96)  # bytes of its linear layers
IN_SLOTS = 2 * 4 * 64 * (192 + 128 + 96)  # two of each size: qkv and gate_up, o, down


class LateCopies:
    """A stream in which a copy is done only when somebody waits for it, and each in its turn; what comes too early or is never waited
    for shows."""

    def __init__(self) -> None:
        self.left: list[tuple[Tensor, Tensor]] = []
        self.num_begun = self.num_done = 0

    def mark(self) -> int:
        return self.num_begun

    def copy(self, to: Tensor, host: Tensor, behind: int) -> int:
        to.view(torch.uint8).fill_(255)  # nobody may use what is there any more
        self.left.append((to, host))
        self.num_begun += 1
        return self.num_begun

    def wait(self, mark: int) -> None:
        while self.num_done < mark:
            to, host = self.left.pop(0)
            to.copy_(host)
            self.num_done += 1


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, *names: str) -> ModelEngine:
    """An engine of a CPU of whose weights so many bytes are copied, as on a GPU."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if num_bytes:

        def plan(*arguments: Any) -> WeightsPlan:
            return weights_plan(*arguments)._replace(offload_bytes=num_bytes, offload_names=names)

        monkeypatch.setattr(engine_module, "weights_plan", plan)
        monkeypatch.setattr(offload, "HostCopies", LateCopies)
    return engine(folder, **SMALL)


def logits(of: ModelEngine) -> list[Tensor]:
    driver = Driver(of, prompts_of([19, 5]), SamplingParams(max_tokens=9, temperature=0.0))
    driver.step({0: 9})
    driver.step({0: 10, 1: 5})
    for _ in range(4):
        driver.step({0: 1, 1: 1})
    of.reset()
    return [seen.logits for seen in driver.seen]


@pytest.mark.parametrize("share", [3, 4, 6, 7])
def test_the_same_logits_from_weights_on_the_host(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some layers, and of all; two of each size have room on the device."""
    wanted = logits(made(tmp_path, monkeypatch, 0))
    one = made(tmp_path, monkeypatch, share * LAYER - IN_SLOTS)
    copied = [nth for nth, layer in enumerate(one.model.layers) if offload.is_offloaded(layer)]
    assert len(copied) == share
    assert copied[-1] == 6
    for _ in range(2):
        for got, expected in zip(logits(one), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    formats = (getattr(module, "format", None) for module in one.model.modules())
    (copies,) = {found.weights._copies for found in formats if isinstance(found, OffloadedFormat)}
    assert isinstance(copies, LateCopies)
    assert not copies.left, "a copy that nobody waits for is under way when a step ends"


def test_only_weights_with_these_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(tmp_path, monkeypatch, 1, "mlp")
    paths = [
        path
        for path, module in one.model.named_modules()
        if offload.is_offloaded(module) and isinstance(module, WeightedLayer)
    ]
    assert paths == [f"layers.{layer}.mlp.{name}" for layer in (1, 3, 6) for name in ("gate_up", "down")]


@pytest.mark.parametrize(
    ("num_bytes", "names", "said"),
    [
        (1 << 40, ("mlp",), "--cpu-offload-gb 1024: linear layers with these names that are not quantised can save "),
        (1 << 40, (), "--cpu-offload-gb 1024: linear layers that are not quantised can save "),
        (
            1,
            ("experts",),
            "--cpu-offload-params experts: no linear layer has that name; there are down_proj, gate_up_proj, mlp, ",
        ),
    ],
)
def test_what_there_is_not_is_refused_by_name(
    num_bytes: int, names: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProcessFatal) as raised:
        made(tmp_path, monkeypatch, num_bytes, *names)
    assert said in str(raised.value)


def test_weights_on_the_host_are_not_replaced_and_their_sum_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path, monkeypatch, 3 * LAYER)
    before = sum_of(one.models)
    logits(one)
    assert sum_of(one.models) == before
    assert "--cpu-offload-gb" in why_not(one, one.resolved)


def weights_of(sizes: list[int], copies: Any) -> tuple[OffloadedWeights, list[WeightedLayer]]:
    """Layers of these numbers of outputs, each weight full of its own number."""
    found, layers = OffloadedWeights(copies, torch.device("cpu"), Tensor.clone), list[WeightedLayer]()
    for size in sizes:
        with torch.device("meta"):
            layers.append(WeightedLayer(4, size, UNQUANTIZED, bias=False))
        found.add(layers[-1])
    ops = TorchOps()
    for nth, layer in enumerate(layers):
        layer.weight.data.fill_(nth)
        layer.prepare(ops)
    return found, layers


@pytest.mark.parametrize("sizes", [[3], [3, 3, 3, 3, 3], [3, 5, 3, 5, 3, 5, 5], [1, 2, 3]])
@pytest.mark.parametrize("order", ["as made", "reversed", "some"])
def test_each_layer_finds_its_own_weight(sizes: list[int], order: str) -> None:
    """Also where layers are left out, as while kernels are compiled, or come in another order."""
    copies = LateCopies()
    found, layers = weights_of(sizes, copies)
    used = {"as made": layers, "reversed": layers[::-1], "some": layers[::2]}[order]
    assert sum(slots.nbytes for slots in found.slots) == offloaded.SLOTS * len(set(sizes)) * offloaded.ALIGN
    for _ in range(3):
        found.begin()
        for layer in used:
            out = layer.format.apply(layer, torch.ones(1, 4), TorchOps())
            assert out.eq(4 * layers.index(layer)).all()
        found.end()
        assert not copies.left


def test_copies_begin_ahead_of_their_use() -> None:
    """Two of a size are on their way before the first is used; in order each is copied once a step."""
    copies = LateCopies()
    found, layers = weights_of([3] * 6, copies)
    begun = []
    for _ in range(2):
        found.begin()
        for layer in layers:
            begun.append(copies.num_begun)
            layer.format.apply(layer, torch.ones(1, 4), TorchOps())
        found.end()
    assert begun == [2, 3, 4, 5, 6, 6, 8, 9, 10, 11, 12, 12]


def test_where_the_device_is_the_host_copies_are_done_at_once() -> None:
    found, layers = weights_of([2, 2, 2], HostCopies())
    found.begin()
    assert [int(one.format.apply(one, torch.ones(1, 4), TorchOps())[0, 0]) for one in layers] == [0, 4, 8]
    assert isinstance(layers[0].weight, nn.Parameter)
