"""Nothing in this tree unpickles: no source runs code from data."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
UNPICKLING_CALLS = {"recv_pyobj", "send_pyobj", "read_pickle", "send_serialized_pyobj"}
SOURCES = sorted(
    path
    for folder in ROOT.iterdir()
    if folder.is_dir() and not folder.name.startswith(".") and folder.name not in {"build", "dist", "src"}
    for path in folder.rglob("*.py")
) + sorted((ROOT / "src" / "meshlm").glob("*.py"))


def _keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword; None when it is absent, "?" when it is no constant."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else "?"
    return None


def _dotted(called: ast.expr) -> str:
    """`a.b.c` as it is written, behind whatever else it is an attribute of: unparsing every call takes as long as all the rest."""
    parts: list[str] = []
    while isinstance(called, ast.Attribute):
        parts.append(called.attr)
        called = called.value
    if isinstance(called, ast.Name):
        parts.append(called.id)
    return ".".join(reversed(parts))


def unpickling(source: str) -> list[str]:
    """What in this source could run code from data, as "line: text"."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        bad = False
        match node:
            case ast.Import(names=names):
                bad = any(alias.name.partition(".")[0] in UNPICKLERS for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                bad = module.partition(".")[0] in UNPICKLERS
                bad = bad or any(
                    alias.name in UNPICKLERS or f"{module}.{alias.name}" == "torch.load" for alias in names
                )
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[first, *_]):
                bad = isinstance(first, ast.Constant) and str(first.value).partition(".")[0] in UNPICKLERS
            case ast.Call(func=function):
                name = _dotted(function)
                bad = name.rpartition(".")[2] in UNPICKLING_CALLS
                bad = bad or (name == "torch.load" and _keyword(node, "weights_only") is not True)
                bad = bad or _keyword(node, "allow_pickle") not in (None, False)
        if bad:
            assert isinstance(node, ast.stmt | ast.expr)
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_source_unpickles() -> None:
    assert len(SOURCES) > 80
    found = {str(path.relative_to(ROOT)): bad for path in SOURCES if (bad := unpickling(path.read_text("utf-8")))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "def f():\n    from pickle import loads",
        "import marshal",
        "from multiprocessing.reduction import pickle",
        "__import__('pickle')",
        "importlib.import_module('dill')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_walk_sees(source: str) -> None:
    assert unpickling(source)


@pytest.mark.parametrize(
    "source",
    ["torch.load(path, weights_only=True)", "np.load(path)", "'import pickle'", "json.load(file)", "from . import a"],
)
def test_the_walk_lets_pass(source: str) -> None:
    assert not unpickling(source)
