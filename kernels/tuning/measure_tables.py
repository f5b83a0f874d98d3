"""Measures this GPU's table of an operation's tiles, by its records, and keeps it in the tree.

    python -P -m meshlm.kernels.tuning.measure_tables OP ... [--folder DIR]

Every candidate is timed on every case that the record names for it; `kernels/<op>/table.py` makes the table of the times.
"""

import argparse
import json
from importlib import import_module
from pathlib import Path

from meshlm.kernels import tables
from meshlm.kernels.bench import times_of
from meshlm.kernels.op import Case, Op, Tile, records
from meshlm.kernels.precompile import precompiled

TUNED = ("attention", "gemv", "mla")


def times(op: Op) -> dict[Case, dict[Tile, float]]:
    """Microseconds of all candidates, by case; those of a case are compiled several at a time."""
    found = {}
    for case in op.tuned:
        with precompiled():
            times_of(op, case, compiles=True)
        found[case] = times_of(op, case)
        fastest = sorted(found[case].items(), key=lambda one: one[1])[:4]
        print(
            json.dumps({"kernel": op.name, "case": str(case), "best": [[str(t), round(us, 2)] for t, us in fastest]}),
            flush=True,
        )
    return found


def measure(name: str, folder: Path | None) -> Path:
    """Writes the table, and gives its path."""
    found = {op.name: times(op) for op in records(name) if op.tuned}
    make = import_module(f"meshlm.kernels.{name}.table").table
    return tables.write(name, make(found, tables.this_gpu()["multiprocessors"]), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ops", nargs="+", choices=TUNED)
    parser.add_argument("--folder", type=Path, help="of the tables; default: tables/ beside each operation")
    arguments = parser.parse_args()
    for name in arguments.ops:
        print(measure(name, arguments.folder))


if __name__ == "__main__":
    main()
