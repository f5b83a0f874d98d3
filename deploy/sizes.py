"""Lines of Python by folder, and whether they are within the budget of the tree (pyproject.toml, [tool.meshlm.lines]).

    python -P deploy/sizes.py [--check]

Exit code 1 with --check when a budget is exceeded. `make sizes` and `make check` call it.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PRODUCT = (
    *("architectures", "coordinator", "detokenizer", "frontend", "kernels"),
    *("mediaproc", "protocol", "runtime", "scheduler_proc", "store", "supervisor", "workers"),
)


def lines_of(folder: Path) -> dict[str, int]:
    """Room -> lines; the folder's own files are the room "." """
    found: dict[str, int] = {}
    for file in sorted(folder.rglob("*.py")):
        room = file.relative_to(folder).parts[0] if file.parent != folder else "."
        found[room] = found.get(room, 0) + file.read_bytes().count(b"\n")
    return found


def report(root: Path) -> Iterator[str]:
    """A line for each folder, with its rooms, the largest first."""
    for name in (*PRODUCT, "tests", "benchmarks"):
        rooms = lines_of(root / name)
        largest = sorted(rooms.items(), key=lambda room: -room[1])
        yield f"{name:16} {sum(rooms.values()):7,}  " + ", ".join(f"{room} {count:,}" for room, count in largest)


def exceeded(root: Path) -> Iterator[str]:
    """What is above its budget."""
    budget = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["meshlm"]["lines"]
    product = sum(sum(lines_of(root / name).values()) for name in PRODUCT)
    for name, count in (("product", product), ("benchmarks", sum(lines_of(root / "benchmarks").values()))):
        if count > budget[name]:
            yield (
                f"{name}: {count:,} lines of Python, {count - budget[name]:,} above the budget of {budget[name]:,} in "
                "pyproject.toml [tool.meshlm.lines]: make it smaller, or raise the budget there with a reason"
            )


def main() -> None:
    root = Path(__file__).parents[1]
    if "--check" not in sys.argv[1:]:
        print("\n".join(report(root)))
    if over := list(exceeded(root)):
        print("\n".join(over), file=sys.stderr)
    sys.exit(bool(over) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
