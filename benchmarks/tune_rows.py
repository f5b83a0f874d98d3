"""Measures the products of one row of models of shapes.py on this GPU, for the tables of the tree.

    python -P benchmarks/tune_rows.py [NAME ...] --tuning-dir DIR [--minutes 8]
    python -P -m meshlm.kernels.tuning.commit DIR

It does for many models, without loading them, what `meshlm tune MODEL` does for one row of one.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes

from meshlm.kernels import tables
from meshlm.kernels.gemv.kernel import most_bytes
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.products import ProductBench, Setting
from meshlm.kernels.tuning.store import Store
from meshlm.workers.cuda.tuning import versions

BYTES = 2  # of a weight's number: bfloat16


def products_of(config: dict[str, Any]) -> set[tuple[int, int, bool]]:
    """Outputs, inputs, and whether a gate of silu is in the kernel, of a dense model's layers and head."""
    hidden, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = config.get("head_dim") or hidden // heads
    qkv = (heads + 2 * config["num_key_value_heads"]) * head_dim
    silu = config.get("hidden_act", config.get("hidden_activation")) == "silu"
    gate_up = (inner, hidden, True) if silu and "hidden_activation" not in config else (2 * inner, hidden, False)
    found = {(qkv, hidden, False), (hidden, heads * head_dim, False), gate_up, (hidden, inner, False)}
    return found | {(config["vocab_size"], hidden, False)}


def asked(names: list[str]) -> list[tuple[str, core.Key]]:
    """What no table of this processor has, of weights that the kernel is used for."""
    for name in names:
        for outputs, inputs, gate in products_of(shapes.config_of(name)):
            if BYTES * outputs * inputs * (2 if gate else 1) <= most_bytes():
                tables.ask("gemv", (outputs, inputs, gate))
    return tables.asked()


def main() -> None:
    dense = [name for name, (_, _, own) in shapes.SHAPES.items() if "num_experts" not in own]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=dense, metavar="NAME")
    parser.add_argument("--tuning-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--quick", action="store_true", help="six tiles of each instead of some twenty")
    given = parser.parse_args()
    if unknown := set(given.names) - set(dense):
        parser.error(f"no dense models of shapes.py are {', '.join(sorted(unknown))}; there are {', '.join(dense)}")
    store = Store(given.tuning_dir, {"gpu": tables.this_gpu(), **versions()}, print)
    device, end = torch.device("cuda"), time.monotonic() + 60 * given.minutes
    bench = ProductBench(Setting(device, torch.bfloat16, 1, full=not given.quick))
    for op, entry in store.load():
        tables.add([(op, entry)])
    wanted = asked(given.names)
    print(f"{len(wanted)} products", flush=True)

    def keep(op: str, entry: tables.Table) -> None:
        store.keep(op, entry)
        print(f"{time.monotonic() - end + 60 * given.minutes:.0f} s", entry, flush=True)

    outcome = core.tune(wanted, bench, tables.added, keep, lambda: end - time.monotonic())
    print(f"{outcome.done} measured, {outcome.left} left")


if __name__ == "__main__":
    main()
