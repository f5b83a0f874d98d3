"""Packed weights of the CPU kernels: the numbers that the gguf package decodes, and products that float32 weights would have given."""

import ctypes
import platform
import subprocess

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from meshlm.kernels.cpu import build, kernel, packed
from meshlm.kernels.cpu.library import call, library

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
SHAPES = [(1, 256), (16, 512), (37, 768), (100, 1536)]


def encoded(kind: str, n: int, k: int, seed: int = 0) -> Tensor:
    """Random rows of this type, uint8 [n, bytes]: all codes; scales of both signs, zero and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, size=(n, k // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (rng.normal(size=(n, k // block)) * rng.choice([0.0, 1e-7, 1e-2, 1.0], size=(n, k // block))).astype(
            np.float16
        )
        data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return torch.from_numpy(data.reshape(n, -1))


def decoded(kind: str, data: Tensor) -> Tensor:
    return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind]).copy())


def begun(forms: list[int], k: int) -> Tensor:
    weight = torch.full((packed.packed_bytes(forms, k),), 77, dtype=torch.uint8)
    packed.write_table(weight, forms, k)
    return weight


def repacked(kind: str, data: Tensor, k: int, order: Tensor | None = None) -> Tensor:
    ggml_type = int(GGMLQuantizationType[kind])
    form = packed.form_of(ggml_type)
    assert form is not None
    weight = begun([form] * -(-data.shape[0] // packed.WIDTH), k)
    packed.repack(packed.Rows(data, ggml_type), order, weight, 0, k)
    return weight


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", HALVES)
def test_rows_are_the_decoders_to_the_last_bit(kind: str, n: int, k: int) -> None:
    data = encoded(kind, n, k)
    expected = decoded(kind, data)
    ids = torch.randint(0, n, (3 * n,))
    assert torch.equal(packed.rows(repacked(kind, data, k), ids, k), expected[ids])
    assert torch.equal(packed.rows(packed.pack(expected), ids, k), expected[ids])
    order = torch.randperm(n)
    assert torch.equal(packed.rows(repacked(kind, data, k, order), torch.arange(n), k), expected[order])


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", HALVES)
def test_products_are_those_of_float32_weights_to_the_last_bit(kind: str, n: int, k: int) -> None:
    """Any number of rows and threads."""
    before = torch.get_num_threads()
    data, x, bias = encoded(kind, n, k), torch.randn(103, k), torch.randn(n)
    values = decoded(kind, data)
    weight, floats = repacked(kind, data, k), packed.pack(values)
    expected = kernel.linear(x, floats, bias, n)
    exact, size = x.double() @ values.double().T + bias, x.double().abs() @ values.double().abs().T
    assert ((expected - exact).abs() <= 1e-5 * size + 1e-6).all()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for m in (1, 2, 3, 4, 5, 6, 7, 11, 16, 96, 97, 103):
            assert torch.equal(kernel.linear(x[:m], weight, bias, n), expected[:m]), (m, threads)
    torch.set_num_threads(before)


def floats(values: Tensor) -> Tensor:
    """Packed as float32, though 16 bits might be enough."""
    n, k = values.shape
    weight = begun([0] * -(-n // packed.WIDTH), k)
    call().meshlm_pack(values.contiguous(), weight, n, k)
    return weight


@pytest.mark.parametrize(("n", "k"), [(1, 8), (16, 512), (37, 776), (100, 1536)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_stay_so_and_change_nothing(dtype: torch.dtype, n: int, k: int) -> None:
    """Subnormal ones, too. Products are those of float32 to the last bit, in any number of rows and threads."""
    before = torch.get_num_threads()
    values = (torch.randn(n, k) * 10.0 ** torch.randint(-8, 3, (n, k))).to(dtype).float()
    weight, wide = packed.pack(values), floats(values)
    assert len(weight) < 0.5 * len(wide) + 64 + 16 * n
    assert torch.equal(packed.rows(weight, torch.arange(n), k), values)
    x, bias = torch.randn(103, k), torch.randn(n)
    expected = kernel.linear(x, wide, bias, n)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for m in (1, 2, 3, 4, 5, 6, 7, 11, 16, 96, 97, 103):
            assert torch.equal(kernel.linear(x[:m], weight, bias, n), expected[:m]), (m, threads)
    torch.set_num_threads(before)


@pytest.mark.parametrize("at", [0, 5000, 37 * 512 - 1])
@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (0.0, 16),
        (-3.0, 16),
        (2.0**100, 16),
        (1 + 2**-10, 16),
        (2.0**-24, 16),
        (1 + 2**-11, 32),
        (0.1, 32),
        (65520.0, 32),
    ],
)
def test_one_number_that_needs_more_keeps_all_of_them(number: float, bits: int, at: int) -> None:
    values = torch.zeros(37, 512)
    values.view(-1)[at] = number
    weight = packed.pack(values)
    assert len(weight) == 64 + 3 * 16 * 512 * bits // 8
    assert torch.equal(packed.rows(weight, torch.arange(37), 512), values)


def test_parts_of_several_types_in_one_weight() -> None:
    """As query, key and value rows are; and rows that are a part of a tensor's, columns too."""
    k, kinds = 512, ["Q4_K", "Q6_K", "Q4_0", "Q8_0"]
    rows = [48, 16, 32, 23]
    types = [int(GGMLQuantizationType[kind]) for kind in kinds]
    forms = [packed.form_of(number) or 0 for number in types]
    weight = begun([form for form, n in zip(forms, rows, strict=True) for _ in range(-(-n // 16))], k)
    expected, first = [], 0
    for kind, number, n in zip(kinds, types, rows, strict=True):
        data = encoded(kind, n + 5, 2 * k)
        part = data[3 : 3 + n, data.shape[1] // 2 :]
        packed.repack(packed.Rows(part, number), None, weight, first, k)
        expected.append(decoded(kind, data)[3 : 3 + n, k:])
        first += n
    values, x = torch.cat(expected), torch.randn(9, k)
    assert torch.equal(packed.rows(weight, torch.arange(first), k), values)
    for m in (1, 9):
        assert torch.equal(
            kernel.linear(x[:m], weight, None, first), kernel.linear(x[:m], packed.pack(values), None, first)
        )


def test_nothing_is_read_or_written_beyond_a_weight() -> None:
    """Its last byte is the last byte of a mapped page."""
    import mmap

    data = encoded("Q4_1", 21, 64)
    weight, x = repacked("Q4_1", data, 64), torch.randn(7, 64)
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    begin = 2 * mmap.PAGESIZE - len(weight)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + 2 * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(pages, dtype=torch.uint8, count=2 * mmap.PAGESIZE)[begin:]
    copy.copy_(weight)
    packed.repack(packed.Rows(data, int(GGMLQuantizationType.Q4_1)), None, copy, 0, 64)
    assert torch.equal(copy, weight)
    assert torch.equal(packed.rows(copy, torch.arange(21), 64), decoded("Q4_1", data))
    for m in (1, 7):
        assert torch.equal(kernel.linear(x[:m], copy, None, 21), kernel.linear(x[:m], weight, None, 21))


def test_types_that_are_not_kept() -> None:
    for kind in ("F32", "F16", "BF16", "Q2_K", "Q3_K", "IQ4_XS", "MXFP4"):
        assert packed.form_of(int(GGMLQuantizationType[kind])) is None
    assert packed.form_of(-1) is None
    assert packed.form_of(10_000) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such choice")
@pytest.mark.parametrize(
    "lacks", [[], ["-mno-fma"], ["-mno-f16c"], ["-mno-avx2"], ["-mno-avx2", "-mno-fma"], ["-mno-avx"]]
)
def test_processors_that_lack_something(lacks: list[str]) -> None:
    """-mno-avx2 is an Ivy Bridge: it has AVX and F16C."""
    flags = ["-march=haswell" if flag == "-march=native" else flag for flag in build.FLAGS if flag != "-O3"]
    compiler = [build.compiler() or "cc", "-fsyntax-only", "-Werror=implicit-function-declaration"]
    done = subprocess.run([*compiler, *flags, *lacks, str(build.SOURCE)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
