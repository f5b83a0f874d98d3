"""Compiles kernels for a Hopper GPU where there is none: the interpreter takes much that a compiler refuses.

Run as a program, without TRITON_INTERPRET. Prints a line for each kernel, with what stands in local memory because registers ran out.
"""

import sys
from typing import Any

import torch
from machine_code import exchanges, roundings_onto_nothing
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class Hopper:
    """What Triton asks of a driver while it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_run = jit.JITFunction.run
made: dict[str, Any] = {}  # the last of each name


def _only_compile(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    found = made[self.fn.__name__] = _run(self, *given, grid=grid, warmup=True, **options)
    print(self.fn.__module__, self.fn.__name__, len(found.asm["cubin"]), flush=True)
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def products() -> None:
    """One row, with bfloat16 weights, and with 8-bit floats that have scales of rows and of groups; experts with each activation."""
    from meshlm.kernels.fp8_gemm.reference import Fp8Weight
    from meshlm.kernels.gemv.kernel import gemv
    from meshlm.kernels.grouped_gemm import kernel as grouped_gemm
    from meshlm.kernels.moe_epilogue.kernel import GELU_ALPHA, PLAIN, Epilogue
    from meshlm.kernels.moe_few import kernel as moe_few
    from meshlm.kernels.packed_experts import kernel as packed_experts
    from meshlm.kernels.packed_experts.layout import MXFP4, Format
    from meshlm.kernels.packed_experts.runs import random_weight
    from meshlm.kernels.packed_gemm import gemv as packed_gemv
    from meshlm.kernels.packed_gemm import pairs
    from meshlm.kernels.packed_gemm.reference import PackedWeight

    x, codes = empty(1, 1024), empty(2048, 1024, dtype=torch.float8_e4m3fn)
    weights = (
        empty(2048, 1024),
        Fp8Weight(codes, torch.empty(2048, 1)),
        Fp8Weight(codes, torch.empty(2048, 8), 128, 128),
    )
    for weight in weights:
        for gate in ("", "silu"):
            gemv(x, weight, norm=empty(1024), residual=x, eps=1e-5, gate=gate, shape=(2, 4, 3, 2))
    own = empty(1024), 1e-5
    for act in ("gelu", "gelu_pytorch_tanh"):
        gemv(x, weights[0], norm=own[0], residual=x, eps=1e-5, own=own, gate=act, shape=(2, 4, 3, 2))
    words, scales = ints(2048, 128), torch.empty(8, 2048, dtype=torch.float16)
    pairs.parts(x, PackedWeight(words, None, scales, zero=8, group=128, inputs=1024), packed_gemv.Shape(32, 2, 4, 2))
    rows, gate_up, chosen = empty(8, 512), empty(16, 512, 512), ints(8, 4)
    tiles = grouped_gemm.Shape(16, 32, 64, 4, 2, tiles=2)
    without = Epilogue(gated=False)
    for epilogue in (PLAIN, without, Epilogue(alpha=GELU_ALPHA), Epilogue(empty(16, 512), 1.702, 7.0)):
        first = gate_up if epilogue.gated else empty(16, 256, 512)
        moe_few.few(rows, first, chosen, None, empty(32, 256), moe_few.Shape(32, 32, 4, 2), epilogue=epilogue)
        inner = empty(256, 256)
        grouped_gemm.sorted_gemm(rows, first, inner, tiles, ints(16), ints(256), 4, 32, gate=True, epilogue=epilogue)
    formats = [
        Format(4, 128),
        Format(4, 32, "minima"),
        Format(4, 64, "nf4"),
        Format(5, 32),
        Format(6, 16),
        Format(8, 128),
        MXFP4,
    ]
    for format in formats:
        packed = random_weight(16, 512, 512, torch.device("cpu"), format=format)
        packed_experts.few(rows, packed, chosen, None, empty(32, 256), packed_experts.Shape(16, 32, 4, 3))


def sums() -> None:
    """Sums over ranks, by packets and by flags, in both types of words."""
    from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace, allreduce_rmsnorm

    for dtype in (torch.bfloat16, torch.float32):
        x, places = empty(5, 72, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        room = Workspace(0, 2, 5, 72, (places, places, places), ints(5), 2)
        for rows in (1, 5):
            allreduce_rmsnorm(x[:rows], x[:rows].clone(), x[0], 1e-5, room)


def attention() -> None:
    """Prompts, decodes and drafts that are verified: plain, with windows, chunks, slopes, caps and sinks, of 8-bit caches, of large
    heads, of shared prefixes, of latents."""
    from meshlm.kernels.attention.decode import decode
    from meshlm.kernels.attention.kernel import Columns, Extras, SharedPrefixes
    from meshlm.kernels.attention.prefill import prefill
    from meshlm.kernels.attention.shared_prefix import shared_prefix
    from meshlm.kernels.attention.tiles import VerifyTile, tile_of_head, verify_lines
    from meshlm.kernels.attention.verify import verify
    from meshlm.kernels.mla.decode import decode as decode_latents
    from meshlm.kernels.mla.tiles import DecodeTile

    kinds = [
        (128, torch.bfloat16, Extras()),
        (128, torch.bfloat16, Extras(window=1024, cap=30.0, sinks=empty(8))),
        (128, torch.bfloat16, Extras(chunk=8192)),
        (128, torch.bfloat16, Extras(slopes=torch.empty(8))),
        (128, torch.float8_e4m3fn, Extras(k_scale=0.5, v_scale=0.5)),
        (512, torch.bfloat16, Extras()),
    ]
    at = Columns(ints(4), ints(4), ints(4), 4, ints(4, 32))
    for dim, kind, extras in kinds:
        query, keys = empty(64, 8, dim), empty(64, 16, 2, dim, dtype=kind)
        out, splits = torch.empty_like(query), 4
        room = torch.empty(64 * 8 * splits * dim), torch.empty(64 * 8 * splits * 2), ints(64 * 2)
        prefill(query, keys, keys, at, 0.1, out, extras=extras, tiles=tile_of_head((64, 64, 4, 2), dim))
        decode(query[:4], keys, keys, at, 0.1, out[:4], room, splits, extras)
        for queries in (4, 16):
            tile = VerifyTile(verify_lines(4 * queries, dim), splits, 64 if dim <= 128 else 16, 8, 2)
            verify(query, keys, keys, at, 0.1, out, room[:2], queries, tile, extras)
        if extras.window or extras.chunk or dim > 256:
            continue
        shared = SharedPrefixes(ints(9, 5), ints(4), ints(4), ints(4), 16, 4)
        shared_prefix(query[:4], keys, keys, at, shared, 0.1, room, splits, extras)
        decode(query[:4], keys, keys, at, 0.1, out[:4], room, splits, extras, shared=shared)
    lines, parts = empty(64, 16, 576), (torch.empty(1 << 20), torch.empty(1 << 12))
    for heads, of_latents in ((8, DecodeTile(4, 64, 4, 2, of_lines=True)), (16, DecodeTile(4, 64, 8, 2, 64))):
        absorbed, query = empty(16, heads, 512), empty(16, heads, 192)
        for queries in (1, 4):
            decode_latents(
                absorbed, query, lines, at, 0.1, torch.empty_like(absorbed), parts, of_latents, queries=queries
            )


def exchange() -> None:
    """Rows to peers and back, 16 bytes at a time: what is known of a peer's memory is an address alone."""
    from meshlm.kernels.expert_exchange import kernel

    at, inbox, results = torch.zeros(4, dtype=torch.int64), empty(256, 2048), empty(256, 2048)
    room = kernel.Room(0, inbox, ints(256, 16), results, at, at, at, at, ints(2), ints(1), [], [])
    kernel.send(empty(64, 2048), ints(64, 8), torch.empty(64, 8), 64, room, kernel.Owners(32, 32, 0))
    kernel.give_back(empty(256, 2048), 64, 8, room)
    kernel.add(ints(64, 8), 64, room, kernel.Owners(32, 32, 0))
    kernel.wait(kernel.ROWS, room)
    for name in ("_send", "_give_back", "_add"):
        text = made[name].asm["ptx"]
        assert "st.global.v4.b32" in text, name
        assert ".global.b16" not in text, name


def states() -> None:
    """Decodes and prompts of gated delta nets, Mamba and Mamba-2, and their convolutions."""
    from meshlm.kernels.attention.kernel import Columns
    from meshlm.kernels.causal_conv.kernel import causal_conv
    from meshlm.kernels.gated_delta.kernel import chunk_rule
    from meshlm.kernels.gated_delta.update import rule_update
    from meshlm.kernels.gated_norm.kernel import gated_norm
    from meshlm.kernels.selective_scan.kernel import scan_update, selective_scan
    from meshlm.kernels.ssd.kernel import chunk_scan
    from meshlm.kernels.ssd.reference import TimeSteps
    from meshlm.kernels.ssd.update import state_update
    from meshlm.kernels.states import Pieces

    tokens = 300
    at, pieces = (
        Columns(ints(2), ints(2), ints(2), 2, ints(2, 16)),
        Pieces.of_prompts([(0, 0, tokens)], 544, torch.device("cpu")),
    )
    Pieces.of_columns(at, tokens, 544)
    q, v, gate = empty(tokens, 16, 128), empty(tokens, 32, 128), empty(tokens, 32)
    given: list[Any] = [q, q.clone(), v, gate, gate.clone(), torch.empty(32), torch.empty(32)]
    given += [empty(2, 8, 16, 128, 128), torch.empty_like(v), at]
    rule_update(*[*given, 2, 544])
    chunk_rule(*[*given, pieces, 544])
    x, b = empty(tokens, 4096), empty(tokens, 16)
    given = [x, x, torch.empty(4096, 16), b, b, torch.empty(4096), x, empty(2, 8, 2048, 1, 16), x.clone(), at]
    scan_update(*[*given, 2, 512])
    selective_scan(*[*given, pieces, 512])
    h, b = empty(tokens, 64, 64), empty(tokens, 1, 128)
    steps = TimeSteps(empty(tokens, 64), torch.empty(64))
    given = [h, steps, torch.empty(64), b, b, torch.empty(64), empty(2, 8, 32, 64, 128), h.clone(), at]
    state_update(*[*given, 2, 528])
    chunk_scan(*[*given, pieces, 528])
    gated_norm(x, x, empty(4096), 1e-5, 4096, before=False)
    causal_conv(x, empty(4096, 4), None, empty(2, 8, 2048, 3), at, 2, pieces, 528)


def hopper() -> None:
    """Kernels in Gluon: attention with pages that are parts of a tile and that are not, windows, large heads; experts; 4 bits."""
    from meshlm.kernels.attention import hopper as attention_on_hopper
    from meshlm.kernels.attention.kernel import Columns, Extras
    from meshlm.kernels.grouped_gemm import kernel as grouped_gemm
    from meshlm.kernels.moe_epilogue.kernel import Epilogue
    from meshlm.kernels.packed_experts import direct
    from meshlm.kernels.packed_experts import kernel as packed_experts
    from meshlm.kernels.packed_experts.kernel import Parts, Rows
    from meshlm.kernels.packed_experts.layout import MXFP4, Format
    from meshlm.kernels.packed_experts.plan import DirectShape
    from meshlm.kernels.packed_experts.runs import random_weight
    from meshlm.kernels.packed_few import kernel as packed_few
    from meshlm.kernels.packed_few.plan import Shape
    from meshlm.kernels.packed_gemm.reference import PackedWeight

    at = Columns(ints(4), ints(4), ints(4), 4, ints(4, 32))
    for dim, page, extras in ((128, 16, Extras()), (128, 528, Extras(window=1024)), (256, 1056, Extras(cap=30.0))):
        query, keys, qkv = empty(64, 8, dim), empty(64, page, 2, dim), empty(64, 12 * dim)
        attention_on_hopper.prefill(query, keys, keys, at, 0.1, torch.empty_like(query), extras=extras, qkv=qkv)
    tiles = grouped_gemm.Shape(128, 128, 64, 4, 3, apart=True)
    rows, gate_up, down = empty(512, 512), empty(16, 1024, 512), empty(16, 512, 512)
    grouped_gemm.sorted_gemm(
        rows, gate_up, empty(512, 512), tiles, ints(16), ints(512), 2, 512, gate=True, owners=ints(64)
    )
    grouped_gemm.sorted_gemm(rows, down, empty(512, 512), tiles, ints(16), entries=512, owners=ints(64))
    for count, shape, group in ((1, Shape(2, 4), 128), (16, Shape(1, 8), 32)):
        groups = -(-1100 // group)
        scales, zeros = torch.empty(groups, 2048, dtype=torch.float16), torch.empty(groups, 2048, dtype=torch.uint8)
        weight = PackedWeight(ints(2048, 160), None, scales, zeros, group=group, inputs=1100)
        packed_few.packed_few(empty(count, 1100), weight, shape)
    packed_few.packed_few(empty(5, 1100), weight._replace(zeros=None, minima=scales), Shape(1, 1))
    for format in (MXFP4, Format(4, 128), Format(4, 32, "minima")):
        above, below = (random_weight(8, outputs, 500, torch.device("cpu"), format=format) for outputs in (1000, 500))
        experts, tile = ints(12, 4), DirectShape(2, 4)
        epilogue = Epilogue(empty(8, 1000), 1.7, 7.0)
        direct.few(empty(12, 500), above, experts, None, empty(48, 500), tile, epilogue)
        direct.few(empty(4, 500), below, experts[:1], torch.empty(1, 4), torch.empty(4, 1, 500), tile)
        order, parts = Rows(ints(512), ints(8), ints(16), 4, 160), Parts(ints(40, 4), torch.empty(40, 4))
        direct.sorted_rows(empty(40, 500), above, empty(512, 500), tile, 16, order, gate=True)
        direct.sorted_rows(empty(512, 500), below, torch.empty(4, 40, 500), tile, 32, order, parts=parts)
        for stages in (2, 3):
            first, second = (packed_experts.Shape(256, block_n, 8, stages) for block_n in (64, 128))
            packed_experts.sorted_rows(
                empty(40, 500), above, empty(512, 500), first, order, gate=True, epilogue=epilogue
            )
            packed_experts.sorted_rows(empty(512, 500), below, empty(512, 500), second, order)


def roundings() -> None:
    """One row in 8-bit floats, of inputs that are no power of two: see machine_code.py."""
    from meshlm.kernels.fp8_gemm.reference import Fp8Weight
    from meshlm.kernels.gemv.kernel import gemv

    for inputs, known in ((5120, None), (14336, None), (14336, torch.empty(1))):
        codes = torch.empty(256, inputs, dtype=torch.float8_e4m3fn)
        gemv(empty(1, inputs), Fp8Weight(codes, torch.empty(256, 1), 0, 0, known))
        found = roundings_onto_nothing(made["_products"].asm["cubin"])
        assert not found, f"{inputs} inputs: {found}"


def two_parts() -> None:
    """A row in two parts: what its threads pass to one another is what they do for one part."""
    from meshlm.kernels.gemv.kernel import gemv

    for gate in ("", "silu"):
        found = {}
        for inputs in (4096, 5120):
            gemv(empty(1, inputs), empty(2048, inputs), gate=gate, shape=(2, 4, 3, 2))
            found[inputs] = exchanges(made["_products"].asm["cubin"])
        assert found[5120] <= found[4096], found


if __name__ == "__main__":
    driver.set_active(Hopper())
    jit.JITFunction.run = _only_compile
    parts = {
        part.__name__: part for part in (products, sums, attention, exchange, states, hopper, roundings, two_parts)
    }
    parts[sys.argv[1]]()
