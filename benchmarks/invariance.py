"""--deterministic on the GPU: which operations give a row other bits beside other rows, and what the mode costs.

    python -P benchmarks/invariance.py [ops] [tiles] [speed] [--models llama3-8b qwen3-1.7b] [--batch 64] [--json FILE]

ops: each operation of a server with and without the mode, one row alone and beside others: the numbers of rows at which its bits
differ, and by how much at most. tiles: times of products of few rows with other tiles, whose bits must be the same. speed: decode
steps of whole models with dummy weights, with and without it. Without a word: ops and speed.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import engine_step
import harness
import shapes

from meshlm.kernels.attention import tiles as attention_tiles
from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.requests import PagedStep, decode_workspace
from meshlm.kernels.batch_invariant import attention as invariant
from meshlm.kernels.batch_invariant import gemm
from meshlm.kernels.batch_invariant.op import TILES
from meshlm.kernels.measure import microseconds
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine import make
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.layers.invariant_ops import InvariantOps
from meshlm.workers.layers.ops import Ops
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.partial_sum import PartialSum

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
ROWS = [
    2,
    3,
    5,
    8,
    15,
    16,
    17,
    31,
    33,
    48,
    64,
    65,
    96,
    127,
    128,
    129,
    160,
    192,
    255,
    256,
    257,
    320,
    384,
    511,
    512,
    513,
    1024,
    2048,
]
WEIGHTS = {
    "llama3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)},
    "qwen3-1.7b": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
}  # fmt: skip
CONTEXTS = [1, 17, 64, 65, 511, 512, 513, 1000, 2047, 3000]
HEADS = {"llama3-8b": (32, 8, 128), "qwen3-1.7b": (16, 8, 128)}


def variance(of: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """of: from rows to as many. The first row of x alone, and last, first and in the middle of others."""
    alone = of(x[:1])
    differ, most = [], 0.0
    for rows in (rows for rows in ROWS if rows <= len(x)):
        for place in {0, rows // 2, rows - 1}:
            found = of(x[:rows].roll(place, 0))[place : place + 1]
            if not torch.equal(found, alone):
                differ.append(rows)
                most = max(most, float((found.float() - alone.float()).abs().max()))
    return {"differs_at": sorted(set(differ)), "by": most}


def of_products(ops: Ops, model: str) -> Iterator[dict[str, Any]]:
    for name, (outputs, inputs) in WEIGHTS[model].items():
        x = torch.randn(2048 if name != "head" else 288, inputs, device=GPU, dtype=DTYPE)
        w = torch.randn(outputs, inputs, device=GPU, dtype=DTYPE) / inputs**0.5
        yield {"op": f"{model} {name}", **variance(lambda rows, w=w: ops.linear(rows, w, None, w.shape[0]), x)}  # type: ignore[misc]


def of_rows(ops: Ops) -> Iterator[dict[str, Any]]:
    """Norms, gates and rotation."""
    for size in (2048, 4096):
        x, weight = torch.randn(2048, size, device=GPU, dtype=DTYPE), torch.randn(size, device=GPU, dtype=DTYPE)
        yield {"op": f"rms_norm {size}", **variance(lambda rows, w=weight: ops.rms_norm(rows, w, 1e-6), x)}  # type: ignore[misc]
        both = torch.randn(2048, 2 * size, device=GPU, dtype=DTYPE)

        def added(rows: Tensor, weight: Tensor = weight, size: int = size) -> Tensor:
            return ops.add_rms_norm(rows[:, :size].contiguous(), rows[:, size:].clone(), weight, 1e-6)

        yield {"op": f"add_rms_norm {size}", **variance(added, both)}
        for act in ("silu", "gelu_pytorch_tanh"):
            yield {"op": f"{act} {size}", **variance(lambda rows, act=act: ops.act_mul(rows, act), both)}  # type: ignore[misc]
    norms = torch.randn(2, 128, device=GPU, dtype=DTYPE)
    table, cache = torch.randn(4096, 128, device=GPU), torch.zeros(2, 256, 16, 8, 128, device=GPU, dtype=DTYPE)

    def rotated(rows: Tensor) -> Tensor:
        at = torch.arange(len(rows), device=GPU)
        return rope_cache(rows.clone(), at * 0 + 7, at, table, (norms[0], norms[1]), 1e-6, cache[0], cache[1], 32)

    yield {"op": "rope_cache", **variance(rotated, torch.randn(2048, 48 * 128, device=GPU, dtype=DTYPE))}


def of_attention(heads: tuple[int, int, int], *, mode: bool) -> Iterator[dict[str, Any]]:
    """The last tokens of some contexts: as decodes of 1 to 256 requests, in prompts, and in chunks that begin anywhere."""
    num, kv_heads, dim = heads
    step = PagedStep.random([(0, context) for context in CONTEXTS], heads, 16, DTYPE, GPU)
    workspace, scale = invariant.Workspace(GPU), dim**-0.5
    lengths, last = torch.tensor(CONTEXTS, device=GPU, dtype=torch.int32), step.at.ends.long() - 1

    def run(query: Tensor, at: Columns, *, decodes: bool) -> Tensor:
        out = torch.empty_like(query)
        if mode:
            invariant.attention(query, step.keys, step.values, at, scale, out, workspace, longest=4096, decodes=decodes)
        elif decodes:
            splits, block_n, warps, stages = attention_tiles.decode_tiles(
                at.n * kv_heads, 4096, GPU, num // kv_heads, dim
            )
            room = decode_workspace(at.n, num, kv_heads, dim, splits, GPU)
            decode(
                query, step.keys, step.values, at, scale, out, room, splits, block_n=block_n, warps=warps, stages=stages
            )
        else:
            prefill(query, step.keys, step.values, at, scale, out)
        return out

    def decoded(times: int) -> Tensor:
        rows = step.at.rows.repeat(times)
        ends = torch.arange(1, len(rows) + 1, device=GPU, dtype=torch.int32)
        at = Columns(rows, (lengths - 1).repeat(times), ends, len(rows), step.at.blocks)
        return run(step.query[last].repeat(times, 1, 1), at, decodes=True).view(times, len(CONTEXTS), num, dim)

    one = torch.ones(1, device=GPU, dtype=torch.int32)

    def by_itself(nth: int, end: int) -> Tensor:
        at = Columns(step.at.rows[nth : nth + 1], lengths[nth : nth + 1] - 1, one, 1, step.at.blocks)
        return run(step.query[end : end + 1], at, decodes=True)

    alone = torch.cat([by_itself(nth, end) for nth, end in enumerate(last.tolist())])
    differ: dict[str, float] = {}

    def compare(name: str, found: Tensor) -> None:
        if not torch.equal(found, alone):
            differ[name] = float((found.float() - alone.float()).abs().max())

    for times in (1, 2, 4, 7, 13, 26):
        found = decoded(times)
        for nth in (0, times - 1):
            compare(f"{len(CONTEXTS) * times} decodes", found[nth])
    compare("prompts", run(step.query, step.at, decodes=False)[last])
    for most in (1, 2, 7, 16, 33, 100, 700):
        counts = torch.minimum(lengths, torch.full_like(lengths, most))
        query = torch.cat([step.query[end - count + 1 : end + 1] for end, count in zip(last, counts, strict=True)])
        at = Columns(step.at.rows, lengths - counts, counts.cumsum(0).int(), step.at.n, step.at.blocks)
        compare(f"chunks of {most}", run(query, at, decodes=False)[counts.cumsum(0) - 1])
    yield {"op": f"attention {heads}", "differs_at": differ}


def of_ops(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    for mode, ops in ((True, InvariantOps()), (False, TritonOps())):
        for model in models:
            yield from ({"deterministic": mode, **found} for found in of_products(ops, model))
            yield from ({"deterministic": mode, **found} for found in of_attention(HEADS[model], mode=mode))
        yield from ({"deterministic": mode, **found} for found in of_rows(ops))


def of_tile(name: str, x: Tensor, weights: list[Tensor]) -> dict[str, Any]:
    """One product of the same rows with several weights of one shape, one after the other; by tile and shares of the inputs."""
    ops, gate, (lines, inputs) = TritonOps(), name.endswith("gate_up"), weights[0].shape
    usual, expected = gemm.splits_of(lines, inputs), gemm.gemm(x, weights[0], gate=gate)
    ways = [
        (tile, splits)
        for tile in TILES
        for splits in (1, 2, 4, 8)
        if inputs // splits >= 256 and 60 <= splits * lines // tile.block_n <= 1200
    ]

    def run(tile: gemm.Tile, splits: int, w: Tensor) -> Tensor:
        return gemm.gemm(x, w, gate=gate, tile=tile, splits=splits)

    with precompiled():
        for way in ways:
            run(*way, weights[0])

    def timed(way: Callable[[Tensor], object]) -> float:
        return round(microseconds(lambda: [way(w) for w in weights], 5) / len(weights), 1)

    def default(w: Tensor) -> object:
        if not gate:
            return ops.row_parallel_linear(x, w, None, lines, None)
        return ops.norm_linear(PartialSum(x, residual=x.clone()), (norm, 1e-6), w, None, lines, gate="silu")

    norm = torch.ones(inputs, device=GPU, dtype=DTYPE)
    differ = [way for way in ways if way[1] == usual and not torch.equal(run(*way, weights[0]), expected)]
    best = sorted((timed(partial(run, *way)), way[1], tuple(way[0])) for way in ways)
    floor = round(2 * lines * inputs / engine_step.BYTES_A_SECOND * 1e6, 1)
    return {
        "product": name, "default_us": timed(default), "own_us": timed(lambda w: gemm.gemm(x, w, gate=gate)), "floor_us": floor,
        "best": best[:6], "best_of_own_splits": [each for each in best if each[1] == usual][:4], "bits_differ": differ,
    }  # fmt: skip


def of_attention_tiles(heads: tuple[int, int, int], n: int, context: int) -> dict[str, Any]:
    """Decodes of one layer: microseconds by tile and programs of a context, beside the usual kernel."""
    num, kv_heads, dim = heads
    step = PagedStep.random([(context - 1, 1)] * n, heads, 16, DTYPE, GPU)
    workspace, out = invariant.Workspace(GPU), torch.empty_like(step.query)
    times = {}
    for tile, programs in product(((16, 4, 3), (16, 4, 5), (32, 4, 3), (64, 8, 3)), (None, 1, 2, 4)):
        run = partial(
            invariant.attention, *step[:4], 0.1, out, workspace, longest=4096, decodes=True, tile=tile, programs=programs
        )  # fmt: skip
        times[f"{tile} {programs} programs"] = round(microseconds(run, 5), 1)
    splits, block_n, warps, stages = attention_tiles.decode_tiles(n * kv_heads, 4096, GPU, num // kv_heads, dim)
    room = decode_workspace(n, num, kv_heads, dim, splits, GPU)
    usual = partial(decode, *step[:4], 0.1, out, room, splits, block_n=block_n, warps=warps, stages=stages)
    times["default"] = round(microseconds(usual, 5), 1)
    floor = round(n * context * 4 * kv_heads * dim / engine_step.BYTES_A_SECOND * 1e6, 1)
    return {"attention": heads, "n": n, "context": context, "floor_us": floor, "us": times}


def of_prompt_tiles(heads: tuple[int, int, int], tokens: int) -> dict[str, Any]:
    """A prompt of one layer: microseconds by tile, beside the usual kernel without its projection."""
    step = PagedStep.random([(0, tokens)], heads, 16, DTYPE, GPU)
    workspace, out = invariant.Workspace(GPU), torch.empty_like(step.query)
    times = {}
    for tile in ((32, 4, 3), (32, 4, 5), (64, 8, 3), (64, 4, 3)):
        run = partial(invariant.attention, *step[:4], 0.1, out, workspace, longest=tokens, tile=tile)
        times[str(tile)] = round(microseconds(run, 3), 1)
    times["default"] = round(microseconds(partial(prefill, *step[:4], 0.1, out), 3), 1)
    return {"attention": heads, "prompt": tokens, "us": times}


def of_tiles(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """64 rows with each tile, the fastest first, beside what a server without the mode does; weights come from memory."""
    for model in models:
        for n, context in ((64, 1100), (1, 1100), (16, 1100), (64, 3900), (256, 1100)):
            yield of_attention_tiles(HEADS[model], n, context)
        yield from (of_prompt_tiles(HEADS[model], tokens) for tokens in (512, 8192))
        for name, (outputs, inputs) in WEIGHTS[model].items():
            copies = max(1, min(8, (256 << 20) // (2 * outputs * inputs)))
            weights = [torch.randn(outputs, inputs, device=GPU, dtype=DTYPE) / inputs**0.5 for _ in range(copies)]
            yield of_tile(f"{model} {name}", torch.randn(64, inputs, device=GPU, dtype=DTYPE), weights)


def made(model: str, folder: Path, *, mode: bool) -> ModelEngine:
    (folder / "config.json").write_text(json.dumps(shapes.config_of(model)))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values = {
        "model": str(folder),
        "device": "cuda",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
    }
    config = resolve.resolve(flags.build({**values, "deterministic": mode}, None))
    return make.make_engine(config, lambda *progress: None)


def of_speed(models: Sequence[str], batches: Sequence[int], context: int, *, kernels: bool) -> Iterator[dict[str, Any]]:
    for model in models:
        found: dict[bool, list[dict[str, Any]]] = {}
        for mode in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                engine = made(model, Path(folder), mode=mode)
                found[mode] = [engine_step.measure(engine, batch, context, 100, kernels) for batch in batches]
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        for plain, exact in zip(found[False], found[True], strict=True):
            batch = plain["batch"]
            yield {
                "model": model, "batch": batch, "context": context, "tok_s": round(1e3 * batch / plain["step_ms"]),
                "deterministic_tok_s": round(1e3 * batch / exact["step_ms"]),
                "of_default": round(plain["step_ms"] / exact["step_ms"], 3), "default": plain, "deterministic": exact,
            }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("what", nargs="*", choices=["ops", "tiles", "speed", []], default=["ops", "speed"])
    parser.add_argument("--models", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    kinds: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "ops": lambda: of_ops(arguments.models),
        "tiles": lambda: of_tiles(arguments.models),
        "speed": lambda: of_speed(arguments.models, arguments.batch, arguments.context, kernels=arguments.kernels),
    }
    for what in arguments.what:
        for each in kinds[what]():
            print(json.dumps(each), flush=True)
            results.append(each)
    harness.keep(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
