"""Who may import whom (DESIGN, section 1), read from the sources; and no pickle anywhere."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROCESSES = ("frontend", "coordinator", "scheduler_proc", "workers", "detokenizer", "store", "mediaproc", "supervisor")
ALLOWED: dict[str, set[str]] = {
    "protocol": {"protocol"},
    "architectures": {"architectures", "protocol"},
    "runtime": {"runtime", "architectures", "protocol"},
    "kernels": {"kernels"},
    **{name: {name, "runtime", "architectures", "protocol"} for name in PROCESSES},
}
ALLOWED["workers"].add("kernels")
NO_TORCH = (
    "protocol",
    "architectures",
    "runtime",
    "frontend",
    "coordinator",
    "scheduler_proc",
    "detokenizer",
    "store",
    "supervisor",
)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_imports_only_what_it_may(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "meshlm" and len(parts) > 1 and parts[1] != "__version__":
                assert parts[1] in ALLOWED[folder], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", NO_TORCH)
def test_no_torch_outside_workers_and_kernels(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        heavy = {name.split(".")[0] for name in imports(path)} & {"torch", "triton", "transformers"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_protocol_imports_msgspec_and_the_standard_library_only() -> None:
    for path in (ROOT / "protocol").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names | {"msgspec", "meshlm"}, f"{path.name} imports {name}"


def test_no_pickle() -> None:
    pattern = re.compile(r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve)\b|recv_pyobj|send_pyobj", re.M)
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(path.read_text("utf-8")), path


@pytest.mark.parametrize("name", [*PROCESSES[:-1], "supervisor"])
def test_a_process_imports_nothing_heavy_at_its_start(name: str) -> None:
    """In a fresh interpreter, as the mesh starts it. The supervisor is `meshlm serve`."""
    begin = f"from meshlm.runtime.process import entry; sys.argv = ['', '{name}', str(os.getppid()), '--help']; entry.main()"
    if name == "supervisor":
        begin = "from meshlm.supervisor.cli.main import main; main(['serve', '--help'])"
    heavy = {"torch", "triton", "numpy", "transformers", "openai", "httpx", "rich"}
    if name != "supervisor":  # which needs them to resolve the model; a worker imports what its device needs
        heavy |= {"meshlm.architectures", "importlib.metadata"}
    found = f"print(sorted({heavy} & {{name for name, module in sys.modules.items() if module}}))"
    script = f"import atexit, os, sys; atexit.register(lambda: {found}); {begin}"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.endswith("\n[]\n"), done.stdout[-500:]


def test_a_worker_on_a_cpu_needs_no_triton() -> None:
    """Builds of torch for CPUs come without it, and to import it takes a third of a second."""
    methods = " ".join(f"import meshlm.workers.formats.{name};" for name in ("eight_bits", "packed", "expert_codes"))
    script = f"import sys; sys.modules['triton'] = None; import meshlm.workers.engine.make; {methods}"
    script += (
        "from meshlm.workers.layers.cpu_ops import CpuOps; from meshlm.workers.attention.cpu_backend import CpuBackend"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd="/")


@pytest.mark.parametrize(
    ("statement", "folder", "loaded"),
    [
        (
            "from meshlm.architectures import registry; registry.family_of('Gemma2ForCausalLM')",
            "architectures",
            {"gemma"},
        ),
        (
            "from meshlm.architectures import registry; registry.gguf_family({'general.architecture': 'llama'})",
            "architectures",
            {"llama"},
        ),
        (
            "from meshlm.runtime.parsers import registry; registry.tool_parser('pythonic')",
            "runtime.parsers.tools",
            {"pythonic"},
        ),
        ("import meshlm.frontend.main", "runtime.parsers.tools", set()),
        ("import meshlm.supervisor.settings.resolve", "architectures", set()),
    ],
)
def test_of_many_kinds_the_one_asked_for_is_imported(statement: str, folder: str, loaded: set[str]) -> None:
    kinds = {
        path.stem
        for path in (ROOT / folder.replace(".", "/")).glob("*.py")
        if re.search(r"^(FAMILY|FAMILIES|PARSERS)\b", path.read_text(), re.M)
    }
    assert len(kinds) > 8
    script = f"import sys; {statement}; print(*(name for name in sys.modules if name.startswith('meshlm.{folder}.')))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert {name.rpartition(".")[2] for name in done.stdout.split()} & kinds == loaded


def test_nobody_asks_a_kv_spec_for_its_kind() -> None:
    """A spec owns its policy: no isinstance and no case outside protocol/kv.py."""
    kinds = "FullAttention|SlidingWindow|ChunkedAttention|Latent|EncoderOnly|CrossAttention|RecurrentState"
    asked = re.compile(rf"isinstance\([^)]*\b({kinds})\b|\bcase ({kinds})\(")
    assert asked.search("if isinstance(spec, SlidingWindow):")
    for folder in ("scheduler_proc", "workers", "coordinator", "supervisor"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not asked.search(path.read_text("utf-8")), path


@pytest.mark.parametrize("folder", ["coordinator", "detokenizer", "frontend"])
def test_rooms_import_in_one_direction(folder: str) -> None:
    """The rooms of a folder stand in an order: each imports those below it. What is in no room is the process's own wiring."""
    rooms = {path.name for path in (ROOT / folder).iterdir() if (path / "__init__.py").exists()}
    above: dict[str, set[str]] = {}
    for room in rooms:
        found = [name.split(".") for path in (ROOT / folder / room).rglob("*.py") for name in imports(path)]
        above[room] = {name[2] for name in found if name[:2] == ["meshlm", folder] and len(name) > 2} & rooms - {room}
    while lowest := {room for room, others in above.items() if not others & above.keys()}:
        for room in lowest:
            del above[room]
    assert not above, "these rooms import each other, or those that do"
