"""MeshLM: an LLM serving engine built as a mesh of small processes.

The public Python API is `LLM` and `AsyncLLM` with the parameters that they take; everything else is the command line's and HTTP's.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]
_MODULES = {
    "AsyncEngineArgs": "arguments",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "beams",
    "EngineArgs": "arguments",
    "LLM": "llm",
    "LoRARequest": "lora",
    "PoolingParams": "vectors",
}

if TYPE_CHECKING:
    from meshlm.supervisor.api.async_llm import AsyncLLM
    from meshlm.supervisor.api.arguments import AsyncEngineArgs, EngineArgs
    from meshlm.supervisor.api.beams import BeamSearchParams
    from meshlm.supervisor.api.llm import LLM
    from meshlm.supervisor.api.lora import LoRARequest
    from meshlm.supervisor.api.sampling import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from meshlm.supervisor.api.vectors import PoolingParams


def __getattr__(name: str) -> Any:
    """Import the API when it is asked for: the processes import this package too and must stay small."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"meshlm.supervisor.api.{_MODULES.get(name, 'sampling')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
