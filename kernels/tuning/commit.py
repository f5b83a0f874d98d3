"""Takes what `meshlm tune --tuning-dir DIR` has measured into the tables of the tree, for sizes that these lack.

    python -P -m meshlm.kernels.tuning.commit DIR [--into FOLDER]

A table of the tree counts for all versions of its GPU, so this is for who keeps the tree. Where cuBLAS won at one row the table of gemv
has no tile.
"""

import argparse
import json
from pathlib import Path

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm.plan import decoded
from meshlm.kernels.tables import Table
from meshlm.kernels.tuning.core import OPERATIONS

OF_TUNER = ("measured", "full")  # what a table of the tree does not hold


def merged(op: str, tree: Table, found: Table) -> Table:
    """The table of the tree with what was found for other sizes."""
    where = OPERATIONS[op].in_tree
    known = tree.get(where, [])
    have = {tables.key_of(entry) for entry in known if "way" not in entry}
    new = [_for_tree(op, entry) for entry in found["products"] if tables.key_of(entry) not in have]
    return {**tree, where: [*known, *(entry for entry in new if entry)]}


def _for_tree(op: str, entry: Table) -> Table:
    if op == "grouped_gemm":
        plans = [(over, to, decoded(config)) for over, to, config in entry["rows"]]
        rows = [[over, to, kind, list(gate), list(down)] for over, to, (kind, gate, down) in plans]
        return {**{name: entry[name] for name in OPERATIONS[op].key}, "rows": rows} if rows else {}
    if op != "gemv":
        return {name: value for name, value in entry.items() if name not in OF_TUNER}
    key = {name: entry[name] for name in OPERATIONS[op].key}
    return {**key, "tile": entry["rows"][0][2] if entry["rows"] else []}


def commit(folder: Path, into: Path) -> list[Path]:
    """Writes the tables, and gives their paths. A gemv of a GPU without a table stays out: it needs one of classes first."""
    written = []
    for op in OPERATIONS:
        for path in sorted((folder / op / "tables").glob("*.json")):
            found, target = json.loads(path.read_text("utf-8")), into / op / "tables" / path.name
            if op == "gemv" and not target.exists():
                continue
            head = {name: found[name] for name in ("gpu", "torch", "triton")}
            tree = json.loads(target.read_text("utf-8")) if target.exists() else {**head, OPERATIONS[op].in_tree: []}
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(merged(op, tree, found), indent=1) + "\n")
            written.append(target)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=tables.FOLDER)
    arguments = parser.parse_args()
    for path in commit(arguments.folder, arguments.into):
        print(path)


if __name__ == "__main__":
    main()
