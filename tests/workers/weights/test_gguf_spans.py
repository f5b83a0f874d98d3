"""Models of .gguf files whose weights stay packed as on a GPU: what decoded weights give, in far less memory, also in shards."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import SPEC, write_gguf
from msgspec.structs import replace
from sharded_models import load_shards, logits_of, together
from small_models import caches, load, run

from meshlm.workers.formats.packed import DecodedGGUF, GGUFFormat, Span
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.elements import Linear
from meshlm.workers.weights import load as loading
from meshlm.workers.weights.gguf_parameters import keep_spans, merged
from meshlm.workers.weights.load import weight_bytes

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
CASES = {
    "Q4_K_M": {"v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"},
    "Q8_0": {"": "Q8_0"},
    "some": {"up_proj": "Q2_K", "o_proj": "Q5_K", "": "Q4_1"},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    monkeypatch.setattr(loading, "keep", lambda model, tensors, exact: keep_spans(model, tensors))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_logits_are_those_of_decoded_weights(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, chance = tmp_path / "m.gguf", random.Random(0)
    write_gguf(path, CASES[case])
    ours = load(path)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "keep", lambda model, tensors, exact: {})
        theirs = load(path)
    kinds = {name: type(module.format) for name, module in ours.named_modules() if isinstance(module, Linear)}
    packed = {name for name, kind in kinds.items() if kind is GGUFFormat}
    assert packed == {name for name in kinds if case != "some" or "gate_up" not in name}
    tokens = [chance.randrange(301) for _ in range(33)]
    expected = run(theirs, caches(SPEC, 24), [(tokens, 0, TABLE)])
    assert expected.std() > 0.01
    torch.testing.assert_close(run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)]), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_that_are_decoded_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded packed, and are plain weights afterwards, which every fused kernel takes."""
    path, tokens = tmp_path / "m.gguf", list(range(20))
    write_gguf(path, CASES["some"])
    with monkeypatch.context() as patch:
        patch.setattr(loading, "keep", lambda model, tensors, exact: {})
        theirs = load(path)
    monkeypatch.setattr(loading, "keep", lambda model, tensors, exact: keep_spans(model, tensors, DecodedGGUF))
    ours = load(path)
    layer = ours.get_submodule("layers.0.attention.qkv")
    assert isinstance(layer, Linear)
    assert layer.is_fusible
    for (name, weight), (_, right) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert weight.shape == right.shape, name
        torch.testing.assert_close(weight, right, atol=1e-7, rtol=1e-6)
    expected = run(theirs, caches(SPEC, 24), [(tokens, 0, TABLE)])
    torch.testing.assert_close(run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)]), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", [GGUFFormat, DecodedGGUF])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_that_are_multiplied_while_they_load(
    method: type[GGUFFormat | DecodedGGUF], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite's: codes cannot be, so those are decoded, and the others stay packed."""
    path, tokens = tmp_path / "m.gguf", list(range(20))
    granite = replace(SPEC, architecture="GraniteForCausalLM", multipliers=(3.0, 0.5, 0.4))
    write_gguf(
        path, CASES["Q8_0"], granite, architecture="granite", embedding_scale=3.0, logit_scale=0.5, residual_scale=0.4
    )
    with monkeypatch.context() as patch:
        patch.setattr(loading, "keep", lambda model, tensors, exact: {})
        theirs = load(path)
    kept: dict[str, object] = {}
    monkeypatch.setattr(
        loading, "keep", lambda model, tensors, exact: kept.update(found := keep_spans(model, tensors, method)) or found
    )
    ours = load(path)
    packed = {name.removeprefix("layers.0.").removeprefix("layers.1.") for name in kept}
    assert packed == {"attention.qkv.weight", "mlp.gate_up.weight", "head.weight"}
    expected = run(theirs, caches(SPEC, 24), [(tokens, 0, TABLE)])
    torch.testing.assert_close(run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)]), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", [GGUFFormat, DecodedGGUF])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_shards(
    case: str, method: type[GGUFFormat | DecodedGGUF], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have rows of some products, and columns of others: half a block of a K-quant is decoded while it is read."""
    path, tokens = tmp_path / "m.gguf", list(range(20))
    write_gguf(path, CASES[case])
    monkeypatch.setattr(loading, "keep", lambda model, tensors, exact: keep_spans(model, tensors, method))
    expected = run(load(path), caches(SPEC, 24), [(tokens, 0, TABLE)])
    found = together(load_shards(path, 2, 1), lambda model, comm: logits_of(model, comm, tokens))
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_file_s_bytes_are_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, CASES["Q4_K_M"])
    sizes: list[int] = []

    def prepare(model: Any, *rest: Any) -> None:
        sizes.append(weight_bytes(model))

    monkeypatch.setattr("meshlm.workers.models.decoder.Decoder.prepare", prepare)
    load(path)
    monkeypatch.setattr(loading, "keep", lambda model, tensors, exact: {})
    load(path)
    assert sizes[0] < 0.35 * sizes[1]


def test_neighbours_of_one_type_are_one_product() -> None:
    query, key, value = Span(64, 12, 144), Span(16, 12, 144), Span(16, 14, 210)
    assert merged([query, key, value]) == (Span(80, 12, 144), value)
    assert merged([query, value, key]) == (query, value, key)
