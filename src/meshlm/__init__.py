"""MeshLM: an LLM serving engine built as a mesh of small processes.

The public Python API is `LLM` and the parameters that it takes; everything else is the command line's and HTTP's.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from meshlm.supervisor.api.llm import (
        LLM,
        BeamSearchParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )


def __getattr__(name: str) -> Any:
    """Import the API when it is asked for: the processes import this package too and must stay small."""
    if name in __all__:
        from meshlm.supervisor.api import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
