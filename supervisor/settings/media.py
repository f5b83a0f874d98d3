"""Whether the images of a model that sees can be served as it is started; where not, the model is served as its text model."""

from importlib.util import find_spec

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.model_files.model_files import ModelFiles


def settled(config: MeshConfig, files: ModelFiles) -> tuple[ModelFiles, list[str]]:
    """The files of a model that takes only what its workers can encode, and what to tell the user."""
    why = _why_blind(config, files)
    if files.spec.media is None or not why:
        return files, []
    return replace(files, spec=replace(files.spec, media=None)), [f"{files.path}: images are refused: {why}"]


def _why_blind(config: MeshConfig, files: ModelFiles) -> str:
    """Empty: they can be served."""
    if config.worker.device == "fake":
        return ""
    if config.parallel.pipeline_parallel_size > 1:
        return "the stages of a pipeline have no encoder; use --tensor-parallel-size"
    if files.load_format == "sharded_state":
        return "--load-format sharded_state has no weights of an encoder"
    if find_spec("transformers") is None:
        return "the transformers package, whose encoders compute them, is not installed"
    return ""
