"""The parsers by their names for --tool-call-parser and --reasoning-parser: MeshLM's own, and those of plug-ins and files.

The supervisor loads them to check the names, the frontend to use them.
"""

import importlib.util
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

from meshlm.runtime import plugins
from meshlm.runtime.parsers import reasoning
from meshlm.runtime.parsers.calls import ToolParser
from meshlm.runtime.parsers.reasoning import ReasoningParser


class ToolParsers(MutableMapping[str, ToolParser]):
    """Parsers by name. One of our own is given by its module in parsers/tools, which is imported when the parser is asked for."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._found: dict[str, ToolParser | str] = dict(modules)

    def __getitem__(self, name: str) -> ToolParser:
        found = self._found[name]
        if isinstance(found, str):
            parser: ToolParser = import_module(f"meshlm.runtime.parsers.tools.{found}").PARSERS[name]
            self._found[name] = found = parser
        return found

    def __setitem__(self, name: str, parser: ToolParser) -> None:
        self._found[name] = parser

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


MODULES = {  # of tools/, and the names of their PARSERS
    "apertus": "apertus",
    "deepseek": "deepseek_v3 deepseek_v31",
    "gemma": "functiongemma gemma gemma4",
    "json_lists": "cohere_command3 cohere_command4 gigachat3 granite hunyuan_a13b jamba minimax phi4_mini_json xlam",
    "json_objects": "ernie45 granite-20b-fc granite4 hermes internlm llama3_json llama4_json longcat",
    "kimi_k2": "kimi_k2",
    "mistral": "mistral",
    "openai": "openai",
    "parameters": (
        "deepseek_v32 deepseek_v4 glm45 glm47 hy_v3 mimo minicpm5 minimax_m2 poolside_v1 qwen3_coder qwen3_xml seed_oss "
        "step3 step3p5"
    ),
    "pythonic": "lfm2 llama4_pythonic olmo3 pythonic",
}
TOOL_PARSERS: MutableMapping[str, ToolParser] = ToolParsers(
    {name: module for module, names in MODULES.items() for name in names.split()}
)
REASONING_PARSERS: dict[str, ReasoningParser] = dict(reasoning.FORMATS)
_loaded_files: set[tuple[str, str]] = set()  # with the variable that was read, in this process
NOT_THERE = {  # vLLM's that cannot be
    "inkling": "its prompts are made by code of vLLM's own",
    "minimax_m3": "its calls are read by compiled code of vLLM's own",
}
HARMONY = "openai"  # the parser of calls that needs a reasoning parser of channels, as that does it


class ParserError(Exception):
    """No such parser, or a file that cannot be used; one line."""


def load(environment: Mapping[str, str], tool_file: str, reasoning_file: str) -> None:
    """Add the parsers of plug-ins and of the files of --tool-parser-plugin and --reasoning-parser-plugin. PluginError, ParserError."""
    plugins.load(plugins.TOOL_PARSERS, environment, lambda name, found: _add(TOOL_PARSERS, ToolParser, name, found))
    plugins.load(
        plugins.REASONING_PARSERS,
        environment,
        lambda name, found: _add(REASONING_PARSERS, ReasoningParser, name, found),
    )
    _add_file(TOOL_PARSERS, ToolParser, tool_file, "--tool-parser-plugin", "TOOL_PARSERS")
    _add_file(REASONING_PARSERS, ReasoningParser, reasoning_file, "--reasoning-parser-plugin", "REASONING_PARSERS")


def check_pair(tool_name: str, reasoning_name: str) -> None:
    """ParserError where only one of two names is of harmony's channels, which hold reasoning and calls alike."""
    if not tool_name or (tool_name == HARMONY) == (bool(reasoning_name) and reasoning_parser(reasoning_name).channels):
        return
    raise ParserError(
        f"--tool-call-parser {tool_name} with --reasoning-parser {reasoning_name or 'none'}: the channels of gpt-oss need "
        f"--tool-call-parser {HARMONY} and --reasoning-parser openai_gptoss"
    )


def is_own(tool_parser: str, reasoning_parser: str) -> bool:
    """Whether these names, where they are not empty, are those of MeshLM's own parsers: `load` would bring nothing for them."""
    own = reasoning_parser in ("", *REASONING_PARSERS) or reasoning.between(reasoning_parser) is not None
    return own and tool_parser in ("", *TOOL_PARSERS)


def tool_parser(name: str) -> ToolParser:
    """The parser of this name. ParserError."""
    return _named(TOOL_PARSERS, name, "--tool-call-parser")


def tags_of_calls(name: str) -> tuple[str, ...]:
    """The tags of the parser of this name, which the detokenizer must show; none without a parser."""
    return tool_parser(name).tags if name else ()


def reasoning_parser(name: str) -> ReasoningParser:
    """The parser of this name, or the one that it spells out. ParserError."""
    return reasoning.between(name) or _named(REASONING_PARSERS, name, "--reasoning-parser")


_Parser = TypeVar("_Parser", ToolParser, ReasoningParser)


def _named(known: MutableMapping[str, _Parser], name: str, flag: str) -> _Parser:
    if (found := known.get(name)) is not None:
        return found
    why = f"{NOT_THERE[name]}; " if name in NOT_THERE else ""
    raise ParserError(f"{flag} {name}: {why}there are {', '.join(sorted(known))}")


def _add(known: MutableMapping[str, _Parser], kind: type[_Parser], name: str, found: Any) -> None:
    if not isinstance(found, kind):
        raise TypeError(f"{kind.__name__} expected, got {type(found).__name__}")
    if known.get(name, found) != found:
        raise ValueError(f"there is a parser {name} already")
    known[name] = found


def _add_file(known: MutableMapping[str, _Parser], kind: type[_Parser], path: str, flag: str, variable: str) -> None:
    """The parsers that a Python file has in a dict of this name."""
    if not path or (path, variable) in _loaded_files:
        return
    try:
        spec = importlib.util.spec_from_file_location(f"meshlm_plugin_{variable.lower()}", path)
        if spec is None or spec.loader is None:
            raise ValueError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, variable, None)
        if not isinstance(found, dict) or not found:
            raise ValueError(f"it has no dict {variable} of names and parsers (docs/tool-calling.md)")
        for name, parser in found.items():
            _add(known, kind, str(name), parser)
    except Exception as error:  # a user's file may raise anything, and the user must read whose it is
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ParserError(f"{flag} {path}: {what}") from None
    _loaded_files.add((path, variable))
