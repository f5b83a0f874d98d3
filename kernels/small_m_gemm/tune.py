"""Finds where kernels/small_m_gemm makes a layer faster than cuBLAS does; keeps that in the tree.

    python -P -m meshlm.kernels.small_m_gemm.tune CONFIG.json ... [--folder DIR] [--json FILE]

CONFIG.json is a checkpoint's. What a kernel costs depends on those around it, so whole layers of decodes are timed: query, key and
value are a product, output and down projection parts, gate and up a gate; of a mixture of experts the router's product is parts, and
its experts are left out. One after the other each takes the shape with which the layer is the fastest, or stays cuBLAS's. Entries of
other sizes stay.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product as every
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.attention.bench import PAGE, columns
from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.tiles import decode_tiles
from meshlm.kernels.gemm import kernel as whole
from meshlm.kernels.gemm.tune import shapes
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.moe_routing.kernel import select_experts
from meshlm.kernels.moe_routing.reference import Rule
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.small_m_gemm.kernel import Key, Shape, small_m_gemm

ROWS = [8, 16, 32, 48, 64, 96, 128, 192, 256]
CONTEXT = 512
LAYERS = 8  # enough that weights, keys and values come from memory
ORDER = ["o", "down", "router", "qkv", "gate_up"]
USES = {"qkv": "product", "o": "parts", "gate_up": "gate", "down": "parts", "router": "parts"}
SPLITS = {"parts": (2, 4, 8, 16), "product": (1,), "gate": (1,)}
PROGRAMS = (48, 800)  # fewer leave multiprocessors idle, more come one after the other
FEW_PROGRAMS = 8  # of a product that is small whatever its shape
SHARED_BYTES = 200 << 10
TURNS = 3
TURN_S = 0.012
GAIN = 0.995  # of the layer's time, at most
Choice = dict[str, Shape | None]


def candidates(rows: int, key: Key) -> list[Shape]:
    outputs, inputs, use = key
    tiles = 2 if use == "gate" else 1
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    stages = (3,) if use == "parts" else (4,)
    fewest = PROGRAMS[0] if outputs >= 512 else FEW_PROGRAMS
    some = [Shape(block_m, *rest) for rest in every((32, 64, 128), (64, 128), SPLITS[use], (4,), stages)]
    return [
        shape
        for shape in some
        if shape.fits(outputs // tiles, inputs)
        and fewest <= outputs // tiles // shape.block_n * shape.splits * -(-rows // block_m) <= PROGRAMS[1]
        and (shape.block_m + tiles * shape.block_n) * shape.block_k * 2 * shape.stages <= SHARED_BYTES
    ]


def keys_of(config: dict[str, Any]) -> dict[str, Key]:
    """The products of a layer, by name."""
    sizes = dict(zip(("qkv", "o", "gate_up", "down"), shapes(config, 1), strict=True))
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        sizes = {"qkv": sizes["qkv"], "o": sizes["o"], "router": (experts, config["hidden_size"])}
    return {name: (*size, USES[name]) for name, size in sizes.items()}


@dataclass
class Layers:
    """Some layers of decodes, over and over."""

    config: dict[str, Any]
    rows: int
    weights: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = keys_of(self.config)
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [
            {name: torch.randn(n, k, **make) * 0.02 for name, (n, k, _) in self.keys.items()} for _ in range(LAYERS)
        ]
        heads = self.config["num_attention_heads"]
        kv_heads = self.config.get("num_key_value_heads", heads)
        self.dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        self.at, blocks = columns(self.rows, CONTEXT - 1, 1)
        self.caches = torch.randn(LAYERS, 2, blocks, PAGE, kv_heads, self.dim, **make)
        self.rope = Rope(torch.randn(CONTEXT, self.dim, device="cuda"), None, 1e-6, heads)
        self.tiles = decode_tiles(self.rows * kv_heads, 8192, self.caches.device, heads // kv_heads, self.dim)
        splits = self.tiles[0]
        self.workspace = (
            torch.empty(self.rows * heads * splits * self.dim, device="cuda"),
            torch.empty(self.rows * heads * splits * 2, device="cuda"),
            torch.zeros(self.rows * kv_heads, dtype=torch.int32, device="cuda"),
        )
        self.heads = torch.empty(self.rows, heads, self.dim, **make)
        self.residual = torch.zeros(self.rows, self.config["hidden_size"], **make)
        self.norm = torch.ones(self.config["hidden_size"], **make)
        self.x = torch.randn_like(self.residual)
        self.rule = Rule(self.config.get("num_experts_per_tok", 1), renormalise=True)

    def run(self, choice: Choice) -> None:
        x = self.x
        for weight, cache in zip(self.weights, self.caches, strict=True):
            qkv = self._product("qkv", add_rms_norm(x, self.residual, self.norm, 1e-6), weight, choice)
            splits, block_n, warps, stages = self.tiles
            decode(
                qkv, cache[0], cache[1], self.at, self.dim**-0.5, self.heads, self.workspace, splits, rope=self.rope,
                block_n=block_n, warps=warps, stages=stages,
            )  # fmt: skip
            x = self._product("o", self.heads.flatten(1), weight, choice)
            if "router" in self.keys:
                normed = add_rms_norm(x, self.residual, self.norm, 1e-6)
                select_experts(self._product("router", normed, weight, choice), self.rule)
                x = normed
                continue
            hidden = self._product("gate_up", add_rms_norm(x, self.residual, self.norm, 1e-6), weight, choice)
            hidden = hidden if choice.get("gate_up") else silu_mul(hidden)
            x = self._product("down", hidden, weight, choice)

    def _product(self, name: str, x: Tensor, weight: dict[str, Tensor], choice: Choice) -> Tensor:
        shape = choice.get(name)
        return whole.gemm(x, weight[name]) if shape is None else small_m_gemm(x, weight[name], shape, USES[name])

    def timed(self, choices: list[Choice]) -> list[float]:
        """Microseconds of one layer with each, medians, in turns."""
        with precompiled():
            for choice in choices:
                self.run(choice)
        graphs = []
        for choice in choices:
            self.run(choice)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self.run(choice)
        repeats = max(2, int(TURN_S * 1e6 / replay_us(graphs[0], 2)))
        turns = [[replay_us(graph, repeats) for graph in graphs] for _ in range(TURNS)]
        return [sorted(times)[TURNS // 2] / LAYERS for times in zip(*turns, strict=True)]

    def tune(self) -> Iterator[tuple[str, Shape | None, float, float]]:
        """Gives for each product its shape, and the layer's time with cuBLAS's and with this one."""
        chosen: Choice = {}
        for name in filter(self.keys.__contains__, ORDER):
            found = candidates(self.rows, self.keys[name])
            usual, *times = self.timed([chosen, *({**chosen, name: shape} for shape in found)])
            best = min(times, default=usual)
            if best <= GAIN * usual:
                chosen[name] = found[times.index(best)]
            yield name, chosen.get(name), usual, best


def entries(found: dict[int, Shape | None]) -> list[list[Any]]:
    """The entries of a table: by rows the shape. Rows between two sizes are the larger one's."""
    sizes = sorted(found)
    return [
        [before, rows, list(shape)]
        for before, rows in zip([1, *sizes], sizes, strict=False)
        if (shape := found[rows]) is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/small_m_gemm/tables")
    parser.add_argument("--json", help="the times")
    arguments = parser.parse_args()
    known = (tables.own("small_m_gemm") or {"products": []})["products"]
    kept = {(each["outputs"], each["inputs"], each["use"]): each for each in known}
    report = []
    for path in arguments.configs:
        config = json.loads(path.read_text())
        found: dict[Key, dict[int, Shape | None]] = {}
        for rows in arguments.rows:
            layers = Layers(config, rows)
            for name, shape, usual, best in layers.tune():
                found.setdefault(layers.keys[name], {})[rows] = shape
                times = {"layer_us": round(usual, 2), "with_it_us": round(best, 2)}
                report.append({"model": path.parent.name, "rows": rows, "product": name, **times, "shape": shape})
                print(json.dumps(report[-1]), flush=True)
        for key, by_rows in found.items():
            kept[key] = {**dict(zip(("outputs", "inputs", "use"), key, strict=True)), "rows": entries(by_rows)}
        tables.write("small_m_gemm", {"products": [kept[each] for each in sorted(kept)]}, arguments.folder)
    keep(report, arguments.json)


if __name__ == "__main__":
    main()
