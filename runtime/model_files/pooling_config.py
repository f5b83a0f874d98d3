"""How a model's files and the user say that its vectors are made: sentence-transformers' modules, and vLLM's pooler config.

The supervisor reads it once (supervisor/settings/resolve.py). ModelFilesError names what cannot be honoured. Imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from meshlm.architectures.config_values import shown
from meshlm.architectures.family import Serves, stem_of
from meshlm.architectures.registry import serves
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.pooling import DenseSpec, PoolingSpec, PoolingTask
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import read_json, read_text

Convert = Literal["embed", "classify"]
SequenceKind = Literal["CLS", "LAST", "MEAN"]
_POOLING_TYPES = ("pooling_type", "seq_pooling_type", "tok_pooling_type")  # auto: what the model's files say
_MODES = {"cls_token": PoolKind.CLS, "mean_tokens": PoolKind.MEAN, "lasttoken": PoolKind.LAST}
_TRANSFORMER, _POOLING, _NORMALIZE, _DENSE = "Transformer", "Pooling", "Normalize", "Dense"
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


class PoolerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """--pooler-config, with vLLM's names."""

    task: PoolingTask | None = None
    pooling_type: Literal["CLS", "LAST", "MEAN", "ALL", "STEP"] | None = None
    seq_pooling_type: SequenceKind | None = None
    tok_pooling_type: Literal["ALL", "STEP"] | None = None
    use_activation: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    enable_chunked_processing: bool = False
    max_embed_len: Annotated[int, Meta(ge=1)] | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None
    returned_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)] | None = None


class SentenceTransformer(Struct, frozen=True, kw_only=True):
    """What the module files of sentence-transformers say."""

    kind: PoolKind | None = None  # None: the tokens' vectors are not pooled (ColBERT)
    normalize: bool = False
    dense: tuple[DenseSpec, ...] = ()
    max_tokens: int = 0
    lower_case: bool = False
    prompts: dict[str, str] = {}


def read_pooler_config(text: str) -> PoolerConfig:
    """ModelFilesError names the field at fault."""
    try:
        said = msgspec.json.decode(text or "{}")
        if isinstance(said, dict):
            said = {name: value for name, value in said.items() if not (name in _POOLING_TYPES and value == "auto")}
        found = msgspec.convert(said, PoolerConfig)
    except msgspec.MsgspecError as error:
        raise ModelFilesError(f"--pooler-config: {error}") from None
    given = [name for name in _POOLING_TYPES if getattr(found, name)]
    if "pooling_type" in given and len(given) > 1:
        raise ModelFilesError(f"--pooler-config: pooling_type and {given[1]} exclude each other")
    if found.logit_sigma == 0:
        raise ModelFilesError("--pooler-config: logit_sigma must not be 0")
    of_steps = {"step_tag_id": found.step_tag_id is not None, "returned_token_ids": bool(found.returned_token_ids)}
    wrong = next((name for name, is_given in of_steps.items() if is_given), "")
    if wrong and "STEP" not in (found.pooling_type, found.tok_pooling_type):
        raise ModelFilesError(f"--pooler-config: {wrong} needs pooling_type STEP")
    return found


def with_head_of(config: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a model that gives text as that of a classifier whose logits are those of these tokens. ModelFilesError."""
    names, own = config.get("architectures"), "--pooler-config: returned_token_ids"
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not stem_of(name):
        raise ModelFilesError(f"{own}: they are tokens of a model that gives text; {name or 'this'} is none")
    if config.get("classifier_from_token"):
        raise ModelFilesError(f"{own}: it does not go with classifier_from_token")
    name = f"{stem_of(name)}ForSequenceClassification"
    return {**config, "architectures": [name], "classifier_from_token": list(token_ids)}


def of_folder(path: Path) -> SentenceTransformer | None:
    """What modules.json and the folders that it names say; None for a model of transformers alone. ModelFilesError."""
    if not (path / "modules.json").is_file():
        return None
    try:
        modules = msgspec.json.decode(read_text(path / "modules.json"), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelFilesError(f"{path}/modules.json: {error}") from None
    found = SentenceTransformer()
    dense: list[DenseSpec] = []
    for module in sorted(modules, key=lambda one: int(one.get("idx", 0))):
        kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if folder.startswith("/") or ".." in folder:
            raise ModelFilesError(f"{path}/modules.json: {shown(folder)} is no folder of this model")
        match kind:
            case "Transformer" | "MLMTransformer":
                found = _of_transformer(path / folder, found)
            case "Pooling":
                found = msgspec.structs.replace(found, kind=_kind(path / folder / "config.json"))
            case "SpladePooling":
                _check_splade(path / folder / "config.json")
                found = msgspec.structs.replace(found, kind=PoolKind.SPLADE)
            case "Normalize":
                found = msgspec.structs.replace(found, normalize=True)
            case "Dense":
                dense.append(_dense(path, folder))
            case _:
                raise ModelFilesError(f"{path}/modules.json: module {shown(module.get('type'))} is not supported")
    prompts: dict[str, str] = {}
    if (path / "config_sentence_transformers.json").is_file():
        given = read_json(path / "config_sentence_transformers.json").get("prompts") or {}
        prompts = {str(name): str(text) for name, text in given.items()} if isinstance(given, dict) else {}
    return msgspec.structs.replace(found, dense=tuple(dense), prompts=prompts)


def of_gguf(path: Path, fields: Mapping[str, Any]) -> SentenceTransformer | None:
    """What llama.cpp's pooling_type says; None where it says nothing. Vectors have the length 1, as its server gives them.

    ModelFilesError."""
    key = f"{fields['general.architecture']}.pooling_type"
    kind = fields.get(key, 0)
    if type(kind) is not int or kind not in range(4):
        raise ModelFilesError(f"{path}: {key} {shown(kind)} is not supported; 0 to 3 are (none, mean, cls, last)")
    kinds = {1: PoolKind.MEAN, 2: PoolKind.CLS, 3: PoolKind.LAST}
    return SentenceTransformer(kind=kinds[kind], normalize=True) if kind else None


def _of_transformer(folder: Path, found: SentenceTransformer) -> SentenceTransformer:
    names = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return found
    config = read_json(file)
    longest = config.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelFilesError(f"{file}: max_seq_length must be a positive integer, got {shown(longest)}")
    return msgspec.structs.replace(found, max_tokens=longest or 0, lower_case=bool(config.get("do_lower_case")))


def _kind(file: Path) -> PoolKind:
    config = read_json(file)
    modes = [
        name.removeprefix("pooling_mode_")
        for name, on in config.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else modes  # newer files name it
    kinds = {**_MODES, "cls": PoolKind.CLS, "mean": PoolKind.MEAN}
    if len(modes) != 1 or modes[0] not in kinds:
        said = ", ".join(modes) or "nothing"
        raise ModelFilesError(f"{file}: pooling by {said} is not supported; one of {', '.join(_MODES)} is")
    return kinds[modes[0]]


def _check_splade(file: Path) -> None:
    """ModelFilesError for a form of SPLADE that is not computed."""
    config = read_json(file)
    of, act = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if (of, act) != ("max", "relu"):
        raise ModelFilesError(f"{file}: pooling_strategy {shown(of)} of {shown(act)} is not supported; max of relu is")


def _dense(path: Path, folder: str) -> DenseSpec:
    file = path / folder / "config.json"
    config = read_json(file)
    act = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelFilesError(f"{file}: activation_function {shown(act)} is not supported; supported: {known}")
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 1:
        raise ModelFilesError(f"{file}: in_features and out_features must be positive integers")
    return DenseSpec(folder=folder, inputs=inputs, outputs=outputs, bias=config.get("bias", True) is not False, act=act)


def pooling_spec(
    spec: ModelSpec, config: dict[str, Any], modules: SentenceTransformer | None, pooler: PoolerConfig, convert: Convert
) -> PoolingSpec:
    """What the model serves. config: its config.json. ModelFilesError."""
    what = serves(spec)
    kind = PoolKind.CLS if spec.encoder_only else PoolKind.LAST
    if spec.head is not None and config.get("classifier_pooling") == "mean":
        kind = PoolKind.MEAN
    if modules is not None and modules.kind is not None:
        kind = modules.kind
    asked = pooler.seq_pooling_type or pooler.pooling_type
    if asked not in (None, "ALL", "STEP"):
        kind = PoolKind(str(asked).lower())
    every = bool({"ALL", "STEP"} & {pooler.pooling_type, pooler.tok_pooling_type})
    every = every or str(pooler.task).startswith("token")
    every = every or (what is Serves.REWARDS and asked is None and pooler.task is None)
    if convert != "classify" and (pooler.logit_mean is not None or pooler.logit_sigma is not None):
        raise ModelFilesError("--pooler-config: logit_mean and logit_sigma are of a classifier; the model embeds")
    if modules is not None and modules.kind is PoolKind.SPLADE and spec.lexical != "splade":
        flag = """--hf-overrides '{"architectures": ["BertSpladeSparseEmbeddingModel"]}'"""
        raise ModelFilesError(f"modules.json: SpladePooling needs {flag}; {spec.architecture} has none")
    if spec.lexical == "splade":
        if asked is not None or every or pooler.dimensions is not None or (modules is not None and modules.dense):
            raise ModelFilesError("--pooler-config: SPLADE gives one weight for each token, and nothing else")
        kind = PoolKind.SPLADE
    unpooled = (modules is not None and modules.kind is None) or spec.projection > 0
    dense = modules.dense if modules is not None and convert == "embed" else ()
    if convert == "classify":
        if spec.head is None:
            raise ModelFilesError(f"--convert classify: {spec.architecture} has no classifier")
        tasks: tuple[PoolingTask, ...] = ("classify", "token_classify")
        tasks = tasks[1:] if what is Serves.TOKEN_CLASSES else tasks
        size = spec.head.num_labels
    else:
        tasks = ("token_embed",) if unpooled else ("embed", "token_embed")
        sizes = [spec.projection or spec.hidden_size, *(one.outputs for one in dense)]
        for one, before in zip(dense, sizes, strict=False):
            if one.inputs != before:
                file = f"{one.folder}/config.json"
                raise ModelFilesError(f"{file}: in_features is {one.inputs}, and {before} numbers come in")
        size = sizes[-1]
        if spec.lexical == "splade":
            tasks, size = ("embed",), spec.vocab_size
        elif spec.lexical == "bge-m3":
            tasks = (*tasks, "token_classify")
    tasks = tuple(sorted(tasks, key=lambda task: not task.startswith("token"))) if every else tasks
    if pooler.task is not None and pooler.task not in tasks:
        raise ModelFilesError(f"--pooler-config: the model has no task {pooler.task}; it has {', '.join(tasks)}")
    own = modules is not None and convert == "embed" and modules.kind is not None
    activation = modules.normalize if own and modules is not None else True
    if spec.lexical == "splade":
        activation = False
    labels = config.get("id2label") if spec.head is not None and not spec.head.token_ids else None
    cuts = config.get("matryoshka_dimensions") or ()
    if not isinstance(cuts, list | tuple) or not all(type(one) is int and 0 < one <= size for one in cuts):
        raise ModelFilesError(f"matryoshka_dimensions must be a list of integers up to {size}, got {shown(cuts)}")
    if pooler.dimensions is not None and pooler.dimensions > size:
        raise ModelFilesError(f"--pooler-config: dimensions {pooler.dimensions}: an embedding has {size} numbers")
    return PoolingSpec(
        tasks=tasks,
        kind=kind,
        activation=activation if pooler.use_activation is None else pooler.use_activation,
        size=size,
        matryoshka=bool(config.get("is_matryoshka")) or bool(cuts),
        matryoshka_dimensions=tuple(cuts),
        dimensions=pooler.dimensions or 0,
        dense=tuple(dense),
        prompts=modules.prompts if modules is not None else {},
        lower_case=modules is not None and modules.lower_case,
        labels=_labels(labels),
        max_tokens=modules.max_tokens if modules is not None else 0,
        chunks=pooler.enable_chunked_processing,
        max_embed_len=pooler.max_embed_len or 0,
        logit_mean=pooler.logit_mean or 0.0,
        logit_sigma=1.0 if pooler.logit_sigma is None else pooler.logit_sigma,
        edges=_edges(spec, config),
        step_tag_id=_step_tag(spec, pooler),
    )


def _step_tag(spec: ModelSpec, pooler: PoolerConfig) -> int:
    """The token whose vectors alone are given; -1: all tokens' are."""
    if pooler.step_tag_id is not None:
        return pooler.step_tag_id
    return -1 if spec.head is None or "ALL" in (pooler.pooling_type, pooler.tok_pooling_type) else spec.head.step_tag_id


def _edges(spec: ModelSpec, config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The special tokens without vectors: BGE-M3's <s> has none for late interaction, and neither it nor </s> has a weight."""
    if spec.lexical != "bge-m3":
        return {}
    begin, end = (one if type(one := config.get(name)) is int else -1 for name in ("bos_token_id", "eos_token_id"))
    return {"token_embed": (begin, -1), "token_classify": (begin, end)}


def _labels(given: Any) -> tuple[str, ...]:
    """Names of classes in order; none where the file does not name them all."""
    if not isinstance(given, dict):
        return ()
    found = {int(key): str(name) for key, name in given.items() if str(key).isdecimal()}
    return tuple(found[place] for place in range(len(found))) if set(found) == set(range(len(found))) else ()
