"""What a detokenizer would refuse at its start, for `meshlm serve --dry-run` (runtime/process/checking.py)."""

from meshlm.detokenizer.io import encoder_of
from meshlm.protocol.config import MeshConfig
from meshlm.runtime.process.checking import answer


def check(config: MeshConfig) -> None:
    """ProcessFatal for a vocabulary or a chat template that cannot be used."""
    encoder_of(config)


if __name__ == "__main__":
    answer(check)
