"""Products of packed weights with rounded activations: near those of the reference, and to the last bit alike however they are made."""

import ctypes
import math
import platform
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_models import encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshlm.kernels.cpu import build, kernel, packed
from meshlm.kernels.cpu.library import library
from meshlm.kernels.cpu.reference import round_activations

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
ROWS = 107
MOST = 2 * 32512  # halves of a code


def weight_of(kind: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A packed weight whose products round, and its values [n, k]."""
    data, number = encoded(kind, n, k), GGMLQuantizationType[kind]
    form = packed.form_of(int(number), rounded=True)
    assert form is not None
    forms = [form] * -(-n // packed.WIDTH)
    weight = torch.full((packed.packed_bytes(forms, k),), 77, dtype=torch.uint8)
    packed.write_table(weight, forms, k, rounded=True)
    packed.repack(packed.Rows(torch.from_numpy(data), int(number)), None, weight, 0, k)
    return weight, torch.from_numpy(dequantize(data, number).copy())


def activations(m: int, k: int) -> Tensor:
    """Blocks of very different sizes, some of zeros, and some whose numbers all lie between two codes."""
    x = torch.randn(m, k // 32, 32) * 10.0 ** torch.randint(-20, 4, (m, k // 32, 1))
    x[torch.rand(m, k // 32) < 0.1] = 0
    halves = torch.randint(-32511, 32512, (m, k // 32, 32)) + 0.5
    halves[..., 0] = 32512
    return torch.where(torch.rand(m, k // 32, 1) < 0.3, halves, x).flatten(1)


@pytest.mark.parametrize(("n", "k"), [(1, 256), (37, 768), (100, 1536)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_references(kind: str, n: int, k: int) -> None:
    """In any number of rows and threads to the last bit alike."""
    before = torch.get_num_threads()
    weight, values = weight_of(kind, n, k)
    x, bias = activations(ROWS, k), torch.randn(n)
    rounded, exact = round_activations(x), values.double()
    found = kernel.linear(x, weight, bias, n)
    largest = exact.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    size = (
        40 * rounded.abs() @ largest.T
    )  # a code may be 16 times the value that is left of it and its offset or minimum
    assert ((found - bias - rounded @ exact.T).abs() <= 1e-7 * size + 1e-6).all()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for m in (1, 2, 3, 5, 8, 15, 97, ROWS):
            assert torch.equal(kernel.linear(x[ROWS - m :], weight, bias, n), found[ROWS - m :]), (m, threads)
    torch.set_num_threads(before)


@given(
    scale=st.sampled_from([1e-37, 1e-30, 1.0, 3e38]),
    codes=st.lists(st.integers(-MOST, MOST), min_size=31, max_size=31).map(lambda codes: [*codes, MOST]),
)
@settings(max_examples=30, deadline=None)
def test_one_output_finds_each_code(scale: float, codes: list[int]) -> None:
    """Weights of Q8_0 that are 1 at one input: the product is what this input was rounded to, halves of a code to even."""
    x = torch.tensor([codes], dtype=torch.float64).mul(scale / MOST).float()
    rows = torch.zeros(32, 34, dtype=torch.uint8)
    rows[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    rows[torch.arange(32), 2 + torch.arange(32)] = 1
    form = packed.form_of(int(GGMLQuantizationType.Q8_0), rounded=True)
    assert form is not None
    weight = torch.zeros(packed.packed_bytes([form] * 2, 32), dtype=torch.uint8)
    packed.write_table(weight, [form] * 2, 32, rounded=True)
    packed.repack(packed.Rows(rows, int(GGMLQuantizationType.Q8_0)), None, weight, 0, 32)
    assert torch.equal(kernel.linear(x, weight, None, 32), round_activations(x).float())


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    weight, _ = weight_of("Q4_K", 48, 512)
    x = torch.randn(9, 512)
    expected = kernel.linear(x, weight, None, 48)
    x[4, 300] = bad
    found = kernel.linear(x, weight, None, 48)
    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_that_rounds_products_gives_its_own_rows(kind: str) -> None:
    weight, values = weight_of(kind, 40, 768)
    assert torch.equal(packed.rows(weight, torch.arange(40), 768), values)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_hardly_larger_than_in_the_file(kind: str) -> None:
    """The scales of K-quants are bytes here, not 6 bits."""
    form = packed.form_of(int(GGMLQuantizationType[kind]), rounded=True)
    assert form is not None
    table = 3 * 64
    size = encoded(kind, 192, 768).nbytes + table
    assert size <= packed.packed_bytes([form] * 12, 768) <= (1.04 if kind in ("Q4_K", "Q5_K") else 1) * size


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such choice")
@pytest.mark.parametrize(
    "lacks", [["-mno-avx512f", "-mno-avxvnni"], ["-mno-avx512f"], ["-DBY_BYTES"], ["-mno-avx2", "-mno-f16c"]]
)
def test_other_processors_compute_the_same(lacks: list[str], tmp_path: Path) -> None:
    """AVX2 alone, AVX-VNNI where it is there, its products of bytes written out, and no integer instruction at all: sums are exact.
    Weights of 16 bits, too."""
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    build.compile_library(build.compiler() or "cc", tmp_path / "other.so", [*flags, "-O1", *lacks])
    other = ctypes.CDLL(str(tmp_path / "other.so"))
    other.meshlm_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
    weights = [weight_of(kind, 37, 768)[0] for kind in KINDS]
    weights += [packed.pack(torch.randn(37, 768).to(dtype).float()) for dtype in (torch.bfloat16, torch.float16)]
    for weight in weights:
        x, out = activations(11, 768), torch.empty(11, 37)
        other.meshlm_linear(x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), 11, 37, 768)
        expected = kernel.linear(x, weight, None, 37)
        if "-mno-avx2" in lacks:  # does not fuse
            assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        else:
            assert torch.equal(out, expected)
