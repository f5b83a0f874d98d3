"""Whether a model serves text or vectors, and which flags go with vectors. Called by resolve.py. UsageError."""

from meshlm.architectures.family import Serves
from meshlm.architectures.registry import serves
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.pooling import PoolingSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import pooling_config
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings import flag_rules
from meshlm.supervisor.settings.rules import check

_TASKS = {"embedding": "embed", "score": "classify"}


def pooling_of(config: MeshConfig, files: ModelFiles) -> PoolingSpec | None:
    """What the model's vectors are; None where it serves text."""
    runner, convert = _asked(config)
    spec, made_for_vectors = files.spec, _for_vectors(files)
    if runner == "generate" and made_for_vectors == "only":
        raise UsageError(f"--runner generate: {spec.architecture} gives vectors, and no text; use pooling")
    if runner == "generate" or (runner == "auto" and not made_for_vectors):
        if config.model.pooler_config:
            raise UsageError("--pooler-config: it needs --runner pooling")
        return None
    if convert == "reward" and spec.head is None:
        raise UsageError(f"--convert reward: {spec.architecture} has no head for rewards; use embed")
    wanted = ("classify" if spec.head is not None else "embed") if convert in ("auto", "none") else convert
    with raised_as(UsageError, ModelFilesError):
        pooler = pooling_config.read_pooler_config(config.model.pooler_config)
        kind: pooling_config.Convert = "embed" if wanted == "embed" else "classify"
        found = pooling_config.pooling_spec(spec, files.config, files.modules, pooler, kind)
    check(flag_rules.vectors(config, spec))
    return found


def head_tokens(config: MeshConfig) -> tuple[int, ...]:
    """returned_token_ids of --pooler-config, whose logits are the scores of a model that gives text. UsageError, ModelFilesError."""
    runner, convert = _asked(config)
    if runner != "pooling":
        return ()
    found = tuple(pooling_config.read_pooler_config(config.model.pooler_config).returned_token_ids or ())
    if found and convert == "embed":
        raise UsageError("--pooler-config: returned_token_ids makes scores, and does not go with --convert embed")
    return found


def _asked(config: MeshConfig) -> tuple[str, str]:
    """--runner and --convert, or what --task stands for."""
    model = config.model
    runner, convert = str(model.runner), str(model.convert)
    if model.task != "auto":
        by_task = "generate" if model.task == "generate" else "pooling"
        if runner not in ("auto", by_task):
            raise UsageError(f"--task {model.task}: it is --runner {by_task}, not {runner}")
        runner, convert = by_task, _TASKS.get(model.task, model.task) if by_task == "pooling" else convert
    if convert in ("embed", "classify", "reward"):
        if runner == "generate":
            raise UsageError(f"--convert {convert}: it needs --runner pooling")
        runner = "pooling"
    return runner, convert


def _for_vectors(files: ModelFiles) -> str:
    """ "only": it can give nothing else; "first": its files say that vectors are what it is for; "": text."""
    if serves(files.spec) in (Serves.VECTORS, Serves.CLASSES, Serves.TOKEN_CLASSES, Serves.REWARDS):
        return "only"
    return "first" if files.modules is not None else ""
