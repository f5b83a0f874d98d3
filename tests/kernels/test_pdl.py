"""Kernels that begin while the one before them runs (kernels/pdl.py): what they owe it and the one behind, read from their source.

A GPU that computes right has not shown it: what is written too early is seldom read in time.
"""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
WRITES = ("store", "send", "atomic_add", "atomic_xchg", "atomic_cas", "atomic_max", "atomic_min")
Function = ast.FunctionDef


def calls(function: Function) -> list[tuple[int, str]]:
    """Lines and names of what is called; `pdl.follow` stands for the two instructions in it."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [(call.lineno, ast.unparse(call.func)) for call in found]
    both = [
        (line, one) for line, name in names if name == "pdl.follow" for one in ("gdc_launch_dependents", "gdc_wait")
    ]
    return sorted([*((line, name.rsplit(".", 1)[-1]) for line, name in names), *both])


def functions(path: Path) -> dict[str, Function]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, Function)}


def early() -> list[tuple[Path, str]]:
    """Kernels that let the one behind them begin."""
    return [
        (path, name)
        for path in sorted(KERNELS.glob("*/*.py"))
        for name, function in functions(path).items()
        if any(called == "gdc_launch_dependents" for _, called in calls(function))
    ]


def waits(known: dict[str, Function]) -> set[str]:
    """What waits for the kernel before: the instruction, and functions beside the kernel in which it stands."""
    return {"gdc_wait"} | {name for name, one in known.items() if any(called == "gdc_wait" for _, called in calls(one))}


def test_a_kernel_that_follows_waits() -> None:
    """Behind the instruction by which the next one begins."""
    follow = functions(KERNELS / "pdl.py")["follow"]
    assert [name for _, name in calls(follow)] == ["gdc_launch_dependents", "gdc_wait"]
    assert not [node for node in ast.walk(follow) if isinstance(node, ast.Return)]


@pytest.mark.parametrize(
    ("path", "name"), early(), ids=lambda value: value if isinstance(value, str) else value.parent.name
)
def test_nothing_is_written_before_the_kernel_before_has_ended(path: Path, name: str) -> None:
    """Memory is used again within a step: what is written here, an earlier kernel may still be reading."""
    known = functions(path)
    waiting = waits(known) - {name}
    first_wait = min((line for line, called in calls(known[name]) if called in waiting), default=None)
    assert first_wait is not None, "the kernel behind this one counts on its wait"
    for line, called in calls(known[name]):
        assert called not in WRITES or line > first_wait, f"{called} in line {line} stands before the wait"
    for helper in waiting & {called for _, called in calls(known[name])} & known.keys():
        inside = calls(known[helper])
        wait = next(line for line, called in inside if called == "gdc_wait")
        assert all(called not in WRITES or line > wait for line, called in inside)


def test_no_program_ends_without_having_waited() -> None:
    """A return before the wait would let the kernel behind begin too early, whose own wait is for this one only."""
    found = early()
    assert len(found) >= 8
    for path, name in found:
        known = functions(path)
        waiting = waits(known) - {name}
        wait = min(line for line, called in calls(known[name]) if called in waiting)
        returns = [node.lineno for node in ast.walk(known[name]) if isinstance(node, ast.Return)]
        assert all(line > wait for line in returns), (path.parent.name, name)
