"""Plug-ins as installed packages: what they may add, which are loaded, and whose fault is said."""

import itertools
from pathlib import Path

import pytest

from meshlm.architectures import registry
from meshlm.architectures.registry import families
from meshlm.runtime import plugins
from meshlm.runtime.plugins import ARCHITECTURES, BACKENDS, VARIABLE, PluginError

_numbers = itertools.count()
FAMILY = "from meshlm.architectures.llama import FAMILY as LLAMA\nFAMILY = LLAMA._replace(architecture={name!r})\n"


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
