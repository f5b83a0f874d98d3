"""Plug-ins as installed packages: what they may add, which are loaded, and whose fault is said."""

import itertools
from array import array
from pathlib import Path

import pytest

from meshlm.architectures import registry
from meshlm.architectures.registry import families
from meshlm.frontend.observe.stat_loggers import StatLoggers
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import MeshStats
from meshlm.runtime import io_processors, plugins
from meshlm.runtime.plugins import ARCHITECTURES, BACKENDS, VARIABLE, PluginError

_numbers = itertools.count()
FAMILY = "from meshlm.architectures.llama import LLAMA\nFAMILY = LLAMA._replace(architecture={name!r})\n"


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", set())
    plugins._installed.cache_clear()
    monkeypatch.setattr(registry, "_FAMILIES", families())


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, group: str, name: str, source: str, attribute: str = "FAMILY") -> None:
        module = f"plugin_{next(_numbers)}"  # no two tests share one: Python keeps what it has imported
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


def test_a_family_is_registered_once(site: Site) -> None:
    site.install("first", ARCHITECTURES, "one", FAMILY.format(name="OneForCausalLM"))
    for _ in range(2):
        plugins.load_descriptions({})
    assert families()["OneForCausalLM"].model_type == "llama"


def test_the_variable_names_those_to_load(site: Site) -> None:
    site.install("first", ARCHITECTURES, "one", FAMILY.format(name="OneForCausalLM"))
    site.install("second", ARCHITECTURES, "two", FAMILY.format(name="TwoForCausalLM"))
    plugins.load_descriptions({VARIABLE: ""})
    assert not {"OneForCausalLM", "TwoForCausalLM"} & families().keys()
    plugins.load_descriptions({VARIABLE: " two "})
    assert {"OneForCausalLM", "TwoForCausalLM"} & families().keys() == {"TwoForCausalLM"}
    assert plugins.names(ARCHITECTURES, {VARIABLE: "one"}) == ["one"]
    with pytest.raises(PluginError, match=r"MESHLM_PLUGINS: no installed package has a plug-in three; there are \["):
        plugins.check_names({VARIABLE: "one,three"})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no such\\nlibrary')", "RuntimeError: no such"),
        ("FAMILY = 7", "TypeError: Family expected, got int"),
        ("", "AttributeError: module .* has no attribute 'FAMILY'"),
        (FAMILY.format(name="LlamaForCausalLM"), "ValueError: architecture LlamaForCausalLM is registered already"),
    ],
)
def test_whose_fault_it_is(site: Site, source: str, says: str) -> None:
    site.install("faulty", ARCHITECTURES, "one", source)
    with pytest.raises(PluginError, match=rf"^plug-in one \(faulty 1.2, group meshlm.architectures\): {says}$"):
        plugins.load_descriptions({})


def test_two_of_one_name(site: Site) -> None:
    for package in ("first", "second"):
        site.install(package, BACKENDS, "fast", "FAMILY = print")
    with pytest.raises(
        PluginError, match=r"plug-in fast .*: two packages have one of this name: first 1.2 and second 1.2"
    ):
        plugins.load(BACKENDS, {}, lambda name, found: None)


def test_what_hangs_at_its_import_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "LIMIT_S", 0.2)
    site.install("slow", ARCHITECTURES, "one", "import threading\nthreading.Event().wait(5)\nFAMILY = 1")
    with pytest.raises(PluginError, match=r"^plug-in one \(slow 1.2, group .*\): it has not been loaded within 0.2 s$"):
        plugins.load_descriptions({})


def test_what_ends_the_program_at_its_import_does_not(site: Site) -> None:
    site.install("rude", ARCHITECTURES, "one", "import sys\nsys.exit(3)")
    with pytest.raises(PluginError, match=r"plug-in one .*: SystemExit: 3"):
        plugins.load_descriptions({})


def test_general_plug_ins_are_called_once(site: Site) -> None:
    site.install(
        "kind", plugins.GENERAL, "one", "CALLS = []\ndef FAMILY():\n    CALLS.append(1)\n    assert CALLS == [1]"
    )
    for _ in range(2):
        plugins.run_general({})


def test_the_variable_of_vllm_counts_where_ours_is_not_set(site: Site) -> None:
    site.install("first", ARCHITECTURES, "one", "")
    assert plugins.names(ARCHITECTURES, {"VLLM_PLUGINS": ""}) == []
    assert plugins.names(ARCHITECTURES, {"VLLM_PLUGINS": "", VARIABLE: "one"}) == ["one"]


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, event: str, reason: str) -> None:
        self.lines.append(f"{event}: {reason}")


LOGGER = """
from meshlm.frontend.observe.stat_loggers import StatLogger
class FAMILY(StatLogger):
    def record(self, stats):
        raise RuntimeError("full disk")
"""


def test_stat_loggers_that_fail_are_left_out_with_a_line(site: Site) -> None:
    site.install("broken", plugins.STAT_LOGGERS, "cannot", "raise ImportError('no module')")
    site.install("wrong", plugins.STAT_LOGGERS, "kind", "FAMILY = 5")
    site.install("late", plugins.STAT_LOGGERS, "later", LOGGER)
    log = Log()
    loggers = StatLoggers(log)
    loggers.load(MeshConfig(), 0, {})
    assert len(log.lines) == 2
    assert loggers
    for _ in range(3):
        loggers.record(MeshStats(True))
    assert not loggers
    assert log.lines[2:] == ["stat logger left out: plug-in later: RuntimeError: full disk"]


PROCESSOR = """
from meshlm.runtime.io_processors import IOProcessor
class FAMILY(IOProcessor):
    def pre_process(self, data, request_id):
        return {"text": "a", "texts": ["a", "b"], "ids": [[1, 2]], "none": [], "mixed": ["a", [1]]}[data]
    def post_process(self, vectors, request_id):
        return vectors[0].nothing
"""


def test_io_processors(site: Site) -> None:
    site.install("pack", plugins.IO_PROCESSORS, "made", PROCESSOR)
    processor = io_processors.make("made", MeshConfig(), {})
    assert io_processors.known("made", {})
    assert not io_processors.known("other", {})
    for data, prompts in (("text", ["a"]), ("texts", ["a", "b"]), ("ids", [[1, 2]]), ("none", [])):
        assert io_processors.prompts_of(processor, data, "") == prompts
    with pytest.raises(io_processors.ProcessingError, match="texts and token ids are mixed"):
        io_processors.prompts_of(processor, "mixed", "")
    with pytest.raises(io_processors.ProcessingError, match="FAMILY failed: KeyError: 'cat'"):
        io_processors.prompts_of(processor, "cat", "")
    with pytest.raises(io_processors.ProcessingError, match="FAMILY failed: AttributeError"):
        io_processors.answer_of(processor, [array("f", [1.0])], "")
