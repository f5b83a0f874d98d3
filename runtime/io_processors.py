"""Plug-ins for inputs and outputs that are no texts and no vectors (--io-processor-plugin): their interface, and how one is made.

A model of vectors (--runner pooling) serves them at POST /pooling, where the body's `data` is the plug-in's and the answer's `data` its
own; `LLM.encode({"data": ...})` likewise. Frontends and `LLM` make one; the mesh behind them sees prompts and gives vectors.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import plugins

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class IOProcessor(ABC):
    """What an entry point of `meshlm.io_processors` names: a class. Its methods are called in threads, several at a time."""

    def __init__(self, config: MeshConfig) -> None:
        self.config = config

    def parse_data(self, data: Any) -> Any:
        """Check the client's `data`, as JSON has it, and give it to pre_process. ValueError: the client gets 400 with its text."""
        return data

    @abstractmethod
    def pre_process(self, data: Any, request_id: str) -> Prompts:
        """The prompts: texts or token ids. ValueError as above."""

    @abstractmethod
    def post_process(self, vectors: "Sequence[array[float]]", request_id: str) -> Any:
        """The answer's `data`, of JSON's types, from the vectors of the prompts, in their order."""


_classes: dict[str, type[IOProcessor]] = {}  # by name, in this process


class ProcessingError(Exception):
    """A plug-in's own fault; one line that names it."""


def known(name: str, environment: Mapping[str, str]) -> bool:
    """Whether an installed package has one of this name that may be loaded."""
    return name in plugins.names(plugins.IO_PROCESSORS, environment)


def make(name: str, config: MeshConfig, environment: Mapping[str, str]) -> IOProcessor:
    def register(name: str, found: Any) -> None:
        if not (isinstance(found, type) and issubclass(found, IOProcessor)):
            raise TypeError("a class of IOProcessor is expected")
        _classes[name] = found

    plugins.load(plugins.IO_PROCESSORS, environment, register, only=name)
    try:
        return _classes[name](config)
    except Exception as error:  # a plug-in may raise anything, and the user must read whose it is
        text = f"plug-in {name} (group {plugins.IO_PROCESSORS}): {type(error).__name__}: {error}"
        raise plugins.PluginError(text.splitlines()[0]) from error


def prompts_of(processor: IOProcessor, data: Any, request_id: str) -> list[str] | list[list[int]]:
    """What a client's data is for the model. ValueError for the client, ProcessingError."""
    try:
        found = processor.pre_process(processor.parse_data(data), request_id)
    except ValueError:
        raise
    except Exception as error:  # a plug-in may raise anything, and the user must read whose it is
        raise ProcessingError(_blame(processor, error)) from error
    if isinstance(found, str):
        return [found]
    texts = [one for one in found if isinstance(one, str)]
    if texts and len(texts) != len(found):
        raise ProcessingError(_blame(processor, TypeError("texts and token ids are mixed")))
    return texts or [list(one) for one in found if not isinstance(one, str)]


def answer_of(processor: IOProcessor, vectors: "Sequence[array[float]]", request_id: str) -> Any:
    """The answer's data. ProcessingError."""
    try:
        return processor.post_process(vectors, request_id)
    except Exception as error:  # a plug-in may raise anything, and the user must read whose it is
        raise ProcessingError(_blame(processor, error)) from error


def _blame(processor: IOProcessor, error: Exception) -> str:
    what = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    return f"the I/O processor {type(processor).__module__}.{type(processor).__name__} failed: {what}"
