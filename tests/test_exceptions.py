"""No exception object outlives what it ended: one that is raised again and again gets two traceback entries each time, and each holds a
frame with what the request brought. So none is made where a module or a class begins, none is raised from there, and each future gets
one of its own."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("architectures", "benchmarks", "coordinator", "deploy", "detokenizer", "frontend", "kernels"),
    *("protocol", "runtime", "scheduler_proc", "supervisor", "workers"),
)
# An attribute that is raised: whose it is, and why the object that has it lives no longer than the request.
RAISED_ATTRIBUTES = {
    "detokenizer/core.py": {"event.error"},  # an event is handled once
    "frontend/requests/beams.py": {
        "errors.exceptions[0]",
        "self.error",
    },  # of the group that was caught; of one step of one request
    "frontend/requests/generation.py": {"answer.error"},  # of one request
    "frontend/grpc/servicer.py": {"answer.error"},
    "frontend/rendering/routes.py": {"answer.error"},
    "frontend/responses_api/background.py": {"running.error"},
    "supervisor/api/async_llm.py": {"self.dead_error"},  # a property, which makes one
    "supervisor/api/background.py": {"errors[0]"},  # caught in the same call
    "supervisor/api/outputs.py": {"self._error"},  # of one request
}
Source = tuple[str, ast.Module]


def sources() -> list[Source]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))) for path in paths]


@pytest.fixture(scope="module")
def tree() -> list[Source]:
    return sources()


@pytest.fixture(scope="module")
def exceptions(tree: list[Source]) -> set[str]:
    """The names of all classes whose objects can be raised: Python's, and those that are derived from them here."""
    found = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    bases = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for _, module in tree
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    while new := {name for name, above in bases.items() if name not in found and found & {*above}}:
        found |= new
    return found


def made_at_import(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that run when the module is imported: those in no body of a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for outside in (child.args, *child.decorator_list):
                yield from made_at_import(outside)
        elif not isinstance(child, ast.Lambda):
            yield from made_at_import(child)


def names_of(call: ast.Call) -> set[str]:
    """What is called: of `HttpError.of` both words."""
    return set(ast.unparse(call.func).split("."))


def globals_raised(module: ast.Module, exceptions: set[str]) -> Iterator[ast.Raise]:
    """Raises of a name that no function around them binds."""

    def search(node: ast.AST, bound: set[str]) -> Iterator[ast.Raise]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            own |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            own |= {one.name for one in ast.walk(node) if isinstance(one, ast.ExceptHandler) and one.name}
            bound = bound | own
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id not in bound | exceptions:
            yield node
        for child in ast.iter_child_nodes(node):
            yield from search(child, bound)

    yield from search(module, set())


def test_none_is_made_when_a_module_is_imported(tree: list[Source], exceptions: set[str]) -> None:
    wrong = [
        f"{path}:{call.lineno}"
        for path, module in tree
        for statement in module.body
        if not isinstance(statement, ast.If) or "__main__" not in ast.unparse(statement.test)
        for call in made_at_import(ast.Module([statement], []))
        if names_of(call) & exceptions
    ]
    raised = {f"{path}:{one.lineno}" for path, module in tree for one in raised_at_import(module)}
    assert not set(wrong) - raised


def raised_at_import(module: ast.Module) -> Iterator[ast.Raise]:
    """A module that cannot be imported says so."""
    return (node for statement in module.body for node in ast.walk(statement) if isinstance(node, ast.Raise))


def test_none_is_raised_that_the_module_holds(tree: list[Source], exceptions: set[str]) -> None:
    assert not [f"{path}:{one.lineno}" for path, module in tree for one in globals_raised(module, exceptions)]


def test_what_is_raised_of_an_object_is_of_one_request(tree: list[Source]) -> None:
    found: dict[str, set[str]] = {}
    for path, module in tree:
        for node in ast.walk(module):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Attribute | ast.Subscript):
                found.setdefault(path, set()).add(ast.unparse(node.exc))
    assert found == RAISED_ATTRIBUTES


def test_each_future_gets_an_error_of_its_own(tree: list[Source]) -> None:
    def is_made_there(value: ast.expr) -> bool:
        return isinstance(value, ast.Call) or (
            isinstance(value, ast.IfExp) and is_made_there(value.body) and is_made_there(value.orelse)
        )

    calls = [
        (f"{path}:{node.lineno}", node.args[0])
        for path, module in tree
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set_exception"
    ]
    # What a thread has caught, for the one who waits for it: that loads the model, starts a process, calls a connector.
    of_one_future = {"workers/io.py", "runtime/sandbox/sandbox.py", "workers/kv/connector_thread.py"}
    found = {where.partition(":")[0] for where, value in calls if not is_made_there(value)}
    assert calls
    assert found == of_one_future
