"""Plug-ins: installed packages that add an architecture, a quantisation, an attention backend, a parser and more by an entry point.

A process loads the groups that it reads before it reads them: the supervisor to resolve a model, the workers to compute it. An entry
point of `meshlm.architectures` names a `Family`, one of `meshlm.quantization` a `QuantizationFormat`, one of
`meshlm.attention_backends` whatever makes a `Backend`; there its own name is the one for --attention-backend. One of
`meshlm.tool_parsers` names a `ToolParser`, one of `meshlm.reasoning_parsers` a `ReasoningParser` (parsers/registry.py loads them in the
supervisor and the frontends); their names are those for --tool-call-parser and --reasoning-parser. One of
`meshlm.logits_processors` names a `LogitsProcessor` (logits_processors.py loads it), one of `meshlm.io_processors` an `IOProcessor`
(io_processors.py), one of `meshlm.stat_loggers` a `StatLogger` (frontend/observe/stat_loggers.py), one of `meshlm.platforms` a
`Platform` (platforms.py), one of `meshlm.drafters` what makes a `Drafter` (workers/speculative/drafters.py; its name is the method of
--speculative-config), one of `meshlm.kv_connectors` what makes a `Connector`
(workers/kv/connectors.py), one of `meshlm.lora_resolvers` an `AdapterResolver` (adapter_resolvers.py), one of
`meshlm.endpoints` a class of `Endpoints` (frontend/endpoints.py), and one of `meshlm.general` a function that every process calls
before anything else. MESHLM_PLUGINS (or VLLM_PLUGINS) names those to load (commas between); without
it all are.

A plug-in's import has LIMIT_S: what hangs is named. It happens in a thread, which is left behind then.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VARIABLE, VARIABLE_OF_VLLM = "MESHLM_PLUGINS", "VLLM_PLUGINS"
LIMIT_S = 30.0  # shorter than a process may be silent while it starts
ARCHITECTURES, QUANTIZATION, BACKENDS = "meshlm.architectures", "meshlm.quantization", "meshlm.attention_backends"
TOOL_PARSERS, REASONING_PARSERS = "meshlm.tool_parsers", "meshlm.reasoning_parsers"
LOGITS_PROCESSORS = "meshlm.logits_processors"
IO_PROCESSORS, STAT_LOGGERS, GENERAL = "meshlm.io_processors", "meshlm.stat_loggers", "meshlm.general"
PLATFORMS, DRAFTERS, KV_CONNECTORS = "meshlm.platforms", "meshlm.drafters", "meshlm.kv_connectors"
ENDPOINTS, LORA_RESOLVERS = "meshlm.endpoints", "meshlm.lora_resolvers"
OF_VLLM = ("lora_filesystem_resolver",)  # which is no plug-in here, but a flag: --lora-resolver-dir
GROUPS = (
    *(ARCHITECTURES, QUANTIZATION, BACKENDS, TOOL_PARSERS, REASONING_PARSERS),
    *(
        LOGITS_PROCESSORS,
        IO_PROCESSORS,
        STAT_LOGGERS,
        GENERAL,
        PLATFORMS,
        DRAFTERS,
        KV_CONNECTORS,
        ENDPOINTS,
        LORA_RESOLVERS,
    ),
)
_loaded: set[tuple[str, str]] = set()  # group and name, in this process


class PluginError(Exception):
    """A plug-in cannot be used; one line that names its package and entry point."""


def names(group: str, environment: Mapping[str, str]) -> list[str]:
    """The plug-ins of this group that may be loaded."""
    return [point.name for point in _chosen(group, environment)]


def values(group: str, environment: Mapping[str, str]) -> list[str]:
    """What the plug-ins of this group name, `module:attribute`, for processes that load it themselves."""
    return [point.value for point in _chosen(group, environment)]


def check_names(environment: Mapping[str, str]) -> None:
    """PluginError for a name in MESHLM_PLUGINS that no installed package has, and for a plug-in of a kind that there is not."""
    allowed, installed = _allowed(environment), _installed(tuple(sys.path))
    for group in installed.keys() - set(GROUPS):
        for point in _chosen(group, environment):
            there = ", ".join(GROUPS)
            raise PluginError(
                f"plug-in {point.name} ({_package(point)}, group {group}): no such group; there are {there}"
            )
    if not allowed:
        return
    known = {point.name for group in GROUPS for point in installed[group]}
    for name in allowed:
        if name not in known and name not in OF_VLLM:
            raise PluginError(f"{VARIABLE}: no installed package has a plug-in {name}; there are {sorted(known)}")


def load_descriptions(environment: Mapping[str, str]) -> None:
    """Architectures and quantisations, which the supervisor and the workers read alike. PluginError."""
    from meshlm.architectures import quantization, registry  # the frontend, which reads parsers alone, does without
    from meshlm.architectures.family import Family
    from meshlm.architectures.quantization import QuantizationFormat

    load(ARCHITECTURES, environment, lambda name, found: registry.register(_of_type(found, Family)))
    load(QUANTIZATION, environment, lambda name, found: quantization.register(_of_type(found, QuantizationFormat)))


def run_general(environment: Mapping[str, str]) -> None:
    """Call the functions of `meshlm.general`, once in a process. PluginError."""
    load(GENERAL, environment, lambda name, found: found())


def load(group: str, environment: Mapping[str, str], register: Callable[[str, Any], None], only: str = "") -> None:
    """Give each plug-in of a group, or the one called `only`, to `register`, once in a process. PluginError for what that or the import
    raises, and for one that takes too long."""
    for point in _chosen(group, environment):
        if only in ("", point.name):
            _load(group, point, register)


def load_those_that_can(group: str, environment: Mapping[str, str], register: Callable[[str, Any], None]) -> list[str]:
    """As `load`, for plug-ins without which the service is the same: why the others were left out."""
    problems = []
    for point in _chosen(group, environment):
        try:
            _load(group, point, register)
        except PluginError as error:
            problems.append(str(error))
    return problems


def _load(group: str, point: "EntryPoint", register: Callable[[str, Any], None]) -> None:
    if (group, point.name) in _loaded:
        return
    failures: list[BaseException] = []

    def work() -> None:
        try:
            register(point.name, point.load())
        except (Exception, SystemExit) as error:  # a plug-in may raise anything, and the user must read whose it is
            failures.append(error)

    thread = threading.Thread(target=work, name=f"plug-in {point.name}", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    what = f"it has not been loaded within {LIMIT_S:g} s" if thread.is_alive() else ""
    for error in failures:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
    if what:
        raise PluginError(f"plug-in {point.name} ({_package(point)}, group {group}): {what}")
    _loaded.add((group, point.name))


@cache
def _installed(path: tuple[str, ...]) -> "dict[str, list[EntryPoint]]":
    """The entry points of all packages by group, read once in a process: 4 ms for 100 packages, and 9 to import what reads them.

    Groups that only begin as ours do are there too, for `check_names`."""
    from importlib.metadata import entry_points

    found = entry_points()
    groups = {*GROUPS, *(group for group in found.groups if group.startswith("meshlm."))}
    return {group: list(found.select(group=group)) for group in groups}


def _chosen(group: str, environment: Mapping[str, str]) -> "list[EntryPoint]":
    allowed = _allowed(environment)
    found: dict[str, EntryPoint] = {}
    for point in sorted(_installed(tuple(sys.path))[group], key=lambda point: (point.name, point.value)):
        if allowed is not None and point.name not in allowed:
            continue
        if (other := found.get(point.name)) is not None:
            both = f"{_package(other)} and {_package(point)}"
            raise PluginError(f"plug-in {point.name} (group {group}): two packages have one of this name: {both}")
        found[point.name] = point
    return list(found.values())


def _allowed(environment: Mapping[str, str]) -> set[str] | None:
    value = environment.get(VARIABLE, environment.get(VARIABLE_OF_VLLM))
    return None if value is None else {name.strip() for name in value.split(",") if name.strip()}


def _package(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _of_type(found: Any, kind: type[Any]) -> Any:
    if not isinstance(found, kind):
        raise TypeError(f"{kind.__name__} expected, got {type(found).__name__}")
    return found
