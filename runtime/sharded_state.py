"""What is asked of the process that saves a worker's weights (workers/weights/sharded_state.py)."""

from msgspec import Struct

from meshlm.protocol.config import MeshConfig


class Request(Struct, frozen=True):
    """One rank, of the numbers below tensor-parallel times pipeline-parallel size."""

    config: MeshConfig
    rank: int
    folder: str
    max_bytes: int
