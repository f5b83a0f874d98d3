"""Models of .gguf files whose weights stay encoded: to the last bit what decoded weights give."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import SPEC, write_gguf
from msgspec.structs import replace
from small_models import caches, load, resolved, run

from meshlm.architectures.layers import with_attention, with_mlps
from meshlm.kernels.cpu import packed
from meshlm.kernels.cpu.library import library
from meshlm.protocol.layers import Layers
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.gguf_files import GGUFTensor
from meshlm.workers.models.cpu_layers import fuse_decoder
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.gguf_source import GGUFTensorSource
from meshlm.workers.weights.load import load_model, weight_bytes
from meshlm.workers.weights.weights_plan import WeightsPlan

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
CASES = {
    "Q4_0": {"": "Q4_0"},
    "Q4_1 with a Q8_0 embedding": {"embed": "Q8_0", "": "Q4_1"},
    "Q5": {"q_proj": "Q5_0", "": "Q5_1"},
    "Q4_K_M": {"embed": "Q6_K", "v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"},
    "Q5_K": {"v_proj": "Q4_K", "": "Q5_K"},
}


def decoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The same model without quantised parameters."""
    with monkeypatch.context() as patch:
        patch.setattr(packed, "form_of", lambda ggml_type, rounded=False: None)
        return load(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_decoded_weights(
    case: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, chance = tmp_path / "m.gguf", random.Random(0)
    write_gguf(path, CASES[case], replace(SPEC, tie_word_embeddings=tied))
    ours, theirs = load(path), decoded(path, monkeypatch)
    assert weight_bytes(ours) < 0.45 * weight_bytes(theirs)
    tokens = [chance.randrange(301) for _ in range(33)]
    expected = run(theirs, caches(SPEC, 24), [(tokens, 0, TABLE)])
    assert expected.isfinite().all()
    assert expected.std() > 0.01
    assert torch.equal(run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)]), expected)
    kv = caches(SPEC, 24)
    fuse_decoder(ours, "cpu")
    one_by_one = [run(ours, kv, [([token], at, TABLE)]) for at, token in enumerate(tokens)]
    assert torch.equal(torch.cat(one_by_one), expected)


@pytest.mark.parametrize("case", CASES)
def test_rounded_products_change_little_and_know_no_batch(case: str, tmp_path: Path) -> None:
    """A prompt at once, in chunks beside another, and token by token: the same to the last bit."""
    if not packed.can_round():
        pytest.skip("this processor computes as fast in float32")
    path, chance = tmp_path / "m.gguf", random.Random(1)
    write_gguf(path, CASES[case])
    exact = load(path)
    with torch.inference_mode():
        ours = load_model(
            resolved(path), torch.device("cpu"), 0, lambda done, total: None, plan=WeightsPlan(exact=False)
        )
    tokens = [chance.randrange(301) for _ in range(33)]
    expected = run(exact, caches(SPEC, 24), [(tokens, 0, TABLE)])
    found = run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)])
    off = (found - expected).std() / expected.std()
    assert 1e-7 < off < 3e-4
    other = [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    kv = caches(SPEC, 24)
    run(ours, kv, [(tokens[:20], 0, TABLE)])
    assert torch.equal(run(ours, kv, [(tokens[20:29], 20, TABLE), (tokens[:9], 0, other)])[:9], found[20:29])
    fuse_decoder(ours, "cpu")
    one_by_one = [run(ours, kv, [([token], at, TABLE)]) for at, token in enumerate(tokens[29:], 29)]
    assert torch.equal(torch.cat(one_by_one), found[29:])


def test_a_parameter_of_which_a_part_cannot_stay_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"up_proj": "Q2_K", "embed": "Q3_K", "": "Q4_1"})
    ours, theirs = load(path), decoded(path, monkeypatch)
    sizes = {name: parameter.numel() for name, parameter in theirs.named_parameters()}
    kept = {name for name, parameter in ours.named_parameters() if parameter.numel() < 0.3 * sizes[name]}
    stays = ("attention.qkv", "attention.o", "mlp.down")
    assert kept == {"head.weight", *(f"layers.{n}.{name}.weight" for n in (0, 1) for name in stays)}
    tokens = list(range(20))
    assert torch.equal(
        run(ours, caches(SPEC, 24), [(tokens, 0, TABLE)]), run(theirs, caches(SPEC, 24), [(tokens, 0, TABLE)])
    )


def test_heads_that_end_within_a_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys would begin at row 8 * 4 = 32 and values at 40: not a panel's begin."""
    path = tmp_path / "m.gguf"
    spec = with_attention(replace(SPEC, num_attention_heads=4, hidden_size=32), head_dim=8, num_key_value_heads=1)
    spec = with_mlps(spec, intermediate_size=64)
    write_gguf(path, {"": "Q8_0"}, spec)
    ours = load(path)
    tokens = list(range(20))
    assert torch.equal(
        run(ours, caches(spec, 24), [(tokens, 0, TABLE)]),
        run(decoded(path, monkeypatch), caches(spec, 24), [(tokens, 0, TABLE)]),
    )


def test_progress_moves_from_the_begin(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"": "Q4_1"})
    seen: list[tuple[int, int]] = []
    with torch.inference_mode():
        model = load_model(resolved(path), torch.device("cpu"), 0, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, weight_bytes(model))
    assert seen[-1] == (weight_bytes(model), weight_bytes(model))
    assert seen == sorted(seen)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path, cut = tmp_path / "m.gguf", tmp_path / "cut.gguf"
    write_gguf(path, {"": "Q4_1"})
    cut.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ProcessFatal, match=r"cut\.gguf: cannot be read, perhaps cut short"):
        load(cut)
    wrong = tmp_path / "wrong.gguf"
    write_gguf(wrong, {"": "Q4_1"}, replace(SPEC, layers=Layers.alike(SPEC.layers[0], 3)))
    content = wrong.read_bytes()
    assert content.count(b"blk.2.ffn_down") == 1
    wrong.write_bytes(content.replace(b"blk.2.ffn_down", b"blk.2.ffn_what"))
    with pytest.raises(ProcessFatal, match=r"1 tensor that LlamaForCausalLM .* does not have: blk\.2\.ffn_what"):
        load(wrong)


@pytest.mark.parametrize("shape", [(), (0, 16), (32, 0), (32, 1 << 32, 1 << 32), (32, 1 << 63), (31, 1)])
def test_shapes_that_cannot_lie_in_the_file(shape: tuple[int, ...], tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m.gguf", np.uint8, mode="w+", shape=1 << 12)
    with pytest.raises(ProcessFatal, match=r"m\.gguf: cannot be read"):
        GGUFTensorSource(tmp_path / "m.gguf", mapped, GGUFTensor(shape, 2, 0))
