"""A stat logger: lines of JSON about requests that ended and about the mesh, in the file of MESHLM_TINY_FIGURES."""

import os

import msgspec

from meshlm.frontend.observe.stat_loggers import EndedRequest, StatLogger
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import MeshStats


class Figures(StatLogger):
    def __init__(self, config: MeshConfig, index: int) -> None:
        self._path = os.environ.get("MESHLM_TINY_FIGURES", "")
        self._index = index

    def record(self, stats: MeshStats) -> None:
        if self._index == 0:  # the others would say the same
            self._write({"running": sum(rank.num_running for rank in stats.ranks)})

    def ended(self, request: EndedRequest) -> None:
        self._write({"path": request.path, "output_tokens": request.output_tokens, "frontend": self._index})

    def _write(self, line: dict[str, object]) -> None:
        if self._path:
            with open(self._path, "ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
