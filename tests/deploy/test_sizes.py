"""deploy/sizes.py: the tree's budget of lines."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / "deploy/sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree(sizes: ModuleType, root: Path, product: int, benchmarks: int) -> Path:
    for name in (*sizes.PRODUCT, "benchmarks"):
        (root / name / "room").mkdir(parents=True)
        (root / name / "one.py").write_text("1\n" * 2)
        (root / name / "room" / "two.py").write_text("1\n" * 3)
    (root / "pyproject.toml").write_text(f"[tool.meshlm.lines]\nproduct = {product}\nbenchmarks = {benchmarks}\n")
    return root


def test_what_is_above_its_budget_is_named(sizes: ModuleType, tmp_path: Path) -> None:
    (over,) = sizes.exceeded(tree(sizes, tmp_path, 59, 5))
    assert over.startswith("product: 60 lines of Python, 1 above the budget of 59 in pyproject.toml")
    (tmp_path / "kernels" / "one.py").write_text("1\n")
    assert list(sizes.exceeded(tmp_path)) == []


def test_each_budget_counts(sizes: ModuleType, tmp_path: Path) -> None:
    (over,) = sizes.exceeded(tree(sizes, tmp_path, 60, 4))
    assert over.startswith("benchmarks: 5 lines")


def test_rooms_are_counted(sizes: ModuleType, tmp_path: Path) -> None:
    assert sizes.lines_of(tree(sizes, tmp_path, 60, 5) / "workers") == {".": 2, "room": 3}


def test_this_tree_has_all_folders(sizes: ModuleType) -> None:
    report = list(sizes.report(ROOT))
    assert [line.split()[0] for line in report] == [*sizes.PRODUCT, "tests", "benchmarks"]
