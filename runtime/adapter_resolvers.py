"""What finds the folder of an adapter by the name that a request gives: a folder of adapters, and plug-ins.

With --enable-lora and --allow-runtime-lora-updating a frontend asks them, in order, for a model's name that nobody has; the folder that
the first of them knows is loaded under that name, as POST /v1/load_lora_adapter would. An entry point of `meshlm.lora_resolvers` names
a class of `AdapterResolver`. Called by the frontend (requests/resolving.py); the supervisor checks that they can be had.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import plugins

CONFIG = "adapter_config.json"  # of each adapter; what reads it knows all families of models, which no frontend's start needs


class AdapterResolver(ABC):
    """What an entry point names: a class. `resolve` is called in threads, several at a time."""

    def __init__(self, config: MeshConfig) -> None:
        self.config = config

    @abstractmethod
    def resolve(self, name: str) -> Path | None:
        """The folder of the adapter of this name, which a client gave and may be anything; None: it knows none."""


class FolderResolver(AdapterResolver):
    """--lora-resolver-dir: the folders in one folder, by their names."""

    def resolve(self, name: str) -> Path | None:
        words = name.split("/")
        if any(word in ("", ".", "..") for word in words) or not name.isprintable():
            return None  # nothing outside of it
        folder = Path(self.config.adapters.lora_resolver_dir).joinpath(*words)
        try:
            return folder if (folder / CONFIG).is_file() else None
        except OSError:  # a name that is too long
            return None


def make(config: MeshConfig, environment: Mapping[str, str]) -> tuple[AdapterResolver, ...]:
    """Those that there are, by the settings and as installed; none where adapters do not come while the mesh serves. PluginError."""
    if not (config.adapters.enable_lora and config.adapters.allow_runtime_lora_updating):
        return ()
    found: list[AdapterResolver] = [FolderResolver(config)] if config.adapters.lora_resolver_dir else []
    for name, kind in _classes(environment).items():
        try:
            found.append(kind(config))
        except Exception as error:  # a plug-in may raise anything, and the user must read whose it is
            text = f"plug-in {name} (group {plugins.LORA_RESOLVERS}): {type(error).__name__}: {error}"
            raise plugins.PluginError(text.splitlines()[0]) from error
    return tuple(found)


_known: dict[str, type[AdapterResolver]] = {}  # by name, in this process


def _classes(environment: Mapping[str, str]) -> dict[str, type[AdapterResolver]]:
    def register(name: str, found: Any) -> None:
        if not (isinstance(found, type) and issubclass(found, AdapterResolver)):
            raise TypeError("a class of AdapterResolver is expected")
        _known[name] = found

    plugins.load(plugins.LORA_RESOLVERS, environment, register)
    return _known
