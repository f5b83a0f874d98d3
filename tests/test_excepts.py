"""Whoever catches everything raises it again, prints it, or says in a comment why nothing narrower would do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("architectures", "benchmarks", "coordinator", "detokenizer", "frontend", "kernels"),
    *("protocol", "runtime", "scheduler_proc", "store", "supervisor", "workers"),
)
BROAD = {"Exception", "BaseException"}


def broad(path: Path) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds):
                yield node


def is_told(handler: ast.ExceptHandler) -> bool:
    """It is raised again, or printed: tuners and benches leave out what cannot be launched."""
    return any(
        (isinstance(node, ast.Raise) and node.exc is None) or (isinstance(node, ast.Name) and node.id == "print")
        for node in ast.walk(handler)
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_who_catches_everything_says_why(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        lines = path.read_text("utf-8").splitlines()
        wrong += [
            f"{path.relative_to(ROOT)}:{handler.lineno}"
            for handler in broad(path)
            if "  # " not in lines[handler.lineno - 1] and not is_told(handler)
        ]
    assert not wrong
