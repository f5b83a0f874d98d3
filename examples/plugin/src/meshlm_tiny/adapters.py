"""A resolver of adapters: of the folder that MESHLM_TINY_ADAPTERS names, as tiny:NAME."""

import os
from pathlib import Path

from meshlm.runtime.adapter_resolvers import AdapterResolver


class TinyAdapters(AdapterResolver):
    def resolve(self, name: str) -> Path | None:
        kind, _, own = name.partition(":")
        folder = os.environ.get("MESHLM_TINY_ADAPTERS", "")
        return Path(folder, own) if kind == "tiny" and folder and own.isalnum() else None
